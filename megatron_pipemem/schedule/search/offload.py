"""List the orders, beside those that a search finds, that offload and recomputation may best start from."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.families.offload import uniform_repeating
from megatron_pipemem.schedule.features.offload.weights import with_prompt_weights
from megatron_pipemem.schedule.registry import synchronous_schedules

UNIFORM = "uniform repeating"


def known_orders(
    num_devices: int, num_microbatches: int, costs: Costs, placements: Collection[Placement]
) -> Iterator[tuple[str, Schedule]]:
    """Yield the orders of the families and of uniform repeating in these placements, by name.

    Args:
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        costs: what actions take and hold.
        placements: which to consider.
    """
    p, m = num_devices, num_microbatches
    found = [(schedule.name, schedule) for schedule in synchronous_schedules(p, m, costs)]
    chunks = {each.num_chunks for each in placements}
    found += [(f"{UNIFORM}, {v} chunks", uniform_repeating(p, m, v)) for v in chunks]
    found.append((f"{UNIFORM} over a V", uniform_repeating(p, m, 2, "v")))
    return ((name, schedule) for name, schedule in found if schedule.placement in placements)


def prompt_orders(
    num_devices: int, num_microbatches: int, costs: Costs, placements: Collection[Placement]
) -> Iterator[tuple[str, Schedule]]:
    """Yield the orders of families over a V with fewer W waiting, by name.

    Args:
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        costs: what actions take and hold.
        placements: which to consider.
    """
    for schedule in synchronous_schedules(num_devices, num_microbatches, costs):
        if schedule.placement.name == "v" and schedule.placement in placements:
            for most, prompt in enumerate(with_prompt_weights(schedule, costs)):
                yield f"{schedule.name}, at most {most} W waiting", prompt
