"""What vocabulary parallelism asks of the user's forward step, of flags and of models."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from asked_programs import programs_of
from megatron.core.timers import Timers
from megatron.core.utils import StragglerDetector
from refusals import refused
from torch.nn.utils import prune

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.vocabulary.megatron import build
from megatron_pipemem.features.vocabulary.megatron import step as vocabulary_step
from megatron_pipemem.features.vocabulary.megatron.build import choose_barriers, head_in_layers
from megatron_pipemem.features.vocabulary.megatron.step import share_batch
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.mcore.launch import take_flags
from megatron_pipemem.mcore.plugin import programs_for
from megatron_pipemem.mcore.step import batches
from megatron_pipemem.mcore.step.batches import calls_of, zeros_as_output
from megatron_pipemem.part_costs import Part, PartCosts, Parts, Passes
from megatron_pipemem.runtime.weight_gradients import accumulator_of
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.vocabulary import VocabularyCosts


@pytest.fixture(autouse=True)
def random_numbers_of_the_cpu(monkeypatch):
    monkeypatch.setattr(batches.random, "_fork_rng", torch.random.fork_rng)


class Model(torch.nn.Module):
    vp_stage = 0

    def forward(self, tokens, positions, mask, labels=None):
        return tokens + labels


def forward_step(data, model):
    assert model.vp_stage == 0
    batch = next(data)
    return model(batch["tokens"], None, None, labels=batch["labels"]), None


def samples(drawn: list[int]):
    for number in range(10):
        drawn.append(number)
        yield {"tokens": torch.tensor([number]), "labels": torch.tensor([100 + number])}


def ask(forward_step, data, model, m, output_of=lambda call: torch.zeros(2, 3), forward_only=False):
    step = SimpleNamespace(forward_step_func=forward_step, num_microbatches=m, forward_only=forward_only)
    return calls_of(step, data, model, output_of)


def test_the_forward_step_is_asked_for_its_batches_and_draws_none_twice():
    drawn: list[int] = []
    data, model = samples(drawn), Model()
    calls, again = ask(forward_step, data, model, 3)
    assert drawn == [0, 1, 2]
    assert [(int(call.tokens), int(call.labels)) for call in calls] == [(0, 100), (1, 101), (2, 102)]
    assert [int(forward_step(again, model)[0]) for _ in range(3)] == [100, 102, 104]
    assert drawn == [0, 1, 2]
    assert int(next(again)["tokens"]) == 3, "whoever draws more gets new samples"


def test_a_forward_step_may_take_its_batches_apart():
    def popping_step(data, model):
        batch = next(data)
        return model(batch.pop("tokens"), None, None, labels=batch.pop("labels")), None

    calls, again = ask(popping_step, samples([]), Model(), 2)
    assert [int(call.labels) for call in calls] == [100, 101]
    assert [int(popping_step(again, Model())[0]) for _ in range(3)] == [100, 102, 104]


def test_a_forward_step_that_is_asked_comes_to_its_end(caplog, monkeypatch):
    """Megatron's detector of stragglers logs what leaves its block, and a timer that was not stopped cannot start."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    detector, timers, outputs = StragglerDetector(), Timers(log_level=2, log_option="max"), []

    def timed_step(data, model):
        timers("model", log_level=2).start()
        with detector:
            output = model(next(data)["tokens"], None, None, labels=torch.zeros(2, 3))
        timers("model").stop()
        output.div_(2)
        outputs.append(output.float()[:, 1:].reshape(-1))
        output.register_hook(lambda gradient: gradient)
        return output, partial(torch.sum, outputs[-1])

    def as_output(call):
        return zeros_as_output(call.labels.shape, torch.bfloat16, torch.device("cpu"))

    calls, _ = ask(timed_step, samples([]), Model(), 2, as_output)
    assert [int(call.tokens) for call in calls] == [0, 1]
    assert [tuple(output.shape) for output in outputs] == [(4,), (4,)] and all(
        output.requires_grad for output in outputs
    )
    assert caplog.records == []


def test_an_evaluation_is_asked_without_gradients_and_no_hook_sees_the_output():
    grads, model = [], Model()
    hooked = mock.Mock(return_value=None)
    model.register_forward_pre_hook(hooked)
    model.register_forward_hook(hooked)

    def step(data, model):
        output = model(next(data)["tokens"], None, None)
        grads.append(output.requires_grad or torch.is_grad_enabled())
        return output, None

    def as_output(call):
        return zeros_as_output((1,), torch.float32, torch.device("cpu"))

    ask(step, samples([]), model, 1, as_output, forward_only=True)
    ask(step, samples([]), model, 1, as_output)
    assert grads == [False, True]
    assert not hooked.called and len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


