from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import host_oracle
import oracle
import program_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import THOROUGH, examples, rest_nightly
from mutants import edited, mutants
from random_schedules import COVERING, FAMILIES, build_or_skip, family_schedules, random_schedules
from refusals import refused

from megatron_pipemem.errors import CODES, CostsError, ScheduleError
from megatron_pipemem.schedule.action import COMPUTE, MESSAGES, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Order, Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program

Orders = tuple[Order, ...]
EDITED = rest_nightly(sorted(FAMILIES), COVERING, "the same edits of a family with this placement and kind of backward")


def orders_of(text: str) -> Orders:
    return tuple(tuple(Action.parse(cell) for cell in line.split()) for line in text.splitlines())


def schedule_of(text: str, devices: tuple[int, ...] = (0, 1), num_microbatches: int = 2) -> Schedule:
    return Schedule("test", Placement.from_devices(devices), num_microbatches, orders_of(text))


def error_of(function, *arguments) -> ScheduleError | None:
    try:
        function(*arguments)
    except ScheduleError as error:
        return error
    return None


def explains(error: ScheduleError, orders: Orders) -> None:
    """Assert that the error has a code and that its fields point at a real place, or at the end of an order."""
    assert error.code in CODES
    assert error.device is not None and error.position is not None and error.action is not None
    assert str(error).startswith(f"device {error.device}, position {error.position}, action {error.action}: ")
    order = orders[error.device]
    if error.position < len(order):
        assert str(order[error.position]) == error.action
    else:  # something is missing
        assert error.position == len(order) and error.code in ("missing-action", "stale-program")


def in_microbatch_order(schedule: Schedule) -> bool:
    """Whether forwards, input gradients and weight gradients of every stage run in the order of the microbatches, the
    sequence slices of one microbatch the other way round when they run backward."""
    places = oracle.places_of(schedule)
    for order in schedule.orders:
        for stage in range(schedule.num_stages):
            for letters, sign in (("F", 1), ("IB", -1), ("WB", -1)):
                units = [a.microbatch for a in order if a.stage == stage and a.kind.value in letters]
                ran = [(places[unit][0], sign * places[unit][1]) for unit in units]
                if ran != sorted(ran):
                    return False
    return True


def oracle_accepts(schedule: Schedule) -> bool:
    """The oracle knows training steps only, so a schedule of forwards gets backwards that cannot fail."""
    orders, places = schedule.orders, oracle.places_of(schedule)
    backwards = sorted(range(len(places)), key=lambda unit: (places[unit][0], -unit))
    if not any(a.kind in (Kind.I, Kind.W, Kind.B) for order in orders for a in order):
        orders = tuple(
            order
            + tuple(
                Action(Kind.B, s, unit)
                for s in reversed(stages)
                for unit in backwards
                if Action(Kind.F, s, unit) in order
            )
            for order, stages in zip(orders, schedule.placement.stages, strict=True)
        )
    if oracle.check(replace(schedule, orders=orders)) or not in_microbatch_order(schedule):
        return False
    return schedule.updates is None or not oracle.lost_versions(schedule)


# ----------------------------------------------------------------------------------------------------------- mutations


@examples(400)
@given(st.data())
def test_every_mutant_is_caught_or_valid(data):
    schedule = data.draw(
        family_schedules() | random_schedules() | random_schedules(max_replicas=2, max_slices=3, ragged=True)
    )
    if data.draw(st.booleans()) and data.draw(st.booleans()):
        schedule = schedule.forward_only()
    mutant = replace(schedule, orders=data.draw(mutants(schedule.orders)))
    error = error_of(validate, mutant)
    assert (error is None) == oracle_accepts(mutant), error
    if error is not None:
        explains(error, mutant.orders)


def single_edits(orders: Orders, replacements) -> list[Orders]:
    """Every drop, double, swap of neighbours, re-route to any place of another device, and replacement."""
    edits = []
    for device, order in enumerate(orders):
        for position, action in enumerate(order):
            before, after = list(order[:position]), list(order[position + 1 :])
            edits.append(edited(orders, device, before + after))
            edits.append(edited(orders, device, [*before, action, action, *after]))
            if after:
                edits.append(edited(orders, device, [*before, after[0], action, *after[1:]]))
            edits += [edited(orders, device, [*before, other, *after]) for other in replacements(action)]
            for target in set(range(len(orders))) - {device}:
                for place in range(len(orders[target]) + 1):
                    rerouted = list(orders[target])
                    rerouted.insert(place, action)
                    edits.append(edited(edited(orders, device, before + after), target, rerouted))
    return edits


