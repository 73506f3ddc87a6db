"""Plans of what leaves a device or runs again, and when: against an oracle, and against what is published."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache

import offload_oracle
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples, rest_nightly
from promises import assert_correct
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Choice, Knowledge, Shape
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.offload import uniform_repeating, with_prompt_weights
from megatron_pipemem.features.offload.orders import OffloadPlan, plan_offload
from megatron_pipemem.features.offload.transfers import NO_HOST_MEMORY, TOO_SHORT
from megatron_pipemem.features.recompute.orders import (
    recompute_plans,
    recompute_steps,
    recomputed_by_mode,
    with_early_recompute,
    with_recompute,
)
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import COMPUTE, RECOMPUTE, Kind
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program


def costs_of(ratio: float, duplex: bool = False, switches: tuple[tuple[int, ...], ...] = ()) -> Costs:
    return replace(Costs(), channel=Channel(duplex=duplex, switches=switches, ratio=ratio))


def played(schedule: Schedule, ratio: float) -> offload_oracle.Played:
    """With unit passes of one chunk."""
    copy = 1.5 * ratio
    return offload_oracle.play(schedule, {"F": 1, "I": 1, "W": 1, "B": 2, "OFFLOAD": copy, "RELOAD": copy})


def bubble(schedule: Schedule, run: offload_oracle.Played) -> float:
    """In unit passes of one chunk; ``run`` played them."""
    return run.makespan - 3 * schedule.placement.num_chunks * schedule.num_microbatches


@cache
def pipe_offload(name: str, p: int, v: int, ratio: float, m: int = 0, placement: str = "interleaved") -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m or 4 * p, chunks=v, k=ratio, placement=placement)


def check(plan: OffloadPlan) -> None:
    """It computes what its base does, validates, and accounts for every activation."""
    validate(plan.schedule)
    assert offload_oracle.mistakes(plan.schedule) == []
    for order, before in zip(plan.schedule.orders, plan.base.orders, strict=True):
        assert tuple(action for action in order if action.kind in COMPUTE) == before
    made = {(a.stage, a.microbatch) for order in plan.base.orders for a in order if a.kind is Kind.F}
    assert set(plan.offloaded) | set(plan.kept) == made
    assert not set(plan.offloaded) & set(plan.kept)


# ----------------------------------------------------------------------------------- what is published, met or beaten

IN_FLIGHT = {
    (4, 4): ((5, 5), (4, 4, 4)),
    (8, 2): ((6, 6), (3, 5, 6)),
    (8, 3): ((5, 6), (4, 4, 6)),
}
"""In-flight chunks of PO-H at k = .6 and 1, and of PO-F at k = .6, .9 and 1, of the published scheduler (p, v)."""


@pytest.mark.parametrize(("p", "v"), rest_nightly(IN_FLIGHT, [(4, 4), (8, 2)], "the other sizes"))
def test_no_more_in_flight_than_published_and_no_slower(p: int, v: int) -> None:
    half, full = IN_FLIGHT[p, v]
    base = uniform_repeating(p, 4 * p, v)
    idle = oracle.makespan(base, v, v, v) - 12 * p * v
    for name, rows in (("po-h", zip((0.6, 1.0), half, strict=True)), ("po-f", zip((0.6, 0.9, 1.0), full, strict=True))):
        for ratio, most in rows:
            schedule = pipe_offload(name, p, v, ratio)
            run = played(schedule, ratio)
            assert max(run.device_peaks) <= most, (name, ratio)
            assert bubble(schedule, run) <= idle + 1e-6 < 3 * v * (p - 1)


@pytest.mark.parametrize(
    ("placement", "ratio", "most"),
    rest_nightly(
        [(name, *row) for name in ("interleaved", "v") for row in ((0.6, 3), (0.8, 3), (1.0, 4))],
        [("interleaved", 1.0, 4), ("v", 0.6, 3)],
        "either placement and the least and greatest ratio",
    ),
)
def test_a_quarter_of_the_memory_without_a_bubble_in_the_steady_state(placement: str, ratio: float, most: int) -> None:
    schedule = pipe_offload("po-f", 8, 2, ratio, 32, placement)
    run = played(schedule, ratio)
    assert max(run.device_peaks) <= most
    assert bubble(schedule, run) < 3 * 2 * 7
    # More microbatches make the step longer by their work and by nothing else.
    longer = pipe_offload("po-f", 8, 2, ratio, 40, placement)
    assert bubble(longer, played(longer, ratio)) <= bubble(schedule, run) + 1e-6


@pytest.mark.parametrize(
    ("p", "v"),
    rest_nightly([(2, 4), (3, 2), (5, 3), (7, 2), (9, 2)], [(2, 4), (3, 2)], "test_any_schedule_can_be_planned_for"),
)
def test_everything_can_be_planned(p: int, v: int) -> None:
    """Odd numbers of devices, every number of chunks, and channels far too slow (the full grid: benchmarks)."""
    for number in range(v + 1):
        for ratio in (0.4, 1.6, 3.0):
            schedule = build_schedule(
                "po-f", num_devices=p, num_microbatches=p + v, chunks=v, k=ratio, offload_chunks=number
            )
            validate_program(lower(schedule))
            assert offload_oracle.mistakes(schedule) == []
            base = uniform_repeating(p, p + v, v)
            run = played(schedule, ratio)
            assert run.makespan <= oracle.makespan(base, v, v, v) + 1e-6
            assert max(run.device_peaks) <= max(oracle.peak(base)) * schedule.num_stages
            stages = {action.stage for order in schedule.orders for action in order if action.kind is Kind.OFFLOAD}
            assert all(len(stages & set(held)) <= number for held in schedule.placement.stages)


# ------------------------------------------------------------------------------------------------------ any schedule


@examples(40)
@given(data=st.data())
def test_any_schedule_can_be_planned_for(data: st.DataObject) -> None:
    base = data.draw(random_schedules())
    ratio = data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.5, 40.0]))
    shared = (tuple(range(base.num_devices)),) if data.draw(st.booleans()) else ()
    costs = costs_of(ratio, data.draw(st.booleans()), shared)
    budget = data.draw(st.sampled_from([None, 0.0, 0.4, 1.0]))
    plan = plan_offload(base, costs, host_budget=budget)
    check(plan)
    validate(plan.schedule, host_budget=budget)
    assert max(plan.peaks) <= max(plan.base_timeline.peaks) + 1e-9
    if not shared:
        assert plan.delay <= 1e-6 * plan.makespan


@examples(40)
@given(data=st.data())
def test_a_cap_is_kept_with_no_more_than_it_needs(data: st.DataObject) -> None:
    base = data.draw(random_schedules())
    costs = costs_of(data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])))
    share = data.draw(st.sampled_from([0.3, 0.6, 0.9, 1.0]))
    cap = max(plan_offload(base, costs).base_timeline.peaks) * share
    plan = plan_offload(base, costs, memory_cap=cap)
    check(plan)
    if plan.keeps_cap:
        validate(plan.schedule, memory_cap=cap)
        assert plan.binds == ""
    if share == 1.0:
        assert plan.offloaded == () and set(plan.kept.values()) == {"not chosen"}


@pytest.mark.parametrize("name", ["gis-h", "interleaved", "zbv"])
@pytest.mark.parametrize("channel", ["slow", "free"])
def test_stages_that_take_no_time(name: str, channel: str) -> None:
    """As those without layers do: many positions of an order then have one time, and a round trip's actions keep theirs."""
    for empty in range(1, 5):
        takes = tuple(float(stage != empty) for stage in range(6))
        gives_back = tuple(-taken for taken in takes)
        memory = {Kind.F: takes, Kind.I: (0.0,) * 6, Kind.W: gives_back} if channel == "slow" else None
        copies = Channel(0.0 if channel == "free" else tuple(0.6 * seconds for seconds in takes))
        costs = Costs(takes, takes, takes, memory=memory, channel=copies)
        plan = plan_offload(build_schedule(name, num_devices=3, num_microbatches=8), costs)
        check(plan)
        assert plan.offloaded and (memory is None or empty not in {stage for stage, _ in plan.offloaded})