def test_an_output_of_another_kind_than_the_models_is_no_error_of_the_question():
    """The real forward runs the same code. Errors before the call of the model have nothing to do with the output."""

    def unpacking_step(data, model):
        loss, mask, counts = model(next(data)["tokens"], None, None)
        raise AssertionError("two rows are no three outputs")

    calls, again = ask(unpacking_step, samples([]), Model(), 2)
    assert [int(call.tokens) for call in calls] == [0, 1]
    assert int(next(again)["tokens"]) == 0
    with pytest.raises(KeyError):
        ask(lambda data, model: model(next(data)["input_ids"]), samples([]), Model(), 2)


def test_a_forward_step_that_does_not_call_its_model_is_refused():
    calls, _ = ask(lambda data, model: (next(data), None), samples([]), Model(), 1)
    assert calls == [None]
    with refused("vocabulary-forward-step", kind=UnsupportedError):
        share_batch([(1, 1)], calls, None, (0, 0), None, may_want_logits=False)
    with refused("vocabulary-forward-step", "--pipemem-message-shapes", kind=UnsupportedError):
        share_batch(None, calls, None, (0, 0), None, may_want_logits=False)


def test_data_that_could_not_be_read_again_are_left_alone():
    """As of frameworks whose iterators have a method of their own."""

    class Reader:
        def get_next(self):
            raise AssertionError("nothing may be read")

    reader = Reader()
    calls, same = ask(lambda data, model: model(data.get_next()), reader, Model(), 2)
    assert calls == [None, None] and same is reader


def test_a_forward_step_may_unwrap_its_model_and_draw_random_numbers():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Model()

    def draw():
        return float(torch.rand(1)), random.random(), numpy.random.random()

    def unwrapping_step(data, model):
        draw()
        return forward_step(data, model.module)

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    expected = draw()
    torch.set_rng_state(states[0]), random.setstate(states[1]), numpy.random.set_state(states[2])
    wrapper = Wrapper()
    calls, again = ask(unwrapping_step, samples([]), wrapper, 2)
    assert [int(call.tokens) for call in calls] == [0, 1]
    assert draw() == expected
    assert int(unwrapping_step(again, wrapper)[0]) == 100, "the model is itself again"


def test_ranks_without_an_iterator_get_none():
    calls, again = ask(lambda data, model: model(1, 2, 3, None, 5), None, Model(), 2)
    assert again is None
    assert calls == [(1, 5, False), (1, 5, False)]


def test_a_file_with_passes_and_another_cut_are_refused(tmp_path):
    file = tmp_path / "order.csv"
    plan = programs_of("1f1b", None, "unit", {}, vocab_cut="2").plan(Shape(4, 1, 6), "")
    file.write_text(plan.schedule.to_csv())
    with refused("conflicting-options", "--pipemem-vocab-cut", 2, kind=UnsupportedError):
        programs_of(str(file), None, "unit", {}, vocab_cut="off")
    with refused("conflicting-options", "--pipemem-vocab-cut", 2, 1, kind=UnsupportedError):
        programs_of(str(file), None, "unit", {}, vocab_cut="1")
    kept = programs_of(str(file), None, "unit", {}, vocab_cut="auto").plan(Shape(4, 1, 6), "").schedule
    assert kept == replace(plan.schedule, name="order.csv")


def test_the_cut_is_told_about_pieces(monkeypatch):
    told, chunk = [], SimpleNamespace(config=SimpleNamespace(cross_entropy_loss_fusion=False))
    monkeypatch.setattr(build, "cut_vocabulary", lambda *arguments: told.append(arguments[-2:]))
    flags = "--pipemem-schedule 1f1b --pipemem-vocab-cut 1".split()
    for pieces in ([], ["--pipemem-vocab-piece-tokens", "16"]):
        source = programs_for(take_flags([*flags, *pieces])[0])
        build.cut_model(source, [chunk], source.placement(4, 1), None)
    assert told == [(2, None), (2, 16)]


