"""Microbatches that are not alike: their weights, what the simulator makes of them, and plans of their step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from lanes import examples
from random_schedules import FAMILIES, family_schedules, random_schedules
from refusals import refused
from step_oracle import Event, play

from megatron_pipemem.choose.knowledge import Knowledge
from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.part_costs import prices_of
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate
from megatron_pipemem.schedule.stream import family_window, steady
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.schedule.vocabulary import VocabularyCosts
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.search import search_schedule, step_plan
from megatron_pipemem.search.step_plan import Dispatcher, ManyOrders, StepPlan, plan_step
from megatron_pipemem.tools.planner.pareto import choices

LAYERS = ("F", "I", "W", "B", "R", "RS")
COPY, MESSAGE, COLLECTIVE = 0.75, 0.25, 0.125
PASSES = {"EMBED_F": 0.1, "S": 0.5, "LOSS": 0.05, "T": 0.25, "EMBED_B": 0.2}


@st.composite
def any_weights(draw: st.DrawFn, num_microbatches: int) -> MicrobatchFactors:
    """Weights of a step, with some kinds that have their own."""
    weights = st.lists(st.floats(0, 9), min_size=num_microbatches, max_size=num_microbatches)
    kinds = st.sampled_from([Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.S, Kind.STATS, Kind.OFFLOAD])
    own = draw(st.dictionaries(kinds, weights, max_size=3))
    return MicrobatchFactors(draw(weights), draw(st.none() | weights), own)


def agree(schedule: Schedule, weights: MicrobatchFactors) -> Timeline:
    """Simulate a schedule, and compare every span and every peak with the oracle's."""
    placement, slices = schedule.placement, schedule.units.parts
    chunks = [len(placement.stages[device]) / placement.replicas * slices for device in placement.devices]
    layers = {"F": 1.0, "I": 1.25, "W": 0.5, "R": 1.0, "RS": 0.05}
    tokens = weights.memory or (1.0,) * len(weights)

    def seconds(event: Event) -> float:
        kind, stage, unit = event
        k = unit // slices
        own = {name: factors[k] for name, factors in weights.kinds.items()}
        if kind == "B" and "B" not in own:
            return seconds(("I", stage, unit)) + seconds(("W", stage, unit))
        if kind in LAYERS:
            base = (layers["I"] + layers["W"] if kind == "B" else layers[kind]) / chunks[stage]
            weight = own.get(kind, own.get("F", weights.time[k]) if kind == "R" else weights.time[k])
            return base * weight
        if kind in PASSES:
            return PASSES[kind] * own.get(kind, tokens[k])
        base = COLLECTIVE if stage < 0 else COPY / chunks[stage]
        if kind in ("OFFLOAD", "RELOAD") and "RS" in schedule.recomputed.values():
            base *= 1 - SELECTIVE_BYTES if schedule.recomputed.get(stage) == "RS" else 1
        return base * own.get(kind, tokens[k])

    played = play(
        schedule,
        seconds,
        lambda unit: MESSAGE / slices * tokens[unit // slices],
        lambda unit: tokens[unit // slices] / slices / placement.model_stages,
        dropped=SELECTIVE_BYTES,
    )
    vocabulary = VocabularyCosts(0.5, 0.25, 0.1, 0.2, 0.05, COLLECTIVE) if schedule.vocabulary_barriers else None
    costs = Costs(1.0, 1.25, 0.5, MESSAGE, channel=Channel(COPY), vocabulary=vocabulary, microbatch=weights)
    timeline = simulate(schedule, costs)
    for ours, theirs in zip(timeline.spans, played.spans, strict=True):
        assert [x for span in ours for x in span] == pytest.approx([x for span in theirs for x in span], abs=1e-9)
    assert timeline.peaks == pytest.approx(played.device_peaks, abs=1e-9)
    assert timeline.host_peaks == pytest.approx(played.host_peaks, abs=1e-9)
    return timeline


@examples(60)
@given(data=st.data())
def test_any_schedule_and_weights_as_the_oracle_plays_them(data: st.DataObject) -> None:
    some = family_schedules() | random_schedules(max_replicas=2, max_slices=3)
    schedule = data.draw(some)
    agree(schedule, data.draw(any_weights(schedule.num_microbatches)))


def with_offload() -> Schedule:
    schedule = build_schedule("po-f", num_devices=3, num_microbatches=6, chunks=2)
    return with_recompute(schedule, {1: Kind.RS})


FEATURES = {
    "offload, selective recomputation": with_offload,
    "recomputation": lambda: with_recompute(build_schedule("1f1b", num_devices=3, num_microbatches=6), {0: Kind.R}),
    "vocabulary, 1 barrier": lambda: with_vocabulary(build_schedule("1f1b", num_devices=3, num_microbatches=6), 1),
    "vocabulary, 2 barriers": lambda: with_vocabulary(build_schedule("zb-h1", num_devices=3, num_microbatches=6), 2),
}


@pytest.mark.parametrize("feature", FEATURES)
@settings(max_examples=8)
@given(data=st.data())
def test_transfers_recomputation_and_vocabulary_passes_as_the_oracle_plays_them(
    feature: str, data: st.DataObject
) -> None:
    agree(FEATURES[feature](), data.draw(any_weights(6)))


def test_one_queue_for_everything_waits_for_long_microbatches_too() -> None:
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=2)
    costs = Costs(1, 1, 1, p2p=0.5, microbatch=MicrobatchFactors((1, 3), (1, 2)))
    run = run_single_queues(lower(schedule, single_queue=True, costs=costs), costs)
    takes = [end - start for start, end in run.spans[0]]
    seconds = dict(zip(map(str, run.program.actions[0]), takes, strict=True))
    assert (seconds["0F0"], seconds["0F1"], seconds["0B1"]) == (1, 3, 6)
    assert (seconds["0SEND_F0"], seconds["0SEND_F1"]) == (0.5, 1)


def test_reordered() -> None:
    weights = MicrobatchFactors((1, 2, 3), (4, 5, 6), {"W": (7, 8, 9)})
    assert weights.reordered((2, 0, 1)) == MicrobatchFactors((3, 1, 2), (6, 4, 5), {Kind.W: (9, 7, 8)})
    assert MicrobatchFactors([1, 2]).reordered([1, 0]).memory is None
    with refused("wrong-order", 0, 1, 3, kind=CostsError):
        weights.reordered((0, 0, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, math.nan),), ("bad-type", "microbatch.time[1]")),
        (((1, math.inf),), ("bad-number", "microbatch.time[1]")),
        (((1, -2),), ("bad-number", "microbatch.time[1]", "-2.0")),
        (((),), ("bad-type", "microbatch.time")),
        ((2.0,), ("bad-type", "microbatch.time", "2.0")),
        (("12",), ("bad-type", "microbatch.time", 12)),
        (((1, 1), (1,)), ("wrong-count", "microbatch.memory", 1, "microbatch.time", 2)),
        (((1, 1), None, {"F": (1, 2, 3)}), ("wrong-count", "microbatch.kinds.F", 3, "microbatch.time", 2)),
        (((1, 1), None, {"SEND_F": (1, 2)}), ("unknown-key", "microbatch.kinds", "SEND_F", "BCAST_E")),
    ],
)
def test_impossible_weights_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with refused(*message, kind=CostsError):
        MicrobatchFactors(*arguments)


