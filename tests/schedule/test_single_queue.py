"""Programs for devices that serve everything in one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""

from __future__ import annotations

from dataclasses import replace

import host_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from program_oracle import check as mistakes
from random_schedules import family_schedules, random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.schedule.action import MESSAGES, ORDERED, Action, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.stream import Moment, family_window, steady
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.waits import run_single_queues

UNEQUAL = Costs(1, 1.5, 0.5, p2p=0.1)


def proved(schedule: Schedule, costs: Costs) -> Program:
    program = lower(schedule, single_queue=True, costs=costs)
    validate_program(program, single_queue=True, microbatch_order=False)
    assert host_oracle.stuck(program, strict=True) == host_oracle.stuck(program) == []
    if not schedule.vocabulary_barriers:
        assert mistakes(program) == []
    return program


@pytest.mark.parametrize(
    ("name", "p", "m", "options"),
    [
        ("1f1b-v", 6, 17, {}),
        ("looped-bfs", 6, 18, {"chunks": 3}),
        ("gis", 4, 8, {}),
        ("gis-h", 2, 4, {"group_size": 4}),
        ("hanayo", 5, 6, {"chunks": 2}),
        ("interleaved", 4, 13, {"group_size": 8}),
    ],
)
def test_what_hangs_there_otherwise(name: str, p: int, m: int, options: dict[str, object]) -> None:
    """The families that docs/what-runs-where.md names."""
    schedule = build_schedule(name, num_devices=p, num_microbatches=m, **options)
    assert host_oracle.stuck(lower(schedule))
    proved(schedule, Costs())


@examples(100)
@given(
    family_schedules() | random_schedules(max_replicas=2, max_slices=2),
    st.sampled_from([Costs(), UNEQUAL, Costs(0, 1, 0), Costs(1, 3, 0.2)]),
)
def test_any_schedule_gets_through_single_queues(schedule: Schedule, costs: Costs) -> None:
    program = proved(schedule, costs)
    assert run_single_queues(program, costs).makespan >= simulate(schedule, costs).makespan * (1 - 1e-9)
    proved(schedule.forward_only(), costs)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_copy_takes_its_time_before_what_comes_after_it(name: str) -> None:
    costs = replace(UNEQUAL, channel=Channel(ratio=0.5))
    away = plan_offload(build_schedule(name, num_devices=3, num_microbatches=6), costs).schedule
    assert away.offloads
    program = proved(away, costs)
    assert run_single_queues(program, costs).makespan > run_single_queues(program, UNEQUAL).makespan


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_windows_of_asynchronous_schedules(name: str) -> None:
    """The same actions and weights, in an order for single queues, at the start of a stream, in its middle and at its end."""
    p, batch = 4, 5
    for moment in (Moment(0, 0, 1), Moment(1, 1, 1), steady(p, batch), replace(steady(p, batch), left=0)):
        usual, queued = (family_window(name, p, batch, moment, single_queue=single) for single in (False, True))
        assert host_oracle.unsafe(usual.program) == host_oracle.unsafe(queued.program) == set()
        assert host_oracle.left_by_waiting(queued.program, tuple(Kind)) == []
        assert host_oracle.stuck(queued.program, strict=True) == host_oracle.stuck(queued.program) == []
        for own, other in zip(queued.actions, usual.actions, strict=True):
            assert sorted(own) == sorted(other) and len(set(own)) == len(own)
            assert [a for a in own if a.kind in ORDERED] == [a for a in other if a.kind in ORDERED]
        assert queued.versions == usual.versions
        assert [sorted(past) for past in queued.past] == [sorted(past) for past in usual.past]
        assert len(queued.updates) == len(usual.updates)
        assert all(action.kind in ORDERED for action in queued.updates)


def test_the_time_that_it_takes() -> None:
    """Two devices, one message each way of 2 seconds, which occupies both."""
    schedule = Schedule(
        "two",
        Placement.linear(2),
        1,
        ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0))),
    )
    costs = Costs(1, 1, 1, p2p=2)
    run = run_single_queues(lower(schedule, single_queue=True, costs=costs), costs)
    assert run.spans == (
        ((0, 1), (1, 3), (6, 8), (8, 10), (10, 10)),
        ((1, 3), (3, 4), (4, 6), (6, 8), (8, 8)),
    )
    assert run.makespan == 10 and run.bubble_rate == pytest.approx(0.7)


def test_a_circle_is_named() -> None:
    """The usual lowering posts receives ahead: fine for queues per stream, a circle in one."""
    program = lower(build_schedule("1f1b", num_devices=2, num_microbatches=3))
    validate_program(program)
    with pytest.raises(ScheduleError) as caught:
        validate_program(program, single_queue=True)
    text = str(caught.value)
    assert "deadlock where every device has one queue: " in text and "lower the schedule for single queues" in text
    named = [
        action for actions in program.actions for action in actions if action.kind in MESSAGES and str(action) in text
    ]
    assert len(named) >= 2 and text.count("waits for") == 2
    assert caught.value.device in (0, 1) and program.actions[caught.value.device][caught.value.position] in named


def test_orders_that_wait_for_ever_are_told() -> None:
    orders = ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)))
    with refused("unmet-need", kind=ScheduleError):
        lower(Schedule("wrong", Placement.linear(2), 1, orders), single_queue=True)