def some_of(edits: list[Orders]) -> list[Orders]:
    """All of them nightly. The full lane leaves out a part where there are thousands: programs of hanayo and slimpipe."""
    return edits if settings.get_current_profile_name() == THOROUGH else edits[:: len(edits) // 2000 + 1]


def replacements(action: Action) -> Iterator[Action]:
    yield from (action._replace(microbatch=k) for k in (0, 1, 2) if k != action.microbatch)
    yield from (action._replace(stage=s) for s in range(-1, 5) if s != action.stage)
    yield from (action._replace(kind=kind) for kind in COMPUTE if kind is not action.kind)


@pytest.mark.parametrize("name", EDITED)
def test_every_single_edit_of_a_family(name):
    """On two devices and two microbatches, and the same for evaluation."""
    schedule = build_or_skip(name, 2, 2)
    caught = 0
    for base in (schedule, schedule.forward_only()):
        for orders in some_of(single_edits(base.orders, replacements)):
            mutant = replace(base, orders=orders)
            error = error_of(validate, mutant)
            assert (error is None) == oracle_accepts(mutant), (orders, error)
            if error is not None:
                explains(error, orders)
                caught += 1
    assert caught > 100


@pytest.mark.parametrize("name", EDITED)
def test_an_edit_that_breaks_simulate_or_lower_is_explained_as_validate_does(name):
    """Some sixty edits of every family."""
    base = build_or_skip(name, 2, 2)
    for orders in single_edits(base.orders, replacements)[::17]:
        mutant = replace(base, orders=orders)
        for function in (simulate, lower, partial(lower, single_queue=True)):
            error = error_of(function, mutant)
            if error is not None and error.__context__ is not None:  # a lookup failed first
                assert str(error) == str(error_of(validate, mutant))


@pytest.mark.parametrize("function", [simulate, lower, partial(lower, single_queue=True)])
def test_what_is_no_fault_of_a_schedule_stays_as_it_is(function, monkeypatch):
    valid = build_schedule("1f1b", num_devices=2, num_microbatches=2)
    moved = valid.orders[0][-1]
    broken = replace(valid, orders=(valid.orders[0][:-1], (*valid.orders[1], moved, Action(Kind.F, 7, 0))))
    assert str(error_of(function, broken)) == str(error_of(validate, broken))
    monkeypatch.setattr("megatron_pipemem.schedule.validator.validate", lambda schedule: None)
    with pytest.raises(LookupError):
        function(broken)


@examples(400)
@given(st.data())
def test_every_program_mutant_is_caught_or_valid(data):
    schedule = data.draw(family_schedules(max_microbatches=4) | random_schedules(max_microbatches=3))
    program = lower(schedule)
    mutant = Program(schedule, data.draw(mutants(program.actions)))
    error = error_of(validate_program, mutant)
    problems = program_oracle.check(mutant) or host_oracle.unsafe(mutant)
    assert (error is None) == (not problems), (error, problems)
    if error is not None:
        explains(error, mutant.actions)


@pytest.mark.parametrize("name", EDITED)
def test_every_single_edit_of_a_program(name):
    program = lower(build_or_skip(name, 2, 2))

    def replacements(action):
        if action.kind in MESSAGES:
            yield action._replace(microbatch=1 - action.microbatch)
            yield from (action._replace(kind=kind) for kind in MESSAGES if kind is not action.kind)
            yield from (action._replace(stage=s) for s in (action.stage - 1, action.stage + 1))

    caught = 0
    for actions in some_of(single_edits(program.actions, replacements)):
        mutant = Program(program.schedule, actions)
        error = error_of(validate_program, mutant)
        problems = program_oracle.check(mutant) or host_oracle.unsafe(mutant)
        assert (error is None) == (not problems), (actions, error, problems)
        if error is not None:
            explains(error, actions)
            caught += 1
    assert caught > 50


# ------------------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("orders", "code", "place"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1B1", "missing-action", (1, 2, "1B1")),
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1B0", "missing-action", (0, 3, "0B1")),
        ("0F0 0F1 0B0\n1F0 1F1 1B0 1B1", "missing-action", (0, 1, "0F1")),
        ("0F0 0F1\n1F0", "missing-action", (1, 1, "1F1")),
        ("0F0 0F1 0B0 0I1\n1F0 1F1 1B0 1B1", "missing-action", (0, 3, "0I1")),
        ("0F0 0F1 0B0 0I1 0B1\n1F0 1F1 1B0 1B1", "duplicate-action", (0, 3, "0I1")),
        ("0F0 0F1 0B0 0W1\n1F0 1F1 1B0 1B1", "missing-action", (0, 3, "0W1")),
        ("0F0 0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", "duplicate-action", (0, 2, "0F0")),
        ("0F0 0F1 1B0 0B0 0B1\n1F0 1F1 1B1", "misplaced-action", (0, 2, "1B0")),
        ("0F0 0F1 0B0 0B1\n1F0 2F1 1B0 1B1", "unknown-stage", (1, 1, "2F1")),
        ("0F0 0F2 0B0 0B1\n1F0 1F1 1B0 1B1", "unknown-microbatch", (0, 1, "0F2")),
        ("0F0 0SEND_F0 0B0\n1F0 1B0", "not-computed", (0, 1, "0SEND_F0")),
        ("0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1", "wrong-order", (1, 0, "1B0")),
        ("0F0 0F1 0W0 0I0 0B1\n1F0 1F1 1B0 1B1", "wrong-order", (0, 2, "0W0")),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1", "wrong-order", (0, 3, "0B0")),
        ("0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1F1 1B0 1B1", "wrong-order", (0, 5, "0W0")),
        ("0F1 0F0 0B0 0B1\n1F0 1F1 1B0 1B1", "wrong-order", (0, 1, "0F0")),
    ],
)
def test_messages(orders, code, place):
    with refused(code, kind=ScheduleError) as caught:
        validate(schedule_of(orders))
    assert (caught.value.device, caught.value.position, caught.value.action) == place