def test_weights_of_another_step_are_refused() -> None:
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    costs = Costs(microbatch=MicrobatchFactors((1, 2)))
    for use in (simulate, peaks):
        with refused("wrong-count", 2, 4, kind=CostsError):
            use(schedule, costs)


HEAVY = Costs(memory={Kind.F: 100, Kind.W: -100}, microbatch=MicrobatchFactors((1, 1, 1, 1), (1, 3, 1, 1)))


def test_the_cap_is_about_what_these_microbatches_hold() -> None:
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    validate(schedule, HEAVY, (400, 300))
    with refused("over-cap", 400, 399, kind=ScheduleError):
        validate(schedule, HEAVY, (399, 300))
    late = replace(HEAVY, microbatch=HEAVY.microbatch.reordered((2, 3, 0, 1)))
    assert peaks(schedule, late) == (400, 300)


def test_a_microbatch_that_no_order_helps_is_named() -> None:
    schedule = build_schedule("interleaved", num_devices=2, num_microbatches=4, chunks=2)
    with refused("over-cap", 1, 300, 250, kind=ScheduleError) as raised:
        validate(schedule, HEAVY, 250)
    assert (raised.value.device, raised.value.action) == (0, "2F1")
    assert str(schedule.orders[0][raised.value.position]) == "2F1"