def test_a_fused_loss_has_no_effect_where_the_vocabulary_is_cut(monkeypatch, caplog):
    monkeypatch.setattr(build, "cut_vocabulary", lambda *arguments: None)
    chunk = SimpleNamespace(config=SimpleNamespace(cross_entropy_loss_fusion=True))
    for ways, logged in (("off", False), ("2", True)):
        caplog.clear()
        source = programs_of("1f1b", None, "unit", {}, vocab_cut=ways)
        with caplog.at_level("INFO"):
            build.cut_model(source, [chunk], source.placement(4, 1), None)
        assert ("--cross-entropy-loss-fusion" in caplog.text) == logged


def test_the_cap_holds_for_the_schedule_with_passes():
    shape = Shape(4, 1, 12)
    assert programs_of("1f1b", 1.25, "unit", {}, vocab_cut="2").plan(shape, "").schedule.vocabulary_barriers == 1
    with refused("over-cap", "1.25"):
        programs_of("1f1b", 1.0, "unit", {}, vocab_cut="2").plan(shape, "")


def model(vocab_size: int, hidden_size: int = 4096, gated: bool = True) -> SimpleNamespace:
    config = SimpleNamespace(
        hidden_size=hidden_size,
        num_attention_heads=32,
        kv_channels=hidden_size // 32,
        num_query_groups=None,
        ffn_hidden_size=4 * hidden_size,
        gated_linear_unit=gated,
        num_moe_experts=None,
        num_layers=32,
    )
    return SimpleNamespace(config=config, vocab_size=vocab_size, max_sequence_length=2048)


def test_a_head_counts_in_layers():
    # The paper's formula for a 4h feed-forward network: V / (12h + 2s).
    assert head_in_layers(model(256_000, 3072, gated=False)) == pytest.approx(256_000 / (12 * 3072 + 2 * 2048))


def test_a_head_counts_in_mean_layers_of_a_hybrid_model():
    whole = model(10_000, 64, gated=False)
    whole.hybrid_layer_pattern = "*--|*/*"
    attention, ffn = 4 * 64 * 64 + 2 * 2048 * 64, 8 * 64 * 64
    assert head_in_layers(whole) == pytest.approx(64 * 10_000 / ((2 * attention + 2 * ffn) / 4))


def test_a_hybrid_model_gets_no_layout_of_a_gpt_proposed(caplog):
    caplog.set_level("INFO")
    whole = model(vocabulary_of(0.4, 64, 4))
    whole.hybrid_layer_pattern = "*-" * 32
    base = build_schedule("v-half", num_devices=4, num_microbatches=8)
    choose_barriers(whole, (8.0,) * 8, Costs(), {0: base})
    assert "vocabulary: " in caplog.text and "layout" not in caplog.text


def vocabulary_of(head: float, layers: int, num_devices: int) -> int:
    """Words of which the head takes so many devices' shares of F, with F = I = W."""
    return round(head * layers / (3 * num_devices) / head_in_layers(model(10**9)) * 10**9)