def test_a_deadlock_is_shown_action_by_action():
    """Device 0 wants microbatch 0 back before it sends microbatch 1; device 1 wants microbatch 1 first; device 2 only waits."""
    with refused("deadlock", kind=ScheduleError) as caught:
        validate(schedule_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1", (0, 1, 2)))
    waits = [
        (w.device, w.position, str(w.action), w.owner, str(w.needed), w.needed_position) for w in caught.value.cycle
    ]
    assert waits == [(0, 1, "0B0", 1, "1B0", 2), (1, 1, "1F1", 0, "0F1", 2)]
    with refused("missing-action", kind=ScheduleError) as caught:
        validate(schedule_of("0F0 0B0\n1F0"))
    assert caught.value.cycle == ()


def test_memory_cap_names_what_is_held():
    schedule = build_schedule("1f1b", num_devices=4, num_microbatches=8)
    validate(schedule, memory_cap=1.0)
    with refused("over-cap", 0, 3, "0F3", 1, "0.9", kind=ScheduleError):
        validate(schedule, memory_cap=0.9)


@given(family_schedules() | random_schedules(max_replicas=2, max_slices=3, ragged=True))
def test_the_cap_is_the_peak_of_the_simulator(schedule):
    peak = simulate(schedule).peak
    validate(schedule, memory_cap=peak)
    with refused("over-cap", kind=ScheduleError):
        validate(schedule, memory_cap=peak - 1e-6)


def test_memory_cap_in_bytes_counts_what_input_gradients_release():
    schedule = schedule_of("0F0 0I0 0F1 0I1 0W0 0W1\n1F0 1I0 1F1 1I1 1W0 1W1")
    costs = Costs(memory={Kind.F: 100.0, Kind.I: -60.0, Kind.W: -40.0})
    validate(schedule, costs, memory_cap=140)
    with refused("over-cap", 0, 2, "0F1", 140, kind=ScheduleError):
        validate(schedule, costs, memory_cap=139)


def test_orders_and_costs_must_fit():
    with refused("wrong-count", 2, 1, kind=ScheduleError):
        validate(schedule_of("0F0 0B0"))
    with refused("costs-mismatch", 3, 2, kind=CostsError):
        validate(schedule_of("0F0 0B0\n1F0 1B0", num_microbatches=1), Costs(memory={Kind.F: (1, 2, 3)}), memory_cap=9)


# ------------------------------------------------------------------------------------------------------------ programs

BASE = schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
DEVICE_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_I0 0B0 0RECV_I1 0B1 0REDUCE_GRAD"
DEVICE_1 = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_I0 1F1 1B1 1SEND_I1 1REDUCE_GRAD"


def test_program_as_written():
    validate_program(Program(BASE, orders_of(f"{DEVICE_0}\n{DEVICE_1}")))


@pytest.mark.parametrize(
    ("old", "new", "code", "place"),
    [
        ("0F1 0SEND_F1", "0F1", "missing-action", (0, 2, "0F1")),
        ("0RECV_I0 ", "", "missing-action", (0, 4, "0B0")),
        ("0SEND_F0", "0SEND_F0 0SEND_F0", "duplicate-action", (0, 2, "0SEND_F0")),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "wrong-order", (0, 0, "0SEND_F0")),
        ("0RECV_I0 0B0", "0B0 0RECV_I0", "wrong-order", (0, 5, "0RECV_I0")),
        ("1RECV_F0 1F0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0", "message-order", (1, 0, "1RECV_F1")),
        ("1SEND_I1", "1SEND_I1 1SEND_F1", "useless-action", (1, 8, "1SEND_F1")),
        ("1RECV_F0", "1RECV_F0 1RECV_I0", "useless-action", (1, 1, "1RECV_I0")),
        (" 0REDUCE_GRAD", "", "missing-action", (0, 7, "0B1")),
        ("0B1 0REDUCE_GRAD", "0REDUCE_GRAD 0B1", "wrong-order", (0, 7, "0REDUCE_GRAD")),
        ("0REDUCE_GRAD", "0REDUCE_GRAD 2REDUCE_GRAD", "useless-action", (0, 9, "2REDUCE_GRAD")),
        ("1F1 1B1", "1B1 1F1", "stale-program", (1, 5, "1B1")),
        ("0B1 0REDUCE", "0REDUCE", "stale-program", (0, 8, "0B1")),
        ("0B1 0REDUCE", "0B1 0W1 0REDUCE", "stale-program", (0, 8, "0W1")),
    ],
)
def test_program_messages(old, new, code, place):
    actions = f"{DEVICE_0}\n{DEVICE_1}".replace(old, new)
    with refused(code, kind=ScheduleError) as caught:
        validate_program(Program(BASE, orders_of(actions)))
    assert (caught.value.device, caught.value.position, caught.value.action) == place