def test_messages_of_long_microbatches_count_with_their_bytes() -> None:
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    counted = {Kind.F: (100, 100), Kind.I: (0, -10), Kind.W: (-100, -100), Kind.RECV_F: (0, 10)}
    known = Knowledge(HEAVY, counted_bytes=counted)
    held = known.device_peaks(schedule, known.counted_costs(schedule.placement, True))
    alike = replace(known, costs=replace(HEAVY, microbatch=None))
    assert list(alike.device_peaks(schedule, alike.counted_costs(schedule.placement, True))) == [
        200,
        120,
    ]  # the next message is awaited
    assert list(held) == [400, 340]


def test_who_takes_equal_microbatches_only_says_so(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"microbatch": {"time": [1, 2]}}')
    stream = family_window("pipedream-2bw", 2, 4, steady(2, 4))
    uses = {
        "the search": lambda: search_schedule(num_devices=2, num_microbatches=4, costs=HEAVY),
        "the table of all schedules": lambda: choices(2, 4, HEAVY),
        "a window of a stream that is never flushed": lambda: stream.simulate(HEAVY),
        "a run": lambda: prices_of(str(file)),
    }
    for who, use in uses.items():
        with refused("costs-mismatch", who, kind=CostsError):
            use()


@examples(25)
@given(data=st.data())
def test_copies_to_the_host_are_planned_for_what_microbatches_hold(data: st.DataObject) -> None:
    base = data.draw(random_schedules(max_slices=2))
    some = st.lists(st.floats(0.01, 9), min_size=base.num_microbatches, max_size=base.num_microbatches)
    weights = MicrobatchFactors(data.draw(some), data.draw(some), {Kind.OFFLOAD: data.draw(some)})
    costs = Costs(1, 1.25, 0.5, 0.25, channel=Channel(data.draw(st.sampled_from([0, 0.5, 2]))), microbatch=weights)
    free = plan_offload(base, costs)
    assert max(free.peaks) <= max(free.base_timeline.peaks) * (1 + 1e-9)
    assert free.delay <= 1e-6 * free.makespan, "planned for other seconds than these"
    share, budget = data.draw(st.sampled_from([0.4, 0.8])), max(weights.memory)
    plan = plan_offload(base, costs, memory_cap=max(free.base_timeline.peaks) * share, host_budget=budget)
    validate(plan.schedule, costs, plan.memory_cap if plan.keeps_cap else None, budget)


# ------------------------------------------------------------------------------------------------------ plans of a step


SYNCHRONOUS = sorted(name for name, family in FAMILIES.items() if not family.asynchronous)
PLAIN = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "1f1b-v", "dualpipe-v")


def long_tailed(m: int, seed: int = 0) -> MicrobatchFactors:
    """Factors of microbatches of one document each, whose lengths are log-normal; W is linear in tokens."""
    random = Random(seed)
    tokens = [random.lognormvariate(0, 0.8) for _ in range(m)]
    attention = [length + 0.2 * length**2 for length in tokens]
    return MicrobatchFactors(tuple(attention), tuple(tokens), {Kind.W: tuple(tokens)})


@st.composite
def unequal(draw: st.DrawFn, m: int) -> Costs:
    """Return costs with weights, some kinds with their own, and messages that may take time."""
    weights = st.lists(st.floats(0.1, 9), min_size=m, max_size=m)
    own = draw(st.dictionaries(st.sampled_from([Kind.F, Kind.W, Kind.B]), weights, max_size=2))
    of_step = MicrobatchFactors(draw(weights), draw(st.none() | weights), own)
    return Costs(1.0, 1.25, 0.75, p2p=draw(st.sampled_from([0.0, 0.125])), microbatch=of_step)


