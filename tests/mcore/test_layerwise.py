"""What random numbers of layers refuse. The numbers that layers draw: tests/end_to_end/test_layerwise.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs the [megatron] extra")

from megatron.core.tensor_parallel import random  # noqa: E402

from megatron_pipemem.errors import UnsupportedError  # noqa: E402
from megatron_pipemem.features.layerwise import megatron as layerwise  # noqa: E402
from megatron_pipemem.features.layerwise.megatron import LayerwiseRandom  # noqa: E402
from megatron_pipemem.mcore import loop_arguments  # noqa: E402


@pytest.fixture(autouse=True)
def tracker(monkeypatch):
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", random.CudaRNGStatesTracker())
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)


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
    ("config", "words"),
    [
        ({"cuda_graph_impl": "local"}, ("unsupported-setting", "--cuda-graph-impl")),
        ({"overlap_moe_expert_parallel_comm": True}, ("unsupported-setting", "--overlap-moe-expert-parallel-comm")),
        ({"init_model_with_meta_device": True}, ("unsupported-setting", "--init-model-with-meta-device")),
        ({"gtp_weight_remat_size": 2}, ("unsupported-setting", "--tensor-parallel-num-weight-shards")),
    ],
)
def test_refused_configurations_name_the_way_out(config, words):
    layerwise._check(SimpleNamespace(cuda_graph_impl="none", gtp_weight_remat_size=1))
    with refused(*words, kind=UnsupportedError):
        layerwise._check(SimpleNamespace(**config))


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
