"""The cut behind which a step waits for the norm of the one before: against a literal play of all devices' queues."""

from dataclasses import replace
from itertools import product

import host_oracle
import pytest
from hypothesis import given
from random_schedules import FAMILIES, build_or_skip, family_schedules, random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.features.overlap_steps.orders import validation_cut
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program, Schedule

SYNCHRONOUS = sorted(name for name, family in FAMILIES.items() if not family.asynchronous and family.slices == 1)


def letters(action) -> tuple[str, int, int]:
    return action.kind.value, action.stage, action.microbatch


def is_early(program, action) -> bool:
    """Whether a forward's input has not been on every device."""
    kind, stage, _ = letters(action)
    first = stage - stage % program.placement.model_stages
    return kind == "F" and set(range(program.placement.num_devices)) != {
        program.placement.devices[before] for before in range(first, stage)
    }


def leading(program) -> list[int]:
    """How many actions of every device may be dropped if the others' do not matter."""
    counts = []
    for actions in program.actions:
        allowed = [is_early(program, a) or a.kind.value.startswith(("SEND", "RECV")) for a in actions]
        counts.append((*allowed, False).index(False))
    return counts


def holds(schedule: Schedule, single_queue: bool) -> None:
    program = lower(schedule, single_queue=single_queue)
    cut = validation_cut(program)
    assert all(0 <= length <= most for length, most in zip(cut.lengths, leading(program), strict=True))
    parts = [actions[:length] for actions, length in zip(program.actions, cut.lengths, strict=True)]
    for actions, length, drain in zip(program.actions, cut.lengths, cut.drains, strict=True):
        rest = iter(actions[length:])
        assert all(action in rest for action in drain), "messages of the rest of the program, in its order"
    rows = tuple((*part, *drain) for part, drain in zip(parts, cut.drains, strict=True))
    assert only_forwards_end(program, rows)
    ended = Program(schedule, rows)
    left = host_oracle.stuck(ended, strict=True) if single_queue else host_oracle.hangs(ended, in_order=False)
    assert left == []


@given(family_schedules(SYNCHRONOUS) | random_schedules(max_replicas=2))
def test_any_schedule_has_a_closed_cut_that_drains(schedule):
    for single_queue in (False, True):
        holds(schedule, single_queue)


@pytest.mark.parametrize("single_queue", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_no_closed_cut_is_larger(name, single_queue):
    program = lower(build_or_skip(name, 2, 4), single_queue=single_queue)
    closed = [
        lengths
        for lengths in product(*(range(most + 1) for most in leading(program)))
        if only_forwards_end(program, [row[:n] for row, n in zip(program.actions, lengths, strict=True)])
    ]
    assert validation_cut(program).lengths == tuple(map(max, zip(*closed, strict=True)))


def only_forwards_end(program, rows) -> bool:
    """Whether every forward of the rows gets its input in them."""
    inside = {letters(action) for row in rows for action in row}
    devices, size = program.placement.devices, program.placement.model_stages
    for kind, stage, microbatch in inside:
        if kind == "F" and stage % size:
            away = devices[stage] != devices[stage - 1]
            if ("SEND_F" if away else "F", stage - 1, microbatch) not in inside:
                return False
    return True


def test_what_is_not_closed_or_does_not_drain_is_refused():
    cut = validation_cut(lower(build_schedule("zbv", num_devices=4, num_microbatches=8)))
    shorter = (0, *cut.lengths[1:])
    with refused("unmet-need", "0SEND_F0", kind=ScheduleError):
        replace(cut, lengths=shorter).check()
    with refused("wrong-cut", kind=ScheduleError):
        replace(cut, lengths=tuple(length + 8 for length in cut.lengths)).check()
    with refused("wrong-cut", kind=ScheduleError):
        replace(cut, drains=((),) * 4).check()
    with refused("conflicting-features", kind=UnsupportedError):
        validation_cut(lower(build_schedule("pipedream-2bw", num_devices=2, num_microbatches=4)))