def built(name: str, p: int, m: int) -> Schedule:
    """Return a family's schedule; rejects the example where the family has none."""
    try:
        return build_schedule(name, num_devices=p, num_microbatches=m)
    except UnsupportedError:
        reject()


def check(plan: StepPlan, base: Schedule, costs: Costs, cap: MemoryCap | None) -> None:
    """Raise unless a plan is valid, within the cap, as fast as it says, and never slower than the base."""
    assert sorted(plan.order) == list(range(base.num_microbatches))
    assert plan.schedule.placement == base.placement
    by_position = replace(costs, microbatch=costs.microbatch.reordered(plan.order))
    caps = peaks(base, costs) if cap is None else cap.of(base.num_devices)
    validate(plan.schedule, by_position, caps)
    assert plan.makespan == simulate(plan.schedule, by_position).makespan
    assert plan.arrival_makespan == simulate(base, costs).makespan
    if all(held <= loosened(most) for held, most in zip(peaks(base, costs), caps, strict=True)):
        assert plan.makespan <= plan.arrival_makespan
    assert plan.bound <= plan.makespan * (1 + 1e-9)
    kinds = [{(a.kind, a.stage) for order in schedule.orders for a in order} for schedule in (plan.schedule, base)]
    if "dualpipe" not in base.name:  # has stages with backwards of both sorts
        assert kinds[0] == kinds[1]


@settings(max_examples=15)
@given(st.data())
def test_any_plan_is_valid_within_its_cap_and_never_slower(data):
    name = data.draw(st.sampled_from(PLAIN))
    base = built(name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7)))
    costs = data.draw(unequal(base.num_microbatches))
    cap = MemoryCap(max(peaks(base, costs)) * data.draw(st.floats(1, 2)), False) if data.draw(st.booleans()) else None
    check(plan_step(base, costs, cap, seconds=0.01), base, costs, cap)


