"""The schedules of the families with their vocabulary passes."""

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
    """The schedules of all synchronous families that the costs are for, with their passes; see ``synchronous_schedules``."""
    found = []
    for schedule in synchronous_schedules(num_devices, num_microbatches, costs, max_chunks):
        with suppress(CostsError):
            found.append(with_vocabulary(schedule, barriers, costs))
    return found
