"""When actions run, what is held, and what waits for ever."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import dependencies
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate

SPLIT = Schedule.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")


def test_every_action_starts_as_soon_as_it_can() -> None:
    timeline = simulate(SPLIT, Costs(1, 2, 4, p2p=0.5))
    assert timeline.spans == (((0, 1), (5.0, 7.0), (7.0, 11.0)), ((1.5, 2.5), (2.5, 4.5), (4.5, 8.5)))
    assert timeline.makespan == 11
    assert timeline.work == (7, 7)
    assert timeline.ideal == 7
    assert timeline.bubble_rate == pytest.approx(1 - 7 / 11)
    assert timeline.messages == 2


def test_an_input_gradient_may_come_from_a_fused_or_a_split_backward() -> None:
    mixed = Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1B0,1F1,1I1,1W1\n")
    fused = {action for order in mixed.orders for action in order if action.kind is Kind.B}
    needs = {str(a): [str(n) for n in dependencies(a, mixed.placement, fused)] for order in mixed.orders for a in order}
    assert needs["0I0"] == ["0F0", "1B0"]
    assert needs["0I1"] == ["0F1", "1I1"]
    assert needs["1B0"] == ["1F0"]
    assert needs["0W0"] == ["0I0"]
    assert simulate(mixed).makespan == oracle.makespan(mixed, 1, 1, 1)


@settings(max_examples=200, deadline=None)
@given(
    schedule=random_schedules() | random_schedules(max_replicas=2, max_slices=3),
    f=st.floats(0, 9),
    i=st.floats(0, 9),
    w=st.floats(0, 9),
    p2p=st.floats(0, 9),
)
def test_any_order_as_the_oracle_runs_it(schedule: Schedule, f: float, i: float, w: float, p2p: float) -> None:
    timeline = simulate(schedule, Costs(f, i, w, p2p))
    assert timeline.makespan == pytest.approx(oracle.makespan(schedule, f, i, w, p2p))
    assert timeline.peaks == pytest.approx([float(peak) for peak in oracle.peak(schedule)])
    assert timeline.bubble_rate >= -1e-9


def test_peaks_in_bytes_see_partial_release() -> None:
    bytes_of = Costs(memory={Kind.F: 100, Kind.I: -60, Kind.W: -40})
    early = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    late = Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n")
    assert simulate(early, bytes_of).peak == 140
    assert simulate(late, bytes_of).peak == 200


def test_an_order_that_waits_for_ever_is_named() -> None:
    stuck = Schedule.from_csv("0F0,0B0\n1B0,1F0\n")
    with refused("unmet-need", kind=ScheduleError) as raised:
        simulate(stuck)
    assert (raised.value.device, raised.value.position, raised.value.action) in ((0, 1, "0B0"), (1, 0, "1B0"))
    assert [(wait.device, str(wait.action), str(wait.needed)) for wait in raised.value.cycle] == [(1, "1B0", "1F0")]