@examples(20)
@given(st.data())
def test_many_orders_run_as_each_of_them_is_simulated(data):
    base = built(data.draw(st.sampled_from(SYNCHRONOUS)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    if data.draw(st.booleans()) and base.placement.replicas == base.units.parts == 1:
        base = (
            with_recompute(base, dict.fromkeys(range(base.num_devices), Kind.R))
            if data.draw(st.booleans())
            else with_vocabulary(base, 1)
        )
    costs = data.draw(unequal(base.num_microbatches))
    caps = [1.5] * base.num_devices
    orders = [data.draw(st.permutations(range(base.num_microbatches))) for _ in range(3)]
    makespans, excess = ManyOrders(base, costs, caps).try_all(orders)
    for order, makespan, over in zip(orders, makespans, excess, strict=True):
        by_position = replace(costs, microbatch=costs.microbatch.reordered(order))
        assert makespan == pytest.approx(simulate(base, by_position).makespan)
        assert over == pytest.approx(max(peaks(base, by_position)) / 1.5 - 1)


@settings(max_examples=15)
@given(st.data())
def test_dispatched_steps_end_when_they_say_and_keep_the_cap(data):
    base = built(data.draw(st.sampled_from(PLAIN)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7)))
    costs = data.draw(unequal(base.num_microbatches))
    tokens = costs.microbatch.tokens
    caps = [data.draw(st.floats(1, 4)) * max(tokens)] * base.num_devices
    order = tuple(data.draw(st.permutations(range(base.num_microbatches))))
    dispatcher = Dispatcher(base, costs, caps)
    dispatched = dispatcher.run(order)
    assert dispatched is not None, "a device that has room for one microbatch can always go on"
    by_position = replace(costs, microbatch=costs.microbatch.reordered(order))
    schedule = dispatcher.schedule(dispatched)
    validate(schedule, by_position, caps)
    assert dispatched.makespan == pytest.approx(simulate(schedule, by_position).makespan)


@pytest.mark.parametrize("seed", range(3))
def test_tiny_plans_are_the_best_there_are(seed, monkeypatch):
    """All orders of three microbatches, and all full-backward orders of two devices, in a cap of two of them."""
    monkeypatch.setattr(step_plan, "_KICKS", 6)
    p, m, costs = 2, 3, Costs(microbatch=long_tailed(3, seed))
    base = build_schedule("1f1b", num_devices=p, num_microbatches=m)
    cap = MemoryCap(max(peaks(base, costs)), False)
    ways = [way for way in product("FB", repeat=2 * m) if way.count("F") == m]
    ways = [way for way in ways if all(way[:at].count("F") >= way[:at].count("B") for at in range(2 * m))]
    best = float("inf")
    for order, *chosen in product(permutations(range(m)), ways, ways):
        actions = [
            tuple(Action(Kind(kind), device, way[:at].count(kind)) for at, kind in enumerate(way))
            for device, way in enumerate(chosen)
        ]
        schedule = replace(base, orders=tuple(actions))
        by_position = replace(costs, microbatch=costs.microbatch.reordered(order))
        if max(peaks(schedule, by_position)) <= loosened(cap.amount) and not Dependencies.of_schedule(schedule).stuck():
            best = min(best, simulate(schedule, by_position).makespan)
    assert plan_step(base, costs, cap, seconds=1).makespan == pytest.approx(best)


def test_an_order_that_rises_to_a_peak_beats_arrival_by_a_quarter_at_equal_memory():
    base = build_schedule("1f1b", num_devices=8, num_microbatches=32)
    costs = Costs(microbatch=long_tailed(32))
    cap = MemoryCap(max(peaks(base, costs)), False)
    plan = plan_step(base, costs, cap, seconds=0.2)
    check(plan, base, costs, cap)
    assert plan.arrival_makespan / plan.makespan > 1.25


def test_a_plan_that_time_does_not_end_is_always_the_same(monkeypatch):
    monkeypatch.setattr(step_plan, "_KICKS", 4)
    base = build_schedule("interleaved", num_devices=2, num_microbatches=4)
    costs = Costs(microbatch=long_tailed(4))
    assert plan_step(base, costs, seconds=60) == plan_step(base, costs, seconds=60)


@pytest.mark.parametrize("name", ["po-h", "chimera", "seq1f1b", "recomputed", "vocabulary", "forwards"])
def test_what_is_not_plain_keeps_its_actions_and_changes_the_order_alone(name):
    family = name if name in FAMILIES or name == "po-h" else "1f1b"
    base = build_schedule(family, num_devices=4, num_microbatches=8)
    if name == "recomputed":
        base = with_recompute(base, {0: Kind.R, 1: Kind.RS})
    elif name == "vocabulary":
        base = with_vocabulary(base, 2)
    elif name == "forwards":
        base = base.forward_only()
    costs = Costs(copy_sum=0.5, microbatch=long_tailed(8), channel=Channel(0.25))
    plan = plan_step(base, costs, seconds=0.1)
    check(plan, base, costs, None)
    if name != "forwards":
        assert plan.schedule.orders == base.orders
        assert plan.makespan < plan.arrival_makespan


def test_what_cannot_be_planned_is_refused():
    weights = MicrobatchFactors((1.0, 1.0, 1.0, 9.0))
    base = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    with refused("conflicting-features", kind=UnsupportedError):
        plan_step(build_schedule("pipedream", num_devices=2, num_microbatches=4), Costs())
    with refused("unit-mismatch", kind=UnsupportedError):
        plan_step(base, Costs(), MemoryCap(1e9, True))
    with refused("wrong-count", 3, 4, kind=CostsError):
        plan_step(base, Costs(microbatch=MicrobatchFactors((1.0, 2.0, 3.0))))
    with refused("cap-unreachable", kind=UnsupportedError):
        plan_step(base, Costs(microbatch=replace(weights, memory=weights.time)), MemoryCap(1.0, False))
