"""Build the schedules of the families with their vocabulary passes."""

from __future__ import annotations

from contextlib import suppress

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.features.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.registry import synchronous_schedules


def families_with_passes(
    num_devices: int, num_microbatches: int, costs: Costs, barriers: int, max_chunks: int | None = None
) -> list[Schedule]:
    """Return the schedules of all synchronous families that the costs are for, with their passes; see
    ``synchronous_schedules``.

    Args:
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        costs: what actions take, in seconds, and hold.
        barriers: 1 or 2.
        max_chunks: the most stages per device; ``None`` takes the families' own.
    """
    found = []
    for schedule in synchronous_schedules(num_devices, num_microbatches, costs, max_chunks):
        with suppress(CostsError):
            found.append(with_vocabulary(schedule, barriers, costs))
    return found