def test_a_rerouted_post_belongs_elsewhere():
    actions = f"{DEVICE_0}\n{DEVICE_1}".replace("1SEND_I1 ", "").replace("0RECV_I1", "0RECV_I1 1SEND_I1")
    with refused("misplaced-action", 0, 7, "1SEND_I1", "1B1", 1, kind=ScheduleError):
        validate_program(Program(BASE, orders_of(actions)))


def test_a_late_send_closes_a_wait_cycle():
    """The send of 0F0 stands behind a backward that needs what it carries."""
    actions = f"{DEVICE_0}\n{DEVICE_1}".replace(
        "0SEND_F0 0F1 0SEND_F1 0RECV_I0 0B0", "0F1 0RECV_I0 0B0 0SEND_F0 0SEND_F1"
    )
    with refused("deadlock", kind=ScheduleError) as caught:
        validate_program(Program(BASE, orders_of(actions)))
    assert [str(wait.action) for wait in caught.value.cycle] == ["0B0", "1F0"]


def test_a_program_of_another_schedule_is_refused():
    broken = replace(BASE, orders=(BASE.orders[0], BASE.orders[1][:-1]))
    with refused("missing-action", "1I1", "1B1", kind=ScheduleError):
        validate_program(Program(broken, orders_of(f"{DEVICE_0}\n{DEVICE_1}")))
    with refused("stale-program", 1, 2, kind=ScheduleError):
        validate_program(Program(BASE, orders_of(DEVICE_0)))
