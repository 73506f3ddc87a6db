"""Faults of tables that others wrote: which, where, and how to mend them."""

from __future__ import annotations

import host_oracle
import oracle
import program_oracle
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError, ScheduleFormatError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.csv_format import Table, read_table, write_table
from megatron_pipemem.schedule.lowering import lower, lower_paired
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.schedule_file import Fault, find_fault, find_obstacle
from megatron_pipemem.schedule.validator import validate, validate_program


def judge(text: str, microbatches: int | None = None) -> Fault | None:
    table = read_table(text)
    return find_fault(table, schedule_of(table, microbatches))


def schedule_of(table: Table, microbatches: int | None = None) -> Schedule:
    return Schedule("table", table.placement(), table.units(microbatches), table.orders)


LOWERED = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        # torch's own 1F1B table: the last rank counts its forwards from 1
        ("0F0,0F1,0B0,0B1\n,,1F1,1B0,1F2,1B1\n", (2, 3), "subtract 1 from each number, so that 1F1 becomes 1F0"),
        ("0F0,0F1,0B0,0B1,0F7\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1\n", (1, 5), "microbatches 0 to 1; remove or renumber"),
        ("0F0,0F0,0B0\n1F0,1B0\n", (1, 2), "already stands on device 0; remove one of the two"),
        ("0F0,0B0\n1F0,,1B0,1F0\n", (2, 4), "already stands"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1B1,1F1\n", (2, 3), "needs 1F1, which comes later"),
        ("0F0,0I0\n1F0,1B0\n", (1, 2), "has no 0W0 after it"),
        (LOWERED.replace("1RECV_F0,1RECV_F1", "1RECV_F1,1RECV_F0"), (2, 1), "post 1RECV_F0 first"),
        (LOWERED.replace("1SEND_B0,", ""), (2, 5), "without 1SEND_B0; add 1SEND_B0 after 1B0"),
        (LOWERED.replace("0RECV_B1,", "0RECV_B1,0RECV_B1,"), (1, 8), "already stands"),
        (LOWERED.replace("1RECV_F1,1F0,1F1", "1F0,1F1,1RECV_F1"), (2, 4), "must come before 1F1"),
    ],
)  # fmt: skip
def test_faults_name_cell_and_mend(text, place, says):
    fault = judge(text)
    assert says in fault.message
    assert (fault.cell.line, fault.cell.column) == place
    assert fault.cycle == ()


def test_gradients_in_another_order_are_no_fault_but_an_obstacle():
    table = read_table("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n")
    schedule = schedule_of(table)
    assert find_fault(table, schedule) is None
    obstacle = find_obstacle(table, schedule)
    assert "input gradients of a stage run in microbatch order" in obstacle.message
    assert (obstacle.cell.line, obstacle.cell.column) == (1, 4)
    with refused("wrong-order", kind=ScheduleError):
        validate(schedule)
    table = read_table("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    assert find_fault(table, schedule_of(table)) is None, "no deadlock either"
    table = read_table("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert "deadlock" in find_fault(table, schedule_of(table)).message


def test_the_number_of_microbatches_may_be_stated():
    assert "needs microbatch 1, but the step has microbatches 0 to 0" in judge("0F0,0F1,0B0,0B1\n", 1).message
    assert "0F2: is missing" in judge("0F0,0F1,0B0,0B1\n", 3).message


@pytest.mark.parametrize("cell", ["0B-1", "0BW-1", "0F-1"])
def test_negative_microbatches(cell):
    with refused("not-an-action", 1, 3, cell, 0, kind=ScheduleFormatError):
        read_table(f"0F0,0B0,{cell}\n")


def test_messages_speak_the_letters_of_the_table():
    assert "needs 0F1 (or" not in judge("0F0,0B0,0W0,0F1,0B1\n").message
    older = judge("0F0,0B0,0W0,0F1,0B1\n")
    assert "0B1: has no 0W1 after it; add 0W1, or make it 0BW1" in older.message
    assert "0I1: has no 0W1 after it; add 0W1, or make it 0B1" in str(older.error)


def test_a_deadlock_is_shown_as_its_circle():
    """Device 0 wants microbatch 0 back first, device 1 wants microbatch 1 first. Device 2 waits too, outside the circle."""
    text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n"
    fault, table = judge(text), read_table(text)
    assert [wait.device for wait in fault.cycle] == [0, 1]
    assert [(str(wait.action), str(wait.needed), wait.owner) for wait in fault.cycle] == [
        ("0B0", "1B0", 1),
        ("1F1", "0F1", 0),
    ]
    assert [table.cell_of(wait.device, wait.action)[1:] for wait in fault.cycle] == [(1, 2), (2, 2)]


def circle_is_closed(table: Table, fault: Fault) -> bool:
    rows = [[cell.action for cell in row] for row in table.rows]
    return bool(fault.cycle) and all(
        wait.owner == after.device and rows[wait.owner].index(wait.needed) >= rows[wait.owner].index(after.action)
        for wait, after in zip(fault.cycle, (*fault.cycle[1:], fault.cycle[0]), strict=True)
    )


@examples(150)
@given(schedule=random_schedules(max_microbatches=3), data=st.data())
def test_damaged_programs_are_found_out(schedule, data):
    """Whatever two independent oracles refuse has a fault."""
    rows = [list(row) for row in data.draw(st.sampled_from([lower, lower_paired]))(schedule).actions]
    row = rows[data.draw(st.integers(0, len(rows) - 1))]
    place, other = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    damage = data.draw(st.sampled_from(["none", "swap", "drop", "double"]))
    if damage == "swap":
        row[place], row[other] = row[other], row[place]
    elif damage == "drop":
        del row[place]
    elif damage == "double":
        row.insert(other, row[place])
    table = read_table(write_table(rows))
    try:
        damaged = schedule_of(table, schedule.num_microbatches)
    except ScheduleFormatError:
        assume(False)
    assume(table.has_messages)
    fault = find_fault(table, damaged)
    reasons = oracle.check(damaged) or program_oracle.check(Program(damaged, table.actions))
    if damage == "none":
        assert not fault and not reasons
    elif reasons:
        assert fault is not None
    elif fault:
        assert damage == "double" or "must come" in fault.message
    if fault and "deadlock" in fault.message:
        assert circle_is_closed(table, fault)
    else:
        assert not (fault and fault.cycle)


# ------------------------------------------------------------------------------------------------- messages for torch


@examples(100)
@given(schedule=random_schedules())
def test_paired_messages_meet_even_if_sends_block(schedule):
    program = lower_paired(schedule)
    validate_program(program)
    assert program_oracle.check(program) == []
    assert host_oracle.stuck(program, strict=True) == []


def test_receives_that_stand_early_are_no_fault_of_a_table():
    """Its messages are posted by whoever runs it; here they are placed anew, where hosts may wait."""
    orders = [*lower(build_schedule("1f1b", num_devices=2, num_microbatches=2)).actions]
    first = [action for action in orders[0] if action.kind is Kind.RECV_I]
    orders[0] = (*first, *(action for action in orders[0] if action not in first))
    table = read_table(write_table(orders))
    schedule = schedule_of(table, 2)
    assert find_fault(table, schedule) is None
    with refused("host-wait", kind=ScheduleError):
        validate_program(Program(schedule, tuple(orders)))
    validate_program(lower(schedule))
