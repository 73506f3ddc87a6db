"""The cut behind which a step waits for the norm of the one before: against a literal play of all devices' queues."""

from collections import defaultdict, deque
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from random_schedules import FAMILIES, build_or_skip, random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.features.overlap_steps.orders import validation_cut
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule

SYNCHRONOUS = sorted(name for name, family in FAMILIES.items() if not family.asynchronous and family.slices == 1)


def letters(action) -> tuple[str, int, int]:
    return action.kind.value, action.stage, action.microbatch


def tensor_of(program, kind: str, stage: int, microbatch: int) -> tuple[tuple[int, int], tuple]:
    """The edge of a post and what it moves, named after its producer."""
    devices, producer = program.placement.devices, stage
    if kind.startswith("RECV"):
        producer = stage - 1 if kind == "RECV_F" else stage + 1
    consumer = producer + 1 if kind.endswith("F") else producer - 1
    return (devices[producer], devices[consumer]), (kind[-1], producer, microbatch)


def play(program, rows, strict: bool = False) -> bool:
    """Whether all devices run their rows to the end, and nothing is left in any queue.

    Posting never blocks, or, if strict, a device stands at a message until its other end stands there too.
    """
    at, ran = [0] * len(rows), set()
    sent, received, here = defaultdict(deque), defaultdict(deque), set()
    devices, moved = program.placement.devices, True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            while at[device] < len(row):
                kind, stage, microbatch = letters(row[at[device]])
                if kind == "F":
                    before = ("F", stage - 1, microbatch)
                    first = stage % program.placement.model_stages == 0
                    away = not first and devices[stage - 1] != device
                    if not first and before not in (here if away else ran):
                        break
                    ran.add(("F", stage, microbatch))
                else:
                    edge, tensor = tensor_of(program, kind, stage, microbatch)
                    if strict:
                        other = edge[0] if device == edge[1] else edge[1]
                        peer = rows[other][at[other]] if at[other] < len(rows[other]) else None
                        if (
                            peer is None
                            or peer.kind.value == "F"
                            or tensor_of(program, *letters(peer)) != (edge, tensor)
                        ):
                            break
                        at[other] += 1
                        here.add(tensor)
                    else:
                        (sent if kind.startswith("SEND") else received)[edge].append(tensor)
                        while sent[edge] and received[edge]:
                            if sent[edge][0] != received[edge].popleft():
                                return False
                            here.add(sent[edge].popleft())
                at[device] += 1
                moved = True
    return all(n == len(row) for n, row in zip(at, rows, strict=True)) and not any((*sent.values(), *received.values()))


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
    assert play(program, [[*part, *drain] for part, drain in zip(parts, cut.drains, strict=True)], strict=single_queue)


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 2), (4, 8)])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_family_has_a_closed_cut_that_drains(name, devices, microbatches):
    schedule = build_or_skip(name, devices, microbatches)
    for single_queue in (False, True):
        holds(schedule, single_queue)


@given(random_schedules(max_replicas=2))
def test_so_has_any_schedule(schedule):
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