def chosen(
    schedule: str, p: int, m: int, head: float, *, layout: tuple[int, ...] | None = None, costs: Costs | None = None
) -> int:
    base = build_schedule(schedule, num_devices=p, num_microbatches=m)
    layout = layout or (32 // base.placement.num_stages,) * base.placement.num_stages
    schedules = {0: base} | {barriers: with_vocabulary(base, barriers) for barriers in (1, 2)}
    return choose_barriers(model(vocabulary_of(head, sum(layout), p)), layout, costs or Costs(), schedules)


def test_auto_cuts_a_large_vocabulary_and_leaves_a_small_one():
    assert chosen("1f1b", 8, 64, 8.0) == 1
    assert chosen("1f1b", 8, 64, 0.01) == 0


def test_auto_knows_where_the_layers_are():
    assert chosen("1f1b", 4, 16, 1.7, layout=(2, 2, 2, 2)) == 1
    assert chosen("1f1b", 4, 16, 1.7, layout=(3, 3, 2, 0)) == 0


def test_auto_believes_the_costs_it_is_given():
    assert chosen("1f1b", 4, 16, 1.7, costs=Costs(vocabulary=VocabularyCosts(score=0.001, gradient=0.001))) == 0
    assert chosen("1f1b", 4, 16, 0.01, costs=Costs(vocabulary=VocabularyCosts(score=0.2, gradient=0.2))) == 1
    # A last device that has less to do than others has time for its head.
    assert chosen("1f1b", 4, 16, 0.5, costs=Costs((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))) == 2
    assert chosen("1f1b", 4, 16, 0.5, costs=Costs((1, 1, 1, 0.5), (1, 1, 1, 0.5), (1, 1, 1, 0.5))) == 0


def test_auto_takes_the_head_from_prices_of_parts():
    for head, expected in ((20.0, 1), (0.01, 0)):
        layers = (Part(Passes(1.0, 1.0, 1.0)),) * 32
        parts = Parts(layers, Part(), Part(), Part(Passes(head, head, head)))
        assert chosen("1f1b", 8, 64, 0.01, costs=PartCosts(parts=parts)) == expected


def test_auto_keeps_a_layout_where_moving_layers_is_best_and_cutting_little_better(caplog):
    caplog.set_level("INFO")
    assert chosen("v-half", 4, 8, 0.4, layout=(8,) * 8) == 0
    assert "--pipeline-model-parallel-layout for layers per stage (7, 9, 9, 8, 8, 8, 8, 7)" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "cap", "allowed"), [("1f1b", 1.25, {0, 1}), ("1f1b", 1.0, {0}), ("auto", 1.1, {0, 1, 2})]
)
def test_auto_has_to_keep_the_cap(schedule, cap, allowed, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"seconds": 0.3, "placement": "linear"} if schedule == "auto" else {}
    source = programs_of(schedule, cap, "unit", options, vocab_cut="auto")
    ways = source.schedules_by_barriers(source.placement(4, 1), 1)
    assert set(ways) == allowed
    assert all(
        way.vocabulary_barriers == barriers and simulate(way).peak <= cap + 1e-9 for barriers, way in ways.items()
    )


def test_marks_and_frozen_weights_reach_the_shards():
    embedding = torch.nn.Embedding(6, 4)
    embedding.weight.requires_grad_(False)
    embedding.weight.of_the_vocabulary, embedding.weight.shared = "rows", True
    assert build._matrix(embedding, "embedding") == (6, 4, False, {"of_the_vocabulary": "rows"})


def hooked_node(embedding):
    embedding.node = accumulator_of(embedding.weight)
    embedding.node.register_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        lambda embedding: embedding.register_forward_hook(lambda *_: None),
        lambda embedding: embedding.register_full_backward_hook(lambda *_: None),
        lambda embedding: setattr(embedding, "forward", lambda tokens: tokens),
        lambda embedding: prune.l1_unstructured(embedding, "weight", 0.5),
        lambda embedding: embedding.weight.register_hook(torch.sign),
        lambda embedding: embedding.weight.register_post_accumulate_grad_hook(lambda of: None),
        hooked_node,
        lambda embedding: setattr(embedding.weight, "rows_of", torch.ones(2)),
    ],
)
def test_what_shards_would_lose_is_refused(change):
    embedding = torch.nn.Embedding(6, 4)
    change(embedding)
    with refused("vocabulary-model", "--pipemem-vocab-cut off", kind=UnsupportedError):
        build._matrix(embedding, "embedding")


@pytest.mark.parametrize(("tensor_parallel", "opened"), [(1, ["pipeline"]), (2, ["pipeline", "shards"])])
def test_groups_of_a_cut_vocabulary_are_limited_and_connected(monkeypatch, tensor_parallel, opened):
    """Each of them may wait in most of a step, and NCCL would take up to 32 thread blocks for it."""
    limits, connected = [], []
    pipeline, shards = (
        SimpleNamespace(name=name, size=lambda size=size: size)
        for name, size in (("pipeline", 4), ("shards", 4 * tensor_parallel))
    )

    def new_groups(members, parent, description, *, max_ctas):
        limits.append((parent.name, max_ctas))
        return [f"new {parent.name}" for _ in members]

    monkeypatch.setattr(vocabulary_step, "new_groups", new_groups)
    monkeypatch.setattr(vocabulary_step.dist, "get_process_group_ranks", lambda group: [*range(group.size())])
    monkeypatch.setattr(vocabulary_step.dist, "all_reduce", lambda tensor, group: connected.append(group))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    channels = vocabulary_step._connect(pipeline, shards)
    assert limits == [(name, 8) for name in opened]
    assert [channels.pipeline, channels.shards] == [f"new {opened[0]}", f"new {opened[-1]}"]
    assert connected == [f"new {name}" for name in opened]
