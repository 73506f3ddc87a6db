"""Read the schedule of a run from a file, prove it, and check that its size fits the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.csv_format import read_schedule_file
from megatron_pipemem.schedule.schedule import NEVER_FLUSHED, Schedule
from megatron_pipemem.schedule.validator import validate


def schedule_of_file(path: str, memory_cap: float | Sequence[float] | None) -> Schedule:
    """Read a schedule from a file that ``Schedule.to_csv`` wrote, and prove that it is valid.

    ``memory_cap`` is in activation units, one number or one per device. A file that cannot be read raises a
    ScheduleFormatError. An invalid schedule raises a ScheduleError, and an asynchronous one an UnsupportedError.
    """
    schedule = Schedule.from_csv(read_schedule_file(path), name=Path(path).name)
    if schedule.updates is not None:
        raise UnsupportedError(
            "no-steps", f"schedule {path} can be simulated and drawn but not run, because {NEVER_FLUSHED}"
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
