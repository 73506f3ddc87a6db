"""Read the schedule of a file, prove it, and check that it fits a run's pipeline and step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.csv_format import read_schedule_file
from megatron_pipemem.schedule.schedule import NEVER_FLUSHED, Schedule
from megatron_pipemem.schedule.validator import validate


def schedule_of_file(path: str, memory_cap: float | Sequence[float] | None) -> Schedule:
    """Return the schedule of a file, proved.

    Args:
        path: of a file as ``Schedule.to_csv`` writes it.
        memory_cap: in activation units, of all devices or one each, or ``None``.

    Raises:
        ScheduleFormatError: the file cannot be read as a schedule.
        UnsupportedError: its weights change in the middle of a step.
        ScheduleError: it is wrong or above the cap.
    """
    schedule = Schedule.from_csv(read_schedule_file(path), name=Path(path).name)
    if schedule.updates is not None:
        raise UnsupportedError(
            "no-steps", f"schedule {path} can be simulated and drawn but not run, because {NEVER_FLUSHED}"
        )
    validate(schedule, memory_cap=memory_cap)
    return schedule


def check_devices_of_file(schedule: Schedule, num_devices: int) -> None:
    """Raises:
    UnsupportedError: a file's schedule is for another number of devices.
    """
    if num_devices != schedule.num_devices:
        raise UnsupportedError(
            "other-size",
            f"{schedule.name} schedules {schedule.num_devices} devices but the pipeline has {num_devices} ranks; pass "
            f"--pipeline-model-parallel-size {schedule.num_devices}, or a file for {num_devices} devices",
        )


def check_microbatches_of_file(schedule: Schedule, num_microbatches: int) -> None:
    """Raises:
    UnsupportedError: a file's schedule is for another number of microbatches.
    """
    own = schedule.num_microbatches
    if num_microbatches != own:
        raise UnsupportedError(
            "other-size",
            f"{schedule.name} schedules {own} microbatches but this step has {num_microbatches}; choose "
            f"--global-batch-size = micro-batch size x data-parallel size x {own} without ramp-up, or give a file for "
            f"{num_microbatches} microbatches",
        )
