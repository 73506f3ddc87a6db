"""Idle time by its causes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_steps import as_measured
from refusals import refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.stream import consecutive_steps
from megatron_pipemem.tools.report.measured_step import (
    BARRIER,
    CAUSES,
    HOST,
    IMBALANCE,
    LATE,
    MESSAGES,
    MICROBATCHES,
    NANOSECONDS,
    SCHEDULE,
    MeasuredStep,
    idle_causes,
)

SLOW_LAST = (1.0, 1.0, 1.0, 1.5)


def built(name: str, p: int = 4, m: int = 8):
    return build_schedule(name, num_devices=p, num_microbatches=m)


def disturbed(step: MeasuredStep, seed: int) -> MeasuredStep:
    """A step whose actions take other times, begin later, and were timed by clocks that disagree."""
    draw = random.Random(seed)
    nodes = len(step.actions)
    seconds = [round(duration * draw.uniform(0.5, 2)) for duration in step.nanoseconds]
    again = step.rerun(seconds, [draw.randrange(NANOSECONDS // 3) for _ in range(nodes)])
    spans: list[list[tuple[int, int]]] = [[] for _ in step.spans]
    ahead = [draw.randrange(NANOSECONDS // 10) for _ in step.spans]
    for device, start, end, took in zip(step.lanes, again.starts, again.ends, seconds, strict=True):
        if took:
            spans[device].append((start + ahead[device], end + ahead[device]))
    return MeasuredStep(step.schedule, tuple(map(tuple, spans)))


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zbv", "v-half", "hanayo", "chimera", "zb-h1"]),
    size=st.sampled_from([(2, 2), (2, 5), (4, 4), (4, 8)]),
    seed=st.integers(0, 10**6),
)
def test_causes_sum_up_to_the_idle_time(name, size, seed):
    p, m = size
    m = m + m % 2 if name == "chimera" else p * (m // p) if name == "interleaved" else m
    step = disturbed(as_measured(built(name, p, m)), seed)
    for device_idle, spans in zip(idle_causes(step), step.spans, strict=True):
        assert device_idle.idle_ns == step.length_ns - sum(end - start for start, end in spans)
        assert sum(device_idle.causes.values()) == device_idle.idle_ns and list(device_idle.causes) == list(CAUSES)
        assert min(device_idle.causes.values()) >= 0 and sum(device_idle.late_ns.values()) == device_idle.causes[LATE]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "po-h", "interleaved"])
def test_a_step_runs_again_as_it_ran(name):
    step = disturbed(as_measured(built(name)), 7)
    again = step.rerun(step.nanoseconds, step.delays)
    ran = [(start, end) for start, end, took in zip(again.starts, again.ends, step.nanoseconds, strict=True) if took]
    assert sorted(ran) == sorted(span for spans in step.spans for span in spans)


def causes_of(step: MeasuredStep) -> list[dict[str, float]]:
    return [
        {cause: nanoseconds / NANOSECONDS for cause, nanoseconds in device_idle.causes.items() if nanoseconds}
        for device_idle in idle_causes(step)
    ]


def test_even_stages_and_instant_messages_leave_what_the_schedule_makes():
    assert causes_of(as_measured(built("1f1b"))) == [{SCHEDULE: 9.0}] * 4


def test_what_a_barrier_costs_is_what_steps_without_one_save():
    schedule = built("zbv", 8, 16)
    steps = consecutive_steps(schedule)
    assert causes_of(as_measured(schedule)) == [{BARRIER: steps.synchronous - steps.period}] * 8


def test_a_slow_stage_makes_the_others_wait():
    *others, slow = causes_of(as_measured(built("1f1b"), Costs(SLOW_LAST, SLOW_LAST, SLOW_LAST)))
    assert all(other[IMBALANCE] > other[SCHEDULE] * 0.9 for other in others)
    assert IMBALANCE not in slow


def test_messages_and_the_host_are_told_apart():
    schedule = built("1f1b")
    costs = Costs(p2p=0.1)
    longer = simulate(schedule, costs).makespan - simulate(schedule).makespan
    assert causes_of(as_measured(schedule, costs)) == [{SCHEDULE: 9.0, MESSAGES: pytest.approx(longer)}] * 4
    step = as_measured(schedule)
    delays = [NANOSECONDS if str(action) == "0F0" else 0 for action in step.actions]
    late = step.rerun(step.nanoseconds, delays)
    spans = [[], [], [], []]
    for device, start, end in zip(step.lanes, late.starts, late.ends, strict=True):
        spans[device].append((start, end))
    for causes in causes_of(MeasuredStep(schedule, tuple(map(tuple, spans)))):
        assert causes == {SCHEDULE: 9.0, HOST: 1.0}


def test_a_late_action_is_blamed_on_its_device():
    step = as_measured(built("1f1b"))
    seconds = [
        3 * took if str(action) == "2F4" else took for action, took in zip(step.actions, step.nanoseconds, strict=True)
    ]
    again = step.rerun(seconds, step.delays)
    spans = [[], [], [], []]
    for device, start, end in zip(step.lanes, again.starts, again.ends, strict=True):
        spans[device].append((start, end))
    for device_idle in idle_causes(MeasuredStep(step.schedule, tuple(map(tuple, spans)))):
        assert device_idle.causes[SCHEDULE] == 9 * NANOSECONDS
        assert device_idle.late_ns == ({2: 2 * NANOSECONDS} if device_idle.device != 2 else {})


def test_costs_are_what_was_measured():
    schedule = built("zb-h1")
    costs = Costs(SLOW_LAST, (2.0, 2.0, 2.0, 2.5), (0.5,) * 4, p2p=0.25)
    step = as_measured(schedule, costs)
    measured = step.costs()
    assert measured.seconds(schedule.placement) == costs.seconds(schedule.placement)
    assert all(seconds == pytest.approx(0.25) for seconds in step.link_seconds.values())
    assert simulate(schedule, measured).makespan == pytest.approx(step.length_ns / NANOSECONDS)


def test_costs_of_slices_are_what_was_measured():
    schedule = build_schedule("seq1f1b", num_devices=2, num_microbatches=4, slices=2)
    costs = Costs((1.0, 2.0, 1.5, 3.0), (0.5, 1.0, 1.0, 1.5), (0.5, 1.0, 1.0, 1.5), p2p=0.25)
    step = as_measured(schedule, costs)
    assert step.median_ns[Kind.F, 1] == 2 * NANOSECONDS and step.median_ns[Kind.B, 2] == 2 * NANOSECONDS
    assert step.microbatch_factors == (1.0,) * 4, "slices differ, microbatches do not"
    assert step.of_stages()[Kind.F] == costs.forward
    measured = step.costs()
    assert measured.seconds(schedule.placement, schedule.units)[Kind.I] == costs.backward_input
    assert simulate(schedule, measured).makespan == pytest.approx(step.length_ns / NANOSECONDS)
    for causes in causes_of(as_measured(schedule, replace(costs, p2p=0.0))):
        assert set(causes) <= {SCHEDULE, IMBALANCE}, (
            "later slices take longer on every stage: nothing but the stages is uneven"
        )


def test_a_fused_backward_is_split_as_it_was_priced():
    step = as_measured(built("1f1b"), Costs(1.0, 1.5, 0.5))
    assert step.of_stages()[Kind.I] == (1.0,) * 4
    split = MeasuredStep(step.schedule, step.spans, Costs(7.0, 3.0, 1.0))
    assert split.of_stages()[Kind.I] == (1.5,) * 4


@pytest.mark.parametrize(
    ("spans", "says"),
    [(((((0, 1),)),) * 4, ("wrong-count",)), ((((5, 6), (4, 7)),) * 2, ("wrong-order",))],
)
def test_spans_of_something_else_are_refused(spans, says):
    schedule = built("1f1b", len(spans), 1 if len(spans) == 2 else 8)
    with refused(*says, kind=ConfigError):
        MeasuredStep(schedule, spans)


def test_microbatches_that_are_not_alike():
    weights = MicrobatchFactors((1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    step = as_measured(built("1f1b"), Costs(microbatch=weights))
    assert step.microbatch_factors == weights.time
    causes = causes_of(step)
    assert all(set(seconds_by_cause) == {SCHEDULE, MICROBATCHES} for seconds_by_cause in causes)
