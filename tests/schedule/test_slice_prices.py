"""Sequences cut into slices: where, the prices of every slice, and the simulator's results with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules
from refusals import refused
from step_oracle import Event, play

from megatron_pipemem.choose.knowledge import Knowledge
from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.slices.prices import slice_costs, slice_tokens
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.action_prices import held_after
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.schedule.vocabulary import VocabularyCosts
from megatron_pipemem.search.step_plan import ManyOrders

LINEAR = Placement.linear(2)
SHARE = st.floats(0, 1)
TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def seconds_of_prefix(tokens: int, whole: int, attention: float) -> float:
    """Every token costs alike, and its attention as many times as there are tokens up to it; in the limit of long sequences."""
    return (1 - attention) * tokens / whole + attention * (tokens / whole) ** 2


@examples(200)
@given(slices=st.integers(1, 12), units=st.integers(1, 300), multiple=st.sampled_from([1, 2, 64]), attention=SHARE)
def test_slices_of_equal_time(slices: int, units: int, multiple: int, attention: float) -> None:
    tokens = units * multiple
    if units < slices:
        with refused("slices-do-not-fit", kind=UnsupportedError):
            slice_tokens(tokens, slices, "flops", attention, multiple)
        return
    cut = slice_tokens(tokens, slices, "flops", attention, multiple)
    assert (len(cut), sum(cut)) == (slices, tokens)
    assert all(tokens >= multiple and tokens % multiple == 0 for tokens in cut)
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


@examples(100)
@given(tokens=TOKENS, a=SHARE, kept=SHARE)
def test_slices_take_what_the_whole_takes(tokens: list[int], a: float, kept: float) -> None:
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
    cut = slice_costs(whole, LINEAR, tokens, a, kept)
    once, parts = whole.seconds(LINEAR), cut.seconds(LINEAR, Units.equal(1, n))
    for stage in range(2):
        own = slice(stage * n, (stage + 1) * n)
        for kind, part in parts.items():
            assert sum(part[own]) == pytest.approx(once[kind][stage])
        moved = cut.transfer_seconds(LINEAR, units=Units.equal(1, n))
        away = 1 - kept if n > 1 else 1
        assert sum(moved[Kind.OFFLOAD][own]) == pytest.approx(2 * away)
        for again in ({}, {0: Kind.R, 1: Kind.R}, {0: Kind.RS, 1: Kind.RS}):
            change = cut.memory_changes(LINEAR, again, Units.equal(1, n))
            rerun = sum(sum(change[kind][own]) for kind in set(again.values()))
            assert sum(change[Kind.F][own]) + rerun == pytest.approx(8)
            assert sum(change[Kind.B][own]) == pytest.approx(-8)
            assert sum(change[Kind.I][own]) + sum(change[Kind.W][own]) == pytest.approx(-8)
            assert min(change[Kind.F]) >= -1e-12
            assert change[Kind.REDUCE_GRAD][own] == (-1,) * n
            assert sum(change[Kind.S][own]) == pytest.approx(3)
    assert sum(
        cut.vocabulary_costs(LINEAR, 1, Units.equal(1, n)).seconds(2, Units.equal(1, n))[Kind.S]
    ) == pytest.approx(6)
    if n > 1 and a > 0.01 and len(set(tokens)) == 1:
        assert list(parts[Kind.F][:n]) == sorted(parts[Kind.F][:n]), "later slices attend to more"
        assert len(set(parts[Kind.W][:n])) <= n and max(parts[Kind.W][:n]) == pytest.approx(min(parts[Kind.W][:n]))


@examples(60)
@given(data=st.data(), attention=SHARE, kept=SHARE, in_bytes=st.booleans())
def test_nothing_is_left_after_a_microbatch(data: st.DataObject, attention: float, kept: float, in_bytes: bool) -> None:
    schedule = data.draw(random_schedules(max_slices=4))
    n = schedule.units.parts
    tokens = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    memory = {Kind.F: 8, Kind.I: data.draw(st.integers(-8, 2))} if in_bytes else None
    if memory is not None:
        memory[Kind.W] = -8 - memory[Kind.I]
    costs = slice_costs(Costs(memory=memory), schedule.placement, tokens, attention, kept)
    changes = costs.memory_changes(schedule.placement, units=schedule.units)
    for order in schedule.orders:
        held = held_after(order, changes, units=schedule.units)
        assert held[-1] == pytest.approx(0, abs=1e-9) if held else True
        assert min(held, default=0) >= -1e-9
    assert simulate(schedule, costs).makespan > 0


def test_keys_and_values_wait_for_their_first_slice() -> None:
    """Of 12 bytes, 3 are keys and values, and all caches are there from the first forward to the last backward."""
    costs = slice_costs(Costs(memory={Kind.F: 12, Kind.W: -12}), Placement.linear(1), (1, 1, 1), keys_and_values=0.25)
    order = [Action.parse(text) for text in "0F0 0F1 0F2 0B2 0B1 0B0".split()]
    changes = costs.memory_changes(Placement.linear(1), units=Units.equal(1, 3))
    assert held_after(order, changes, units=Units.equal(1, 3)) == pytest.approx([6, 9, 12, 12, 9, 0])
    split = [Action.parse(text) for text in "0F0 0F1 0F2 0I2 0I1 0I0 0W2 0W1 0W0".split()]
    assert held_after(split, changes, units=Units.equal(1, 3)) == pytest.approx([6, 9, 12, 15, 15, 9, 6, 3, 0])


def test_activation_units_of_unequal_slices() -> None:
    schedule = build_schedule("seq1f1b", num_devices=2, num_microbatches=1, slices=2)
    even = slice_costs(Costs(), schedule.placement, (5, 5), 0.5)
    assert even.part_units is None and peaks(schedule, even) == peaks(schedule)
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


@st.composite
def priced(draw: st.DrawFn, schedule: Schedule) -> Costs:
    """Seconds and bytes of every stage and slice; what a microbatch takes, it gives back."""
    places = schedule.num_stages * schedule.units.parts

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(least, most), min_size=places, max_size=places)))

    takes, given_back = some(0, 20), some(-20, 5)
    memory = {Kind.F: takes, Kind.I: given_back, Kind.W: tuple(-f - i for f, i in zip(takes, given_back, strict=True))}
    return Costs(some(0, 9), some(0, 9), some(0, 9), draw(st.sampled_from([0, 1, 6])), memory)


@examples(80)
@given(data=st.data())
def test_any_schedule_and_prices_as_the_oracles_play_them(data: st.DataObject) -> None:
    schedule = data.draw(random_schedules(max_slices=4))
    costs, slices = data.draw(priced(schedule)), schedule.units.parts
    weights = st.lists(st.integers(0, 3), min_size=schedule.num_microbatches, max_size=schedule.num_microbatches)
    weigh = data.draw(st.none() | weights)
    tables = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    memory = {"F": costs.memory[Kind.F], "I": costs.memory[Kind.I], "W": costs.memory[Kind.W]}

    def look_up(tables: dict[str, tuple[int, ...]], event: Event) -> float:
        kind, stage, unit = event
        if kind == "B":
            return look_up(tables, ("I", stage, unit)) + look_up(tables, ("W", stage, unit))
        weight = 1 if weigh is None else weigh[unit // slices]
        return tables[kind][stage * slices + unit % slices] * weight

    def message(unit: int) -> float:
        return costs.p2p / slices * (1 if weigh is None else weigh[unit // slices])

    played = play(
        schedule,
        lambda event: look_up(tables, event),
        message,
        lambda unit: 0.0,
        changes=lambda event: look_up(memory, event),
    )
    own = None if weigh is None else MicrobatchFactors(tuple(weigh), tuple(weigh))
    timeline = simulate(schedule, replace(costs, microbatch=own))
    for ours, theirs in zip(timeline.spans, played.spans, strict=True):
        assert [x for span in ours for x in span] == pytest.approx([x for span in theirs for x in span], abs=1e-9)
    assert timeline.peaks == pytest.approx(played.device_peaks, abs=1e-9)
    if weigh is None:
        last = oracle.makespan_of(schedule, lambda kind, stage, part: look_up(tables, (kind, stage, part)), costs.p2p)
        assert timeline.makespan == pytest.approx(last)
    validate(schedule, replace(costs, microbatch=own), max(timeline.peaks))
    if max(timeline.peaks) > 0:
        with refused("over-cap", kind=ScheduleError):
            validate(schedule, replace(costs, microbatch=own), max(timeline.peaks) * 0.99)


def test_slices_share_what_has_no_price_of_theirs() -> None:
    costs = Costs(4, (1, 2), (1, 2, 3, 4), memory={Kind.F: 6, Kind.B: (-4, -2, -3, -3), Kind.REDUCE_GRAD: -1})
    units = Units.equal(1, 2)
    seconds = costs.seconds(LINEAR, units)
    assert (seconds[Kind.F], seconds[Kind.I], seconds[Kind.W]) == ((2,) * 4, (0.5, 0.5, 1, 1), (1, 2, 3, 4))
    assert seconds[Kind.B] == (1.5, 2.5, 4, 5)
    changes = costs.memory_changes(LINEAR, units=units)
    assert (changes[Kind.F], changes[Kind.B]) == ((3,) * 4, (-4, -2, -3, -3))
    assert changes[Kind.REDUCE_GRAD] == (-1,) * 4, "it is on a whole stage"
    again = costs.memory_changes(LINEAR, {1: Kind.RS}, units)
    assert again[Kind.F] == pytest.approx((3, 3, 3 - 3 * SELECTIVE_BYTES, 3 - 3 * SELECTIVE_BYTES))
    moved = Costs(channel=Channel((1, 2, 3, 4), 8)).transfer_seconds(LINEAR, units=units)
    assert (moved[Kind.OFFLOAD], moved[Kind.RELOAD]) == ((1, 2, 3, 4), (4,) * 4)
    passes = VocabularyCosts((1, 2, 3, 4), 2, collectives=3)
    assert passes.seconds(2, units)[Kind.S] == (1, 2, 3, 4)
    assert (passes.seconds(2, units)[Kind.T], passes.collective_seconds(units)[Kind.STATS]) == ((1,) * 4, 1.5)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            Costs((1, 2, 3)),
            ("costs-mismatch", 3, 2, 4),
        ),
        (
            Costs(memory={Kind.F: (1,) * 8}),
            ("costs-mismatch", 8, 2),
        ),
    ],
)
def test_tables_of_another_length_are_refused(costs: Costs, message: str) -> None:
    with refused(*message, kind=CostsError):
        simulate(build_schedule("seq1f1b", num_devices=2, num_microbatches=2, slices=2), costs)
    with refused("costs-mismatch", 3, 2, 4, kind=CostsError):
        VocabularyCosts((1, 2, 3)).seconds(2, Units.equal(1, 2))


def test_slices_of_a_pipeline_with_replicas_are_alike() -> None:
    both = Placement.from_devices((0, 1, 1, 0), 2)
    assert Costs((4, 8)).seconds(both, Units.equal(1, 2))[Kind.F] == (2, 2, 4, 4) * 2
    with refused("costs-mismatch", kind=CostsError):
        Costs((1,) * 8).seconds(both, Units.equal(1, 2))


def test_what_is_held_after_every_slice() -> None:
    actions = [Action.parse(text) for text in "0F0 0F1 0B1 0F2 0B0 0REDUCE_GRAD".split()]
    changes = {Kind.F: (5, 3), Kind.B: (-5, -3), Kind.REDUCE_GRAD: (7, 0)}
    assert held_after(actions, changes, units=Units.equal(3, 2)) == [5, 8, 5, 10, 5, 12]
    assert held_after(actions, changes, (1, 1, 2), Units.equal(3, 2)) == [5, 8, 5, 15, 10, 17], (
        "what is on a whole stage has no weight"
    )


def test_what_a_run_has_counted_of_every_slice() -> None:
    schedule = build_schedule("seq1f1b", num_devices=2, num_microbatches=3, slices=2)
    counted = {
        Kind.F: (90, 10, 90, 10),
        Kind.I: (0, 0, -8, -4),
        Kind.W: (-90, -10, -90, -10),
        Kind.RECV_F: (0, 0, 8, 4),
        Kind.SEND_F: (0, 0, 0, 0),
    }
    known = Knowledge(Costs(channel=Channel(1)), counted_bytes=counted)
    costs = known.counted_costs(schedule.placement, True)
    assert costs.memory_changes(schedule.placement, units=schedule.units)[Kind.F] == (90, 10, 98, 14)
    assert known.message == 8
    # On the last device, slices 0 and 2 with their inputs, and the input of 3.
    assert list(known.device_peaks(schedule, costs)) == [190, 200]


@examples(25)
@given(data=st.data())
def test_copies_to_the_host_are_planned_for_the_prices_of_slices(data: st.DataObject) -> None:
    base = data.draw(random_schedules(max_slices=3))
    places = base.num_stages * base.units.parts
    takes = data.draw(st.lists(st.integers(0, 9), min_size=places, max_size=places))
    memory = {Kind.F: tuple(takes), Kind.W: tuple(-seconds for seconds in takes)}
    copies = data.draw(st.lists(st.sampled_from([0.1, 0.5, 2]), min_size=places, max_size=places))
    costs = Costs(data.draw(priced(base)).forward, 1.25, 0.5, 0.25, memory, channel=Channel(tuple(copies)))
    free = plan_offload(base, costs)
    assert max(free.peaks) <= max(free.base_timeline.peaks) * (1 + 1e-9)
    assert free.delay <= 1e-6 * free.makespan, "planned for other seconds than these"
    cap, budget = max(free.base_timeline.peaks) * data.draw(st.sampled_from([0.4, 0.8])), max(takes)
    plan = plan_offload(base, costs, memory_cap=cap, host_budget=budget)
    validate(plan.schedule, costs, plan.memory_cap if plan.keeps_cap else None, budget)


def test_orders_of_microbatches_are_tried_with_the_prices_of_slices() -> None:
    base = build_schedule("seq1f1b", num_devices=3, num_microbatches=4, slices=2)
    weights = MicrobatchFactors((1, 3, 1, 2), (1, 2, 1, 2))
    costs = Costs((1, 3) * 3, 1, 1, 0.5, {Kind.F: (9, 1) * 3, Kind.B: (-9, -1) * 3}, microbatch=weights)
    orders = [(0, 1, 2, 3), (3, 1, 0, 2), (1, 0, 3, 2)]
    makespans, excess = ManyOrders(base, costs, (20,) * 3).try_all(orders)
    for order, makespan, over in zip(orders, makespans, excess, strict=True):
        timeline = simulate(base, replace(costs, microbatch=weights.reordered(order)))
        assert (makespan, over) == pytest.approx((timeline.makespan, max(timeline.peaks) / 20 - 1))


def test_recomputed_slices_take_their_own_time_again() -> None:
    schedule = build_schedule("seq1f1b", num_devices=1, num_microbatches=1, slices=2)
    costs = Costs((1, 3), 1, 1, memory={Kind.F: (9, 1), Kind.B: (-9, -1)})
    timeline = simulate(with_recompute(schedule, {0: Kind.R}), costs)
    taken = {
        str(a): end - start for a, (start, end) in zip(timeline.schedule.orders[0], timeline.spans[0], strict=True)
    }
    assert (taken["0F0"], taken["0F1"], taken["0R1"], taken["0R0"]) == (1, 3, 3, 1)
    assert timeline.peaks == (9,), "one slice at a time"
