"""Check that a schedule from a file fits a run's pipeline and step."""

from __future__ import annotations

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.schedule import Schedule


def check_devices_of_file(schedule: Schedule, num_devices: int) -> None:
    """Raises:
    UnsupportedError: a file's schedule is for another number of devices.
    """
    if num_devices != schedule.num_devices:
        raise UnsupportedError(
            f"{schedule.name} schedules {schedule.num_devices} devices but the pipeline has {num_devices} ranks; pass "
            f"--pipeline-model-parallel-size {schedule.num_devices}, or a file for {num_devices} devices"
        )


def check_microbatches_of_file(schedule: Schedule, num_microbatches: int) -> None:
    """Raises:
    UnsupportedError: a file's schedule is for another number of microbatches.
    """
    own = schedule.num_microbatches
    if num_microbatches != own:
        raise UnsupportedError(
            f"{schedule.name} schedules {own} microbatches but this step has {num_microbatches}; choose "
            f"--global-batch-size = micro-batch size x data-parallel size x {own} without ramp-up, or give a file for "
            f"{num_microbatches} microbatches"
        )
