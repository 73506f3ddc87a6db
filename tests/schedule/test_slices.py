"""Cutting sequences into slices, and what the slices cost."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.slices.prices import slice_costs, slice_tokens
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.action_prices import held_after
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.vocabulary import VocabularyCosts

LINEAR = Placement.linear(2)
SHARE = st.floats(0, 1)
TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def seconds_of_prefix(tokens: int, whole: int, attention: float) -> float:
    """Every token costs alike, and its attention as many times as there are tokens up to it; in the limit of long sequences."""
    return (1 - attention) * tokens / whole + attention * (tokens / whole) ** 2


@settings(max_examples=200, deadline=None)
@given(slices=st.integers(1, 12), units=st.integers(1, 300), multiple=st.sampled_from([1, 2, 64]), attention=SHARE)
def test_slices_of_equal_time(slices: int, units: int, multiple: int, attention: float) -> None:
    tokens = units * multiple
    if units < slices:
        with refused("slices-do-not-fit", kind=UnsupportedError):
            slice_tokens(tokens, slices, "flops", attention, multiple)
        return
    cut = slice_tokens(tokens, slices, "flops", attention, multiple)
    assert (len(cut), sum(cut)) == (slices, tokens)
    assert all(each >= multiple and each % multiple == 0 for each in cut)
    if units >= 2 * slices:  # none had to be made longer
        edges = [seconds_of_prefix(edge, tokens, attention) for edge in accumulate(cut, initial=0)]
        # An edge is half a unit off at most, where a unit takes 1 + attention times the mean at most.
        error = (1 + attention) / units
        assert [after - before for before, after in pairwise(edges)] == pytest.approx([1 / slices] * slices, abs=error)


def test_cuts() -> None:
    assert slice_tokens(8, 4) == (2,) * 4
    assert slice_tokens(8, 2, "flops") == (4, 4), "without attention, time goes by tokens"
    assert slice_tokens(10_000, 2, "flops", 1.0) == (7071, 2929)
    assert slice_tokens(12_288, 2, "flops", 1.0, multiple=4096) == (8192, 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (10, 4),
            ("slices-do-not-fit", 10, 4, 1),
        ),
        (
            (8, 2, "tokens", 0, 3),
            ("slices-do-not-fit", 8, 2, 3),
        ),
        ((3, 4, "flops"), ("slices-do-not-fit", 3, 4, 1)),
        ((8, 2, "time"), ("bad-number", "time", 0, 1)),
        ((8, 0), ("bad-number", 0)),
        ((8, 2, "flops", 1.5), ("bad-number", "1.5")),
    ],
)
def test_cuts_that_are_refused(arguments: tuple, message: str) -> None:
    with refused(*message, kind=UnsupportedError):
        slice_tokens(*arguments)


@settings(max_examples=100, deadline=None)
@given(tokens=TOKENS, a=SHARE, b=SHARE, kept=SHARE)
def test_slices_take_what_the_whole_takes(tokens: list[int], a: float, b: float, kept: float) -> None:
    whole = Costs(
        4,
        (3, 5),
        2,
        memory={Kind.F: 2, Kind.R: 6, Kind.I: -3, Kind.B: -8, Kind.RECV_F: 1, Kind.S: 3, Kind.REDUCE_GRAD: -1},
        recompute=3,
        channel=Channel(2, 3),
        vocabulary=VocabularyCosts(score=(2, 4)),
    )
    n = len(tokens)
    cut = slice_costs(whole, LINEAR, tokens, {Kind.F: a, Kind.I: b}, kept)
    once, parts = whole.seconds(LINEAR), cut.seconds(LINEAR, n)
    for stage in range(2):
        own = slice(stage * n, (stage + 1) * n)
        for kind, each in parts.items():
            assert sum(each[own]) == pytest.approx(once[kind][stage])
        moved = cut.transfer_seconds(LINEAR, slices=n)
        away = 1 - kept if n > 1 else 1
        assert sum(moved[Kind.OFFLOAD][own]) == pytest.approx(2 * away)
        for again in ({}, {0: Kind.R, 1: Kind.R}, {0: Kind.RS, 1: Kind.RS}):
            change = cut.memory_changes(LINEAR, again, n)
            rerun = sum(sum(change[kind][own]) for kind in set(again.values()))
            assert sum(change[Kind.F][own]) + rerun == pytest.approx(8)
            assert sum(change[Kind.B][own]) == pytest.approx(-8)
            assert sum(change[Kind.I][own]) + sum(change[Kind.W][own]) == pytest.approx(-8)
            assert min(change[Kind.F]) >= -1e-12
            assert change[Kind.REDUCE_GRAD][own] == (-1,) * n
            assert sum(change[Kind.S][own]) == pytest.approx(3)
    assert sum(cut.vocabulary_costs(LINEAR, 1, n).seconds(2, n)[Kind.S]) == pytest.approx(6)
    if n > 1 and a > 0.01 and len(set(tokens)) == 1:
        assert list(parts[Kind.F][:n]) == sorted(parts[Kind.F][:n]), "later slices attend to more"
        assert len(set(parts[Kind.W][:n])) <= n and max(parts[Kind.W][:n]) == pytest.approx(min(parts[Kind.W][:n]))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), attention=SHARE, kept=SHARE, in_bytes=st.booleans())
def test_nothing_is_left_after_a_microbatch(data: st.DataObject, attention: float, kept: float, in_bytes: bool) -> None:
    schedule = data.draw(random_schedules(max_slices=4))
    n = schedule.slices
    tokens = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    memory = {Kind.F: 8, Kind.I: data.draw(st.integers(-8, 2))} if in_bytes else None
    if memory is not None:
        memory[Kind.W] = -8 - memory[Kind.I]
    costs = slice_costs(Costs(memory=memory), schedule.placement, tokens, attention, kept)
    changes = costs.memory_changes(schedule.placement, slices=n)
    for order in schedule.orders:
        held = held_after(order, changes, slices=n)
        assert held[-1] == pytest.approx(0, abs=1e-9) if held else True
        assert min(held, default=0) >= -1e-9
    assert simulate(schedule, costs).makespan > 0


def test_keys_and_values_wait_for_their_first_slice() -> None:
    """Of 12 bytes, 3 are keys and values, and all caches are there from the first forward to the last backward."""
    costs = slice_costs(Costs(memory={Kind.F: 12, Kind.W: -12}), Placement.linear(1), (1, 1, 1), keys_and_values=0.25)
    order = [Action.parse(each) for each in "0F0 0F1 0F2 0B2 0B1 0B0".split()]
    changes = costs.memory_changes(Placement.linear(1), slices=3)
    assert held_after(order, changes, slices=3) == pytest.approx([6, 9, 12, 12, 9, 0])
    split = [Action.parse(each) for each in "0F0 0F1 0F2 0I2 0I1 0I0 0W2 0W1 0W0".split()]
    assert held_after(split, changes, slices=3) == pytest.approx([6, 9, 12, 15, 15, 9, 6, 3, 0])


def test_activation_units_of_unequal_slices() -> None:
    schedule = build_schedule("seq1f1b", num_devices=2, num_microbatches=1, slices=2)
    even = slice_costs(Costs(), schedule.placement, (5, 5), 0.5)
    assert even.slice_units is None and peaks(schedule, even) == peaks(schedule)
    cut = slice_costs(Costs(), schedule.placement, (3, 1))
    assert cut.memory is None
    assert peaks(schedule, cut) == pytest.approx((0.5, 0.5))
    again = with_recompute(schedule, {0: Kind.R, 1: Kind.R})
    assert peaks(again, cut) == pytest.approx((0.375, 0.375)), "the longer slice alone"
    partly = with_recompute(schedule, {0: Kind.RS, 1: Kind.RS})
    assert peaks(partly, cut)[0] == pytest.approx(0.375), (
        "the longer slice is whole again, and the shorter one has gone"
    )
    partly = with_recompute(schedule, {1: Kind.RS})
    assert peaks(partly, cut)[1] == pytest.approx(max(0.375, 0.5 - 0.375 * SELECTIVE_BYTES))
    with refused("costs-mismatch", 2, 3, kind=CostsError):
        peaks(build_schedule("seq1f1b", num_devices=2, num_microbatches=1, slices=3), cut)


def test_inputs_attention_has_twice_the_products() -> None:
    costs = slice_costs(Costs(1, 2, 1), Placement.linear(1), (1, 1), 0.5)
    assert costs.forward == pytest.approx((0.5 * 0.5 + 0.5 * 0.25, 0.5 * 0.5 + 0.5 * 0.75))
    assert costs.backward_input == pytest.approx((2 * (0.5 / 3 + 0.25 * 2 / 3), 2 * (0.5 / 3 + 0.75 * 2 / 3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LINEAR, (1, 0)), ("bad-number", "[1, 0]")),
        ((LINEAR, ()), ("bad-number", "[]")),
        ((LINEAR, (1, 1), -0.5), ("bad-number", "-0.5", 0, 1)),
        ((LINEAR, (1, 1), {Kind.I: 2}), ("bad-number", 2)),
        ((LINEAR, (1, 1), 0, 1.5), ("bad-number", "1.5")),
        (
            (Placement.from_devices((0, 1, 1, 0), 2), (1, 1)),
            ("unsupported-placement", 2),
        ),
    ],
)
def test_slices_that_cannot_be_priced(arguments: tuple, message: str) -> None:
    with refused(*message, kind=UnsupportedError):
        slice_costs(Costs(), *arguments)


def test_one_slice_is_the_whole() -> None:
    costs = Costs(3, memory={Kind.F: 4, Kind.W: -4})
    assert slice_costs(costs, LINEAR, (7,), 0.5, 0.5) is costs
