"""Files with schedules: read the schedule of a run and check its size, or find the first fault of a table.

Tables may be those of other programs. A fault comes with its cell in the file and its remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.csv_format import Cell, Table, in_letters, read_schedule_file
from megatron_pipemem.schedule.dependencies import Wait
from megatron_pipemem.schedule.lowering import add_gradient_reductions
from megatron_pipemem.schedule.schedule import NEVER_FLUSHED, Program, Schedule
from megatron_pipemem.schedule.size import estimated
from megatron_pipemem.schedule.validator import check_microbatch_order, validate, validate_program


def schedule_of_file(path: str, memory_cap: float | Sequence[float] | None) -> Schedule:
    """Read a schedule from a file that ``Schedule.to_csv`` wrote, and prove that it is valid.

    ``memory_cap`` is in activation units, one number or one per device. A file that cannot be read raises a
    ScheduleFormatError. An invalid schedule raises a ScheduleError. An asynchronous one, and one that takes too long to
    prove, raise an UnsupportedError, as does one whose microbatches have different numbers of slices.
    """
    schedule = Schedule.from_csv(read_schedule_file(path), name=Path(path).name)
    if schedule.updates is not None:
        raise UnsupportedError(
            "no-steps", f"schedule {path} can be simulated and drawn but not run, because {NEVER_FLUSHED}"
        )
    if not schedule.units.are_equal:
        raise UnsupportedError(
            "slices-do-not-fit",
            f"schedule {path} has microbatches of {min(schedule.units.sizes)} to {schedule.units.parts} slices, and a run cuts "
            "all sequences alike; give a file with the same number for each",
        )
    size = estimated(schedule.num_devices, len(schedule.units), schedule.placement.num_chunks, fitted=False)
    if size.is_large:
        raise UnsupportedError(
            "too-large", f"schedule {path} makes {size}; give a file with fewer devices or microbatches"
        )
    validate(schedule, memory_cap=memory_cap)
    return schedule


def check_devices_of_file(schedule: Schedule, num_devices: int) -> None:
    """Raise an UnsupportedError if a file's schedule is for another number of devices."""
    if num_devices != schedule.num_devices:
        raise UnsupportedError(
            "other-size",
            f"{schedule.name} schedules {schedule.num_devices} devices but the pipeline has {num_devices} ranks; pass "
            f"--pipeline-model-parallel-size {schedule.num_devices}, or a file for {num_devices} devices",
        )


def check_microbatches_of_file(schedule: Schedule, num_microbatches: int) -> None:
    """Raise an UnsupportedError if a file's schedule is for another number of microbatches."""
    own = schedule.num_microbatches
    if num_microbatches != own:
        raise UnsupportedError(
            "other-size",
            f"{schedule.name} schedules {own} microbatches but this step has {num_microbatches}; choose "
            f"--global-batch-size = micro-batch size x data-parallel size x {own} without ramp-up, or give a file for "
            f"{num_microbatches} microbatches",
        )


@dataclass(frozen=True)
class Fault:
    """A fault of a table."""

    error: ScheduleError  # the fault and its remedy, in this package's notation
    message: str  # the same in the notation of the table
    cell: Cell | None  # the place of the fault; ``None`` if an action is missing

    @property
    def cycle(self) -> tuple[Wait, ...]:
        """Return the waits of a deadlock: every device waits for the next one, and the last for the first."""
        return self.error.cycle


def find_fault(table: Table, schedule: Schedule, memory_cap: float | Sequence[float] | None = None) -> Fault | None:
    """Return the first fault of a table; ``None`` if its actions compute every microbatch without a deadlock.

    A peak above ``memory_cap`` is a fault, too. If the table has messages, each send must have its receive, and every
    directed pair of devices must send and receive in the same order. A table without gradient reductions, such as
    torch's, gets those of this package.
    """
    try:
        _check_numbering(schedule)
        validate(schedule, memory_cap=memory_cap, microbatch_order=False)
        if table.has_messages:
            # The table's own runner posts its messages. Here they would be placed anew.
            validate_program(_program(table, schedule), microbatch_order=False, host_waits=False)
    except ScheduleError as error:
        return _fault(table, error)
    return None


def find_obstacle(table: Table, schedule: Schedule) -> Fault | None:
    """Return the fault of a valid table whose microbatch order this package cannot run; ``None`` if it can."""
    try:
        check_microbatch_order(schedule)
    except ScheduleError as error:
        return _fault(table, error)
    return None


def _fault(table: Table, error: ScheduleError) -> Fault:
    cell, message = _cell(table, error), str(error)
    if error.cycle:
        message = _describe(error.cycle)
    elif cell is not None:  # the place of the cell says more than the position in the device's order
        message = f"device {error.device}, action {error.action}: {error.problem}"
    return Fault(error, in_letters(message, table.letters), cell)


def _describe(cycle: tuple[Wait, ...]) -> str:
    """Return the message of a deadlock: the devices that wait, and one action to move earlier against the deadlock."""
    stands = {wait.device: wait.action for wait in cycle}
    wait = next(wait for wait in cycle if wait.needed != stands[wait.owner])
    members = ", ".join(f"device {member.device} at {member.action}" for member in cycle)
    return (
        f"deadlock: a circle of {len(cycle)} devices that wait for one another ({members}); "
        f"move {wait.needed} before {stands[wait.owner]} on device {wait.owner}"
    )


def _program(table: Table, schedule: Schedule) -> Program:
    if any(action.kind is Kind.REDUCE_GRAD for row in table.actions for action in row):
        return Program(schedule, table.actions)
    return Program(schedule, tuple(map(add_gradient_reductions, table.actions)))


def _check_numbering(schedule: Schedule) -> None:
    """Raise a ScheduleError if a stage numbers its actions of one kind without a gap, but from 1 or more, not from 0.

    The validator would report such a stage as incomplete.
    """
    units = range(len(schedule.units))
    for device, order in enumerate(schedule.orders):
        by_kind: dict[tuple[Kind, int], list[tuple[int, Action]]] = {}
        for position, action in enumerate(order):
            by_kind.setdefault((action.kind, action.stage), []).append((position, action))
        for (kind, stage), places in by_kind.items():
            numbers = sorted(action.microbatch for _, action in places)
            shift = numbers[0]
            if shift and len(numbers) == len(units) and numbers == list(range(shift, shift + len(units))):
                position, action = min(places, key=lambda place: place[1].microbatch)
                raise ScheduleError(
                    "shifted-microbatches",
                    f"stage {stage} numbers its {len(units)} actions of kind {kind} from {shift} to {numbers[-1]}, "
                    f"but the step has microbatches 0 to {len(units) - 1}; subtract {shift} from each number, so "
                    f"that {action} becomes {action._replace(microbatch=0)}",
                    at=(device, position, action),
                )


def _cell(table: Table, error: ScheduleError) -> Cell | None:
    """Return the cell of the action that an error names, the second one if the device has the action twice."""
    if error.device is None or error.device >= len(table.rows):
        return None
    cells = [cell for cell in table.rows[error.device] if str(cell.action) == error.action]
    return cells[min(1, len(cells) - 1)] if cells else None