@pytest.mark.parametrize("base", [("gis-h", {"group_size": 1}), ("zbv", {}), ("1f1b", {}), ("v-half", {})])
def test_a_faster_channel_or_more_room_is_never_worse(base: tuple[str, dict[str, object]]) -> None:
    name, options = base
    schedule = build_schedule(name, num_devices=4, num_microbatches=8, **options)
    peaks = [max(plan_offload(schedule, costs_of(ratio)).peaks) for ratio in (0.0, 0.4, 0.7, 1.0, 1.5, 2.5, 5.0)]
    assert peaks == sorted(peaks)
    whole = max(plan_offload(schedule, costs_of(0.7)).timeline.host_peaks)
    rooms = [
        max(plan_offload(schedule, costs_of(0.7), host_budget=whole * share).peaks) for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    assert rooms == sorted(rooms, reverse=True)
    least = plan_offload(schedule, costs_of(0.7), memory_cap=peaks[3])
    more = plan_offload(schedule, costs_of(0.7), memory_cap=peaks[3] * 1.5)
    assert len(more.offloaded) <= len(least.offloaded) and more.delay <= least.delay + 1e-9


@pytest.mark.parametrize(
    ("name", "p", "m", "ratio", "switches"),
    [
        ("v-min", 6, 7, 0.3, ((0, 1, 2, 3, 4, 5),)),
        ("zbv", 4, 9, 1.3, ((0, 2), (1, 3))),
        ("interleaved", 5, 8, 2.0, ((1, 3, 4),)),
        ("1f1b", 8, 6, 0.7, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("dualpipe-v", 3, 10, 1.0, ((0, 1, 2),)),
        ("gpipe", 4, 5, 3.0, ()),
    ],
)
@pytest.mark.parametrize("select", ["auto", "half"])
def test_without_a_cap_no_step_gets_longer(name, p, m, ratio, switches, select) -> None:
    """However devices share channels, and whatever the channel cannot carry."""
    schedule = build_schedule(name, num_devices=p, num_microbatches=m)
    for duplex in (False, True):
        plan = plan_offload(schedule, costs_of(ratio, duplex, switches), select)
        check(plan)
        assert plan.makespan <= simulate(schedule, costs_of(ratio)).makespan * (1 + 1e-9), duplex
        assert plan.delay <= 1e-9 * plan.makespan and max(plan.peaks) <= max(plan.base_timeline.peaks)


def test_reasons_are_told() -> None:
    schedule = build_schedule("1f1b", num_devices=4, num_microbatches=12)
    assert set(plan_offload(schedule, costs_of(0.5), "off").kept.values()) == {"not chosen"}
    slow = plan_offload(schedule, costs_of(100.0))
    assert slow.offloaded == () and set(slow.kept.values()) == {TOO_SHORT}
    assert slow.binds == f"{TOO_SHORT} (12 activations)", slow.kept
    poor = plan_offload(schedule, costs_of(0.5), host_budget=0.0)
    assert NO_HOST_MEMORY in poor.kept.values() and poor.timeline.host_peaks == (0,) * 4
    crowded = plan_offload(schedule, costs_of(2.0), memory_cap=0.01)
    assert not crowded.keeps_cap and crowded.binds
    # Those that matter are of the device that exceeds its cap, not of the fullest.
    cramped = plan_offload(schedule, costs_of(100.0), memory_cap=[9.0, 9.0, 0.1, 9.0])
    assert cramped.obstacles == {TOO_SHORT: 12}


def test_stages_may_be_named() -> None:
    schedule = build_schedule("interleaved", num_devices=2, num_microbatches=8)
    plan = plan_offload(schedule, costs_of(0.2), [1])
    assert {stage for stage, _ in plan.offloaded} == {1}
    assert {stage for stage, _ in plan_offload(schedule, costs_of(0.2), "half").offloaded} == {0, 1}
    for select, *told in (
        ("most", "bad-choice"),
        (-1, "bad-number"),
        (True, "bad-number"),
        ([7], "unknown-stage", 7, 3),
    ):
        with refused(*told, kind=UnsupportedError):
            plan_offload(schedule, costs_of(0.2), select)
    with refused("wrong-count", kind=UnsupportedError):
        plan_offload(schedule, costs_of(0.2), memory_cap=[1.0])


def test_prompt_weights_keep_everything_else() -> None:
    schedule = build_schedule("zbv", num_devices=4, num_microbatches=9)
    variants = list(with_prompt_weights(schedule, Costs()))
    for most, variant in enumerate(variants):
        assert_correct(variant)
        for order in variant.orders:
            waiting = 0
            for action in order:
                waiting += (action.kind is Kind.I) - (action.kind is Kind.W)
                assert waiting <= most + 1
    assert list(with_prompt_weights(build_schedule("1f1b", num_devices=2, num_microbatches=4), Costs())) == []


# -------------------------------------------------------------------------------------------------------- the search


def search_offload(p: int, m: int, costs: Costs, cap: float, recompute: str = "none", **options: object) -> Choice:
    request = Request("auto", MemoryCap(cap, False), options=options, offload="auto", recompute=recompute)
    return choose(request, Shape(p, None, m), Knowledge(costs))


def test_search_keeps_the_cap_and_beats_what_keeps_it_without() -> None:
    costs = costs_of(1.0)
    choice = search_offload(4, 4, costs, 3 / 8, seconds=60, effort=0, max_chunks=2)
    validate(choice.schedule, memory_cap=3 / 8)
    assert choice.offload.keeps_cap
    v_min = build_schedule("v-min", num_devices=4, num_microbatches=4)
    assert max(oracle.peak(v_min)) >= 3 / 8 and choice.timeline.makespan < oracle.makespan(v_min, 1, 1, 1)
    with refused("cap-unreachable", kind=UnsupportedError):
        search_offload(2, 1, costs, 0.01, seconds=60, effort=0, placement="linear")


@pytest.mark.parametrize(
    ("p", "m", "ratio", "cap", "switches"), [(4, 7, 0.3, 0.75, ()), (3, 4, 0.7, 0.6, ((0, 1, 2),))]
)
def test_search_is_never_slower_than_a_family_that_fits_the_cap(p, m, ratio, cap, switches) -> None:
    costs = costs_of(ratio, switches=switches)
    choice = search_offload(p, m, costs, cap, effort=0, max_chunks=2)
    compared = 0
    for family in families():
        if family.slices > 1 or family.asynchronous or family.replicas > 1:
            continue
        try:
            schedule = build_schedule(family.name, num_devices=p, num_microbatches=m, costs=costs)
        except UnsupportedError:
            continue
        plan = plan_offload(schedule, costs, memory_cap=cap)
        if plan.keeps_cap:
            compared += 1
            assert choice.timeline.makespan <= plan.makespan * (1 + 1e-9), family.name
        if simulate(schedule, costs).peak <= cap:
            assert choice.timeline.makespan <= simulate(schedule, costs).makespan * (1 + 1e-9), family.name
    assert compared > 3


def test_search_recomputes_where_the_channel_is_too_slow() -> None:
    """Recomputing everything holds next to nothing in activation units; a free channel makes it superfluous."""
    options = {"placement": "linear", "recompute": "auto", "seconds": 60, "effort": 0}
    slow = search_offload(3, 4, costs_of(50.0), 0.5, **options)
    validate(slow.schedule, memory_cap=0.5)
    assert slow.schedule.recomputed and slow.schedule.recomputed.get(2) is not Kind.R
    free = search_offload(3, 4, costs_of(0.0), 0.5, **options)
    assert not free.schedule.recomputed and free.timeline.makespan < slow.timeline.makespan


# -------------------------------------------------------------------------------------------------------- recomputation


def planned(schedule: Schedule, costs: Costs, cap: float | None = None) -> OffloadPlan:
    return plan_offload(schedule, costs, "off", cap)


def chosen(name: str, costs: Costs, cap: float, **settings: object) -> OffloadPlan:
    return choose(Request(name, MemoryCap(cap, False), **settings), Shape(4, None, 8), Knowledge(costs)).offload


def early_recompute(plan: OffloadPlan) -> OffloadPlan:
    return with_early_recompute(plan, lambda tried: tried.keeps_cap)


def test_selectively_recomputed_stages_hold_less_and_take_longer() -> None:
    base = build_schedule("1f1b", num_devices=4, num_microbatches=8)
    costs = Costs(recompute_selective=0.25)
    plans = {mode: next(recompute_plans(base, costs, mode, lambda s: planned(s, costs), lambda s: ())) for mode in
             ("none", "selective", "full")}  # fmt: skip
    # Of four microbatches in flight one is whole.
    assert plans["selective"].peaks[0] == 1 - 3 / 4 * SELECTIVE_BYTES
    spans = [plans[mode].makespan for mode in ("none", "selective", "full")]
    assert spans == sorted(spans) and len(set(spans)) == 3
    assert recomputed_by_mode(plans["selective"].schedule) == {"selective": [0, 1, 2, 3]}
    assert recomputed_by_mode(plans["full"].schedule) == {"full": [0, 1, 2, 3]}
    assert recomputed_by_mode(base) == {}


def test_what_is_cheap_for_its_memory_runs_again_first() -> None:
    base = build_schedule("interleaved", num_devices=2, num_microbatches=4)
    assert recompute_steps(base, Costs(), 0) == [(0, Kind.RS), (2, Kind.RS), (0, Kind.R), (2, Kind.R)], (
        "0 is longer held"
    )
    dear = Costs(recompute_selective=0.9)
    assert recompute_steps(base, dear, 0) == [(0, Kind.R), (2, Kind.R)], "all of a stage costs less for its memory"
    # A stage without layers has nothing to drop.
    empty = Costs(memory={Kind.F: (0, 1, 1, 1), Kind.R: (0, 1, 1, 1), Kind.B: (0, -2, -2, -2)})
    assert {stage for stage, _ in recompute_steps(base, empty, 0)} == {2}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half"])
def test_a_lower_cap_takes_no_less_recomputation(name: str) -> None:
    costs, before = Costs(), -1.0
    for cap in (1.5, 0.8, 0.65, 0.6, 0.5):
        plan = chosen(name, costs, cap, recompute="auto")
        assert plan.keeps_cap
        validate(plan.schedule, costs, cap)
        work = sum(plan.timeline.work)
        assert work >= before and (cap < 1.5 or not plan.schedule.recomputed)
        before = work


def test_computing_again_is_preferred_to_waiting_for_the_channel() -> None:
    costs = Costs(channel=Channel(6.0))
    waiting, mixed = (chosen("1f1b", costs, 0.65, offload="auto", recompute=mode) for mode in ("none", "auto"))
    assert waiting.keeps_cap and waiting.delay > 0 and mixed.keeps_cap
    assert mixed.makespan < waiting.makespan and Kind.RS in mixed.schedule.recomputed.values()


def test_a_search_recomputes_in_part_where_that_is_enough() -> None:
    options = {"placement": "linear", "seconds": 1, "effort": 0.02}
    plan = chosen("auto", Costs(), 0.7, options=options, recompute="auto")
    validate(plan.schedule, memory_cap=0.7)
    assert plan.keeps_cap and set(plan.schedule.recomputed.values()) <= {Kind.RS}


def test_what_runs_again_fills_a_wait() -> None:
    """Device 1 waits for 1F1 before it can go on to 1B0, and 1B0 for nobody: 1R0 may as well run in that wait."""
    text = "0F0,0F1,0B0,0B1\n1F0,1F1,1R0,1B0,1R1,1B1\n"
    plan = planned(Schedule.from_csv(text), Costs((4, 2), 1, 1), 2.0)
    early = early_recompute(plan)
    validate(early.schedule)
    assert [str(action) for action in early.schedule.orders[1]][:4] == ["1F0", "1R0", "1F1", "1B0"]
    assert early.makespan < plan.makespan
    # It holds its input and a whole microbatch while 1F1 runs; afterwards two inputs and a whole microbatch in any case.
    costs = Costs((4, 2), 1, 1, memory={Kind.F: (0, 0.1), Kind.R: 1, Kind.B: (0, -1.1)})
    assert early_recompute(planned(Schedule.from_csv(text), costs)).schedule == early.schedule
    assert with_early_recompute(plan, lambda tried: False) is plan


@examples(60)
@given(data=st.data())
def test_running_again_early_is_valid_never_slower_and_within_the_cap(data: st.DataObject) -> None:
    base = data.draw(random_schedules())
    again = data.draw(
        st.dictionaries(st.integers(0, base.num_stages - 1), st.sampled_from(sorted(RECOMPUTE)), min_size=1)
    )
    prices = data.draw(st.tuples(*[st.integers(1, 5)] * 4, st.integers(0, 3)))
    costs = Costs(*prices[:3], recompute_selective=prices[3] / 4, p2p=prices[4])
    plan = planned(with_recompute(base, again), costs)
    if data.draw(st.booleans()):
        plan = planned(plan.schedule, costs, max(plan.peaks))
    early = early_recompute(plan)
    validate(early.schedule, costs, plan.memory_cap)
    assert early.makespan <= plan.makespan and max(early.peaks) <= max(plan.peaks)
    moved = [(sorted(a), sorted(b)) for a, b in zip(plan.schedule.orders, early.schedule.orders, strict=True)]
    assert all(a == b for a, b in moved)
    for before, after in zip(plan.schedule.orders, early.schedule.orders, strict=True):
        assert [a for a in before if a.kind not in RECOMPUTE] == [a for a in after if a.kind not in RECOMPUTE]


def test_a_schedule_goes_to_other_processes() -> None:
    schedule = with_recompute(build_schedule("v-half", num_devices=2, num_microbatches=4), {0: Kind.R, 1: Kind.RS})
    assert schedule.recomputed == {0: Kind.R, 1: Kind.RS}
    validate(schedule)  # what it keeps for itself goes too
    assert pickle.loads(pickle.dumps(schedule)) == schedule
