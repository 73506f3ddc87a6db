"""What makes two replicas of the model one model to Megatron, as far as one process shows it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantised import Quantised, eight_bits
from refusals import refused

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.choose.searching import serial_schedule
from megatron_pipemem.conflicts import check_replicas
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.replicas.megatron import gradients, make_replicas
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.step.batches import deal
from megatron_pipemem.mcore.step.extension import count_weights, predict_weights
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program


class Counted:
    """An iterator that says how many batches it has given."""

    def __init__(self):
        self.given = 0

    def __next__(self):
        self.given += 1
        return self.given - 1


@given(st.sampled_from(["chimera", "gems"]), st.integers(1, 9), st.sampled_from([0, 3]), st.booleans())
def test_every_chunk_gets_the_batch_of_its_microbatch(name, m, device, forward_only):
    schedule = build_schedule(name, num_devices=4, num_microbatches=m)
    if forward_only:
        schedule = schedule.forward_only()
    stream = Counted()
    for step in range(2):
        dealer, hands = deal(stream, schedule, device)
        for action in schedule.orders[device]:
            if action.kind is Kind.F:
                assert next(hands[action.stage // 4]) == step * m + action.microbatch
        dealer.finish()
        assert stream.given == (step + 1) * m, "the next step begins behind this one"


def test_a_batch_in_two_parts_is_refused():
    schedule = build_schedule("gems", num_devices=2, num_microbatches=2)
    _, (hand, _) = deal(Counted(), schedule, 0)
    next(hand)
    with refused("data-iterator", kind=UnsupportedError):
        next(hand)


def test_ranks_that_read_nothing_are_left_alone():
    schedule = build_schedule("gems", num_devices=4, num_microbatches=4)
    stream = Counted()
    dealer, hands = deal(stream, schedule, 1)
    dealer.finish()
    assert stream.given == 0 and len(hands) == 2
    assert deal(None, schedule, 1)[1] == [None, None]


def test_megatron_is_told_of_one_copy():
    settings, _ = take_flags(["--pipemem-schedule", "chimera"])
    pipeline = ["--pipeline-model-parallel-size", "4"]
    assert add_virtual_stages(settings, pipeline) == pipeline


def test_evaluation_takes_any_number_of_microbatches():
    source = ProgramStore(Request("dualpipe"))
    for m in (1, 3, 8, 9):
        schedule = source.plan(Shape(4, 2, m)._replace(forward_only=True), "").schedule
        validate(schedule)
        assert {a.kind for order in schedule.orders for a in order} == {Kind.F}
    with refused("needs-microbatches", 8, 7, kind=UnsupportedError):
        source.plan(Shape(4, 2, 7), "start")


@given(st.integers(2, 6), st.integers(1, 9))
def test_one_microbatch_after_another_goes_both_ways(p, m):
    schedule = serial_schedule(Placement.bidirectional(p), m)
    validate_program(lower(schedule))
    assert simulate(schedule).peak == pytest.approx(1 / p)


def test_vocabulary_passes_are_refused_before_the_model_is_built():
    source = ProgramStore(Request("gems", vocab_cut="2"))
    with refused("unsupported-placement", kind=UnsupportedError):
        source.placement(4, 1)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement("custom", (0, 1, 0, 1), 2), ("unsupported-placement",)),
        (Placement.bidirectional(1), ("no-pipeline",)),
    ],
)
def test_other_copies_are_refused(placement, words):
    with refused(*words, kind=UnsupportedError):
        check_replicas(placement)


def test_quantised_weights_are_not_copied_in_silence(world):
    """First: a value that a communication writes into such a weight is lost, without an error."""
    weight = Quantised(eight_bits(4))
    torch.distributed.scatter(weight, [torch.ones(4)], group=world)
    assert weight.value().tolist() == [2.0] * 4
    chunks = [torch.nn.Module(), torch.nn.Module()]
    for chunk in chunks:
        chunk.weight = torch.nn.Parameter(Quantised(eight_bits(4)))
        chunk.config = SimpleNamespace(moe_router_load_balancing_type="aux_loss")
    with refused("unsupported-setting", kind=UnsupportedError):
        make_replicas(chunks, Placement.bidirectional(2), world)


def test_gradients_stand_in_main_grad_or_in_grad():
    chunk = torch.nn.Linear(2, 3)
    chunk.weight.main_grad = torch.ones(3, 2)
    computed = gradients(chunk)
    assert computed[0] is chunk.weight.main_grad and computed[1] is chunk.bias.grad and not computed[1].any()
    chunk.bias.requires_grad_(False)
    assert len(gradients(chunk)) == 1


def test_weights_count_once_per_copy_and_version():
    placement = Placement.bidirectional(2)
    chunks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    assert count_weights(chunks, placement.stages[0]) == ({0: 24, 3: 12}, 36, 1, 1)
    assert predict_weights(placement, 0, {0: 24, 1: 12}) == 36
    assert predict_weights(Placement.linear(2), 1, {0: 24, 1: 12}, versions=2) == 24
