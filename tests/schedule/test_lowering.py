from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import program_oracle
import pytest
from hypothesis import given
from lanes import examples
from random_schedules import family_schedules, random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.lowering import lower, rows_of_rank
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.simulator import count_messages
from megatron_pipemem.schedule.validator import validate, validate_program


def schedule_of(text: str, devices: tuple[int, ...]) -> Schedule:
    """A schedule from its CSV on a given placement."""
    read = Schedule.from_csv(text)
    return Schedule("test", Placement.from_devices(devices), read.num_microbatches, read.orders)


def text(program: Program) -> list[str]:
    return [" ".join(map(str, actions)) for actions in program.actions]


def known_computing(program: Program) -> list[list[dict[int, int]]]:
    """Per device and compute action, and before the first at -1, the last of other devices that must have ended."""
    after = [[dict[int, int]()] for _ in program.actions]
    sent: dict[tuple[str, int, int], dict[int, int]] = {}
    at = [0] * len(after)
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(program.actions):
            while at[device] < len(actions):
                kind, stage, microbatch = actions[at[device]]
                own = after[device][-1]
                if kind in SENDS:
                    there = stage + (1 if kind is Kind.SEND_F else -1)
                    sent[kind[-1], there, microbatch] = own | {device: len(after[device]) - 2}
                elif kind in COMPUTE:
                    key = ("F" if kind is Kind.F else "I", stage, microbatch)
                    awaits = kind in (Kind.F, Kind.I, Kind.B) and Action(Kind(f"RECV_{key[0]}"), *key[1:]) in actions
                    if awaits and key not in sent:
                        break
                    more = sent[key] if awaits else {}
                    after[device].append({d: max(own.get(d, -1), more.get(d, -1)) for d in own | more})
                at[device] += 1
                moved = True
    return [[*later, first] for first, *later in after]


def check_posts(program: Program) -> None:
    """Every action that lowering added stands exactly where the contract says."""
    devices = program.placement.devices
    slots = []  # per device: {action: number of compute actions before it}
    for actions in program.actions:
        slot, slot_of = 0, {}
        for action in actions:
            slot_of[action] = slot
            slot += action.kind in COMPUTE
        slots.append(slot_of)
    for actions in program.actions:
        for before, after in pairwise(actions):
            if after.kind in SENDS:  # right behind its producer
                assert (before.stage, before.microbatch) == (after.stage, after.microbatch)
                assert before.kind in ((Kind.F,) if after.kind is Kind.SEND_F else (Kind.I, Kind.B))
    known = known_computing(program)
    sends = {}
    sending: dict[tuple[int, int], list[Action]] = {}
    for source, actions in enumerate(program.actions):
        for action in actions:
            if action.kind in SENDS:
                step = 1 if action.kind is Kind.SEND_F else -1
                receive = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_I
                edge = source, devices[action.stage + step]
                sending.setdefault(edge, []).append(Action(receive, action.stage + step, action.microbatch))
                sends[sending[edge][-1]] = action
    for (source, destination), receives in sending.items():
        order = [a for a in program.actions[destination] if a.kind in RECEIVES and a in receives]
        assert order == receives, f"edge {source} -> {destination} is not first in, first out"
        consumers = []
        for receive in receives:
            kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.I, Kind.B)
            (consumer,) = [a for k in kinds if (a := Action(k, *receive[1:])) in slots[destination]]
            consumers.append(slots[destination][consumer])
        for index, receive in enumerate(receives):
            ahead = max(min(consumers[index:]) - 1, 0)
            sent = slots[source][sends[receive]] - 1
            first = known[source][sent].get(destination, -1) + 1
            last = max(at for at in range(ahead + 1) if known[destination][at - 1].get(source, -1) <= sent)
            assert slots[destination][receive] == min(max(ahead, first), max(last, first))
    for actions in program.actions:
        reduced = [position for position, a in enumerate(actions) if a.kind is Kind.REDUCE_GRAD]
        for position in reduced:
            stage = actions[position].stage
            gradients = [i for i, a in enumerate(actions) if a.stage == stage and a.kind in (Kind.W, Kind.B)]
            if program.placement.replicas > 1:  # behind everything, as it waits for other devices
                assert all(a.kind is Kind.REDUCE_GRAD for a in actions[position:])
                continue
            between = actions[gradients[-1] + 1 : position]
            assert gradients[-1] < position and all(a.kind in SENDS for a in between)


