"""Orders that every placement has, on random placements."""

from __future__ import annotations

from fractions import Fraction

import oracle
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import placements

from megatron_pipemem.choose.choice import forward_schedule
from megatron_pipemem.choose.searching import serial_schedule
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


@given(placements(), st.integers(1, 6))
def test_forwards_alone_are_complete_and_never_wait_for_each_other(placement, m):
    schedule = forward_schedule(placement, m)
    validate(schedule)
    assert {a for order in schedule.orders for a in order} == {
        Action(Kind.F, stage, microbatch) for stage in range(placement.num_stages) for microbatch in range(m)
    }


def test_forwards_of_a_v_keep_the_devices_busy():
    p, m = 4, 8
    timeline = simulate(forward_schedule(Placement.v_shape(p), m))
    # Two chunks of half a unit each per microbatch, and what the pipeline takes to fill and to drain.
    assert timeline.makespan <= m + p


@given(placements(), st.integers(1, 4))
def test_nothing_holds_less_than_one_microbatch_after_another(placement, m):
    schedule = serial_schedule(placement, m)
    assert oracle.check(schedule) == []
    shares = [Fraction(len(stages), placement.num_stages) for stages in placement.stages]
    assert oracle.peak(schedule) == shares
