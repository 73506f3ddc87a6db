"""Microbatches that are not alike: their weights, and what the simulator makes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples
from random_schedules import family_schedules, random_schedules
from refusals import refused
from step_oracle import Event, play

from megatron_pipemem.choose.knowledge import Knowledge
from megatron_pipemem.errors import CostsError, ScheduleError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.part_costs import prices_of
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate
from megatron_pipemem.schedule.stream import family_window, steady
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.schedule.vocabulary import VocabularyCosts
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.search import search_schedule
from megatron_pipemem.tools.planner.pareto import choices

LAYERS = ("F", "I", "W", "B", "R", "RS")
COPY, MESSAGE, COLLECTIVE = 0.75, 0.25, 0.125
PASSES = {"EMBED_F": 0.1, "S": 0.5, "LOSS": 0.05, "T": 0.25, "EMBED_B": 0.2}


@st.composite
def any_weights(draw: st.DrawFn, num_microbatches: int) -> MicrobatchWeights:
    """Weights of a step, with some kinds that have their own."""
    weights = st.lists(st.floats(0, 9), min_size=num_microbatches, max_size=num_microbatches)
    kinds = st.sampled_from([Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.S, Kind.STATS, Kind.OFFLOAD])
    own = draw(st.dictionaries(kinds, weights, max_size=3))
    return MicrobatchWeights(draw(weights), draw(st.none() | weights), own)


def agree(schedule: Schedule, weights: MicrobatchWeights) -> Timeline:
    """Simulate a schedule, and compare every span and every peak with the oracle's."""
    placement, slices = schedule.placement, schedule.slices
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
    costs = Costs(1, 1, 1, p2p=0.5, microbatch=MicrobatchWeights((1, 3), (1, 2)))
    run = run_single_queues(lower(schedule, single_queue=True, costs=costs), costs)
    takes = [end - start for start, end in run.spans[0]]
    seconds = dict(zip(map(str, run.program.actions[0]), takes, strict=True))
    assert (seconds["0F0"], seconds["0F1"], seconds["0B1"]) == (1, 3, 6)
    assert (seconds["0SEND_F0"], seconds["0SEND_F1"]) == (0.5, 1)


def test_reordered() -> None:
    weights = MicrobatchWeights((1, 2, 3), (4, 5, 6), {"W": (7, 8, 9)})
    assert weights.reordered((2, 0, 1)) == MicrobatchWeights((3, 1, 2), (6, 4, 5), {Kind.W: (9, 7, 8)})
    assert MicrobatchWeights([1, 2]).reordered([1, 0]).memory is None
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
        MicrobatchWeights(*arguments)


def test_weights_of_another_step_are_refused() -> None:
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    costs = Costs(microbatch=MicrobatchWeights((1, 2)))
    for use in (simulate, peaks):
        with refused("wrong-count", 2, 4, kind=CostsError):
            use(schedule, costs)


HEAVY = Costs(memory={Kind.F: 100, Kind.W: -100}, microbatch=MicrobatchWeights((1, 1, 1, 1), (1, 3, 1, 1)))


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


def test_messages_of_long_microbatches_count_with_their_bytes() -> None:
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    counted = {Kind.F: (100, 100), Kind.I: (0, -10), Kind.W: (-100, -100), Kind.RECV_F: (0, 10)}
    known = Knowledge(HEAVY, changes=counted)
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
    weights = MicrobatchWeights(data.draw(some), data.draw(some), {Kind.OFFLOAD: data.draw(some)})
    costs = Costs(1, 1.25, 0.5, 0.25, channel=Channel(data.draw(st.sampled_from([0, 0.5, 2]))), microbatch=weights)
    free = plan_offload(base, costs)
    assert max(free.peaks) <= max(free.base_timeline.peaks) * (1 + 1e-9)
    assert free.delay <= 1e-6 * free.makespan, "planned for other seconds than these"
    share, budget = data.draw(st.sampled_from([0.4, 0.8])), max(weights.memory)
    plan = plan_offload(base, costs, memory_cap=max(free.base_timeline.peaks) * share, host_budget=budget)
    validate(plan.schedule, costs, plan.memory_cap if plan.keeps_cap else None, budget)