@examples(200)
@given(family_schedules() | random_schedules() | random_schedules(max_replicas=2, max_slices=3, ragged=True))
def test_any_valid_schedule_lowers(schedule):
    """Custom placements, mixed splitting, any order: what validates as a schedule validates as a program."""
    validate(schedule)
    program = lower(schedule)
    validate_program(program)
    assert program_oracle.check(program) == []
    check_posts(program)
    kinds = [a.kind for actions in program.actions for a in actions]
    assert sum(k in SENDS for k in kinds) == sum(k in RECEIVES for k in kinds) == count_messages(schedule)


@examples(100)
@given(random_schedules() | family_schedules())
def test_forward_only_lowers_without_gradients(schedule):
    program = lower(schedule.forward_only())
    validate_program(program)
    assert program_oracle.check(program) == []
    kinds = {a.kind for actions in program.actions for a in actions}
    assert kinds <= {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_linear_program():
    schedule = schedule_of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", (0, 1))
    assert text(lower(schedule)) == [
        "0F0 0SEND_F0 0RECV_I0 0F1 0SEND_F1 0RECV_I1 0B0 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_I0 1F1 1B1 1SEND_I1 1REDUCE_GRAD",
    ]


@pytest.mark.parametrize(
    ("devices", "start"), [((0, 1, 2, 1), "1RECV_F0 3RECV_F1 1F0"), ((2, 1, 0, 1), "3RECV_F1 1RECV_F0 1F0")]
)
def test_receives_posted_together_stand_in_order_of_their_sources(devices, start):
    """Of two replicas, as neither message needs the other one."""
    orders = sorted(["0F0,0B0", "1F0,3F1,3B1,1B0", "2F1,2B1"], key=lambda order: devices[int(order[0])])
    placement = Placement.from_devices(devices, 2)
    program = lower(Schedule("test", placement, 2, Schedule.from_csv("\n".join(orders)).orders))
    validate_program(program)
    assert text(program)[1].startswith(start)


def test_lowering_an_incomplete_schedule_is_refused():
    schedule = schedule_of("0F0,0B0\n1F0,1B0\n", (0, 1))
    broken = Schedule("broken", schedule.placement, 1, (schedule.orders[0], ()))
    for wrong, position, action in ((broken, 1, "0B0"), (broken.forward_only(), 0, "0F0")):
        with refused("unmet-need", 0, position, action, kind=ScheduleError) as caught:
            lower(wrong)
        assert (caught.value.device, caught.value.position, caught.value.action) == (0, position, action)


@pytest.mark.parametrize("single_queue", [False, True])
@pytest.mark.parametrize("stage", [2, 10**9, -1])
def test_a_stage_that_the_placement_lacks_is_refused(stage: int, single_queue: bool) -> None:
    schedule = schedule_of("0F0,0B0\n1F0,1B0", (0, 1))
    wrong = replace(schedule, orders=(schedule.orders[0], (*schedule.orders[1], Action(Kind.F, stage, 0))))
    with refused("unknown-stage", "device 1", stage, kind=ScheduleError):
        lower(wrong, single_queue=single_queue)


@pytest.mark.parametrize(
    ("name", "devices"), [("1f1b", 5), ("v-half", 5), ("hanayo", 5), ("zb-h2", 5), ("interleaved", 9)]
)
def test_a_rank_needs_few_orders(name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, its neighbours', and theirs, except in a ring. Its rows are those of the whole program."""
    schedule, seen = build_schedule(name, num_devices=9, num_microbatches=14), []
    build = Dependencies.__init__

    def count(self: Dependencies, orders, *args, **options) -> None:
        seen.append(sum(map(bool, orders)))
        build(self, orders, *args, **options)

    expected = lower(schedule).actions
    monkeypatch.setattr(Dependencies, "__init__", count)
    for device in range(9):
        seen.clear()
        actions = lower(replace(schedule), on_demand=True).actions
        for row in rows_of_rank(schedule.placement, device):
            assert actions[row] == expected[row]
        assert seen == [min(devices, *(3 + device, 11 - device) if devices < 9 else (9,))]
        assert tuple(actions) == expected


@examples(60)
@given(random_schedules(max_slices=2))
def test_rows_on_demand_are_those_of_the_program(schedule: Schedule) -> None:
    for device in range(schedule.num_devices):
        actions = lower(replace(schedule), on_demand=True).actions
        assert actions[device] == lower(schedule).actions[device]


def test_a_deadlock_of_other_devices_is_found_with_all_rows() -> None:
    schedule = build_schedule("1f1b", num_devices=8, num_microbatches=4)
    *others, last = schedule.orders
    stuck = replace(schedule, orders=(*others, last[::-1]))
    actions = lower(stuck, on_demand=True).actions
    assert len(actions[0]) > len(others[0])
    for refuse in (lambda: list(actions), lambda: lower(stuck), lambda: lower(stuck, on_demand=True).actions[7]):
        with refused("unmet-need", kind=ScheduleError):
            refuse()
