"""Streams of random numbers that belong to layers, with the CPU's generator in CUDA's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.layerwise import megatron as layerwise
from megatron_pipemem.features.layerwise.megatron import LayerwiseRandom, derived
from megatron_pipemem.mcore import loop_arguments


@pytest.fixture(autouse=True)
def tracker(monkeypatch):
    """Megatron's tracker, seeded, on tensor-parallel rank 0 of the one rank there is."""
    for name in ("manual_seed", "get_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.default_generator, name.replace("rng_", "")))
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **_: torch.get_rng_state())
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state))
    for kind in ("tensor_model_parallel", "expert_model_parallel", "expert_tensor_parallel"):
        monkeypatch.setattr(parallel_state, f"get_{kind}_rank", lambda: 0)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", random.CudaRNGStatesTracker())
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    state = torch.get_rng_state()
    for name in (random._DATA_PARALLEL_RNG_TRACKER_NAME, random._MODEL_PARALLEL_RNG_TRACKER_NAME):
        random.get_cuda_rng_tracker().add(name, len(name))
    yield random.get_cuda_rng_tracker()
    torch.set_rng_state(state)


class Layer(torch.nn.Module):
    """Draws one number as it is, and one of the tensor-parallel rank's."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError
        own = torch.rand(())
        with random.get_cuda_rng_tracker().fork():
            return x * torch.stack([own, torch.rand(())])


def layer(number: int, by_shard: bool = False) -> Layer:
    made = Layer()
    layerwise._draw_by_key(made, by_shard, "layer", number)
    return made


def drawn(module: torch.nn.Module, microbatch: int) -> list[float]:
    with layerwise._within(derived(microbatch)):
        return module(torch.ones(2)).tolist()


def test_numbers_belong_to_layer_and_microbatch_whatever_ran_before():
    first, second = layer(1), layer(2)
    in_order = [drawn(module, microbatch) for microbatch in (0, 1) for module in (first, second)]
    torch.rand(7)
    assert [drawn(module, microbatch) for module in (layer(1), second) for microbatch in (1, 0)] == [
        in_order[2],
        in_order[0],
        in_order[3],
        in_order[1],
    ]
    assert len({number for pair in in_order for number in pair}) == 8


def test_what_others_draw_is_not_disturbed(tracker):
    module, states = layer(1), tracker.get_states()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    drawn(module, 0)
    module.fails = True
    with pytest.raises(ArithmeticError):
        drawn(module, 0)
    assert torch.equal(torch.rand(3), expected)
    assert tracker.get_states().keys() == states.keys()
    assert all(torch.equal(state, states[name]) for name, state in tracker.get_states().items())


def test_evaluation_draws_from_megatrons_streams():
    module = layer(1).eval()
    assert drawn(module, 0) != drawn(module, 0)


def test_sharded_activations_draw_by_shard(monkeypatch):
    by_rank = []
    for rank in (0, 1):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        by_rank.append([*drawn(layer(1), 0), *drawn(layer(1, by_shard=True), 0)])
    (own, forked, sharded, _), (other_own, other_forked, other_sharded, _) = by_rank
    assert own == other_own and forked != other_forked and sharded != other_sharded


def test_a_model_that_draws_otherwise_and_a_loop_without_seed_are_refused(monkeypatch):
    def forward(model):
        return LayerwiseRandom()._forward_step(lambda *_, **__: "ran", None, None, model, current_microbatch=0)

    with refused("enabled-too-late", kind=UnsupportedError):
        forward(torch.nn.Linear(2, 2))
    assert forward(torch.nn.Linear(2, 2).eval()) == "ran"
    monkeypatch.setattr(loop_arguments, "_arguments", lambda: None)
    with refused("needs-megatron-loop", kind=UnsupportedError):
        loop_arguments.iteration_and_seed()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (SimpleNamespace(is_inference_rng_tracker=False), ("unsupported-setting", "--te-rng-tracker")),
        (
            random.CudaRNGStatesTracker(is_inference_rng_tracker=True),
            ("unsupported-setting", "--inference-rng-tracker"),
        ),
    ],
)
def test_other_trackers_are_refused(monkeypatch, other, words):
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", other)
    with refused(*words, kind=UnsupportedError):
        layerwise._check(SimpleNamespace())
