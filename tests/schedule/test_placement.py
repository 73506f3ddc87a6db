"""Placements: the device of every stage, and the orders that every placement has."""

from __future__ import annotations

from fractions import Fraction

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import placements
from refusals import refused

from megatron_pipemem.choose.choice import forward_schedule
from megatron_pipemem.choose.searching import serial_schedule
from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


@pytest.mark.parametrize(
    ("placement", "name", "devices"),
    [
        (Placement.linear(3), "linear", (0, 1, 2)),
        (Placement.interleaved(2, 3), "interleaved", (0, 1, 0, 1, 0, 1)),
        (Placement.interleaved(3, 1), "linear", (0, 1, 2)),
        (Placement.v_shape(3), "v", (0, 1, 2, 2, 1, 0)),
        (Placement.wave(2, 4), "wave", (0, 1, 1, 0, 0, 1, 1, 0)),
        (Placement.from_devices((0, 1, 1, 0)), "v", (0, 1, 1, 0)),
        (Placement.from_devices((0, 0, 1)), "custom", (0, 0, 1)),
        (Placement.bidirectional(3), "bidirectional", (0, 1, 2, 2, 1, 0)),
        (Placement.from_devices((0, 1, 1, 0), 2), "bidirectional", (0, 1, 1, 0)),
        (Placement.from_devices((0, 1, 0, 1), 2), "custom", (0, 1, 0, 1)),
    ],
)
def test_shapes(placement: Placement, name: str, devices: tuple[int, ...]) -> None:
    assert (placement.name, placement.devices) == (name, devices)


@given(p=st.integers(1, 9), v=st.integers(1, 5))
def test_stages_and_devices_are_each_others_inverse(p: int, v: int) -> None:
    for placement in (Placement.interleaved(p, v), Placement.wave(p, v)):
        assert (placement.num_devices, placement.num_stages, placement.num_chunks) == (p, p * v, v)
        for stage in range(p * v):
            assert placement.stages[placement.devices[stage]][placement.chunk_of(stage)] == stage
        assert Placement.from_devices(placement.devices).devices == placement.devices


def test_neighbours_of_a_stage() -> None:
    placement = Placement.v_shape(2)
    assert [placement.next_stage(stage) for stage in range(4)] == [1, 2, 3, None]
    assert [placement.previous_stage(stage) for stage in range(4)] == [None, 0, 1, 2]
    replicas = Placement.bidirectional(3)
    assert (replicas.num_stages, replicas.model_stages, replicas.num_chunks) == (6, 3, 2)
    assert [replicas.next_stage(stage) for stage in range(6)] == [1, 2, None, 4, 5, None]
    assert [replicas.previous_stage(stage) for stage in range(6)] == [None, 0, 1, None, 3, 4]
    assert [replicas.replica_of(stage) for stage in range(6)] == [0, 0, 0, 1, 1, 1]


def test_placements_that_do_not_exist() -> None:
    for devices in ((), (1,), (0, 2)):
        with refused("bad-placement", 0, kind=ScheduleError):
            Placement("custom", devices)
    with refused("bad-placement", 3, 2, kind=ScheduleError):
        Placement("custom", (0, 1, 0), replicas=2)
    for build, counts in ((Placement.linear, (0,)), (Placement.wave, (2, 0)), (Placement.v_shape, (-1,))):
        with refused("bad-number", 1, kind=UnsupportedError):
            build(*counts)


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
