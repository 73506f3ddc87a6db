"""Write schedules as passes: what a device runs next, not yet for which microbatch.

Every family here takes the microbatches of a stage in order, forward as well as backward, and the sequence slices of each
from the first to the last forward, from the last to the first backward. A device's order is then fully told by the sequence
of its passes, and weight gradients accumulate in the order in which 1F1B does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_pipemem.schedule.action import Action, Kind, mirrored
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


class Pass(NamedTuple):
    """Name one class of compute actions: a kind on a stage, for whichever microbatch comes next."""

    kind: Kind
    stage: int


def in_microbatch_order(
    name: str, placement: Placement, num_microbatches: int, passes: Iterable[Iterable[Pass]], slices: int = 1
) -> Schedule:
    """Return the schedule in which the k-th forward of a stage is of unit ``k``, and its k-th backward, I or B, of the unit
    that ``mirrored`` gives. Without slices, units are the microbatches.

    The k-th W of a stage is of the unit of its k-th I; where a stage has no I at all, of that of the k-th backward.

    Args:
        name: name of the schedule.
        placement: which device holds which stage.
        num_microbatches: microbatches of one step; occurrences beyond it are dropped.
        passes: the passes of every device, in order: one per kind, stage and unit.
        slices: sequence slices of a microbatch.
    """
    orders = (_order(list(device_passes), num_microbatches * slices, slices) for device_passes in passes)
    return Schedule(name, placement, num_microbatches, tuple(orders), slices)


def _order(passes: list[Pass], num_units: int, slices: int) -> tuple[Action, ...]:
    # Only a stage that mixes I and B has a W whose place is not simply the number of W before it.
    split: dict[int, list[int]] = {}
    backwards: dict[int, int] = {}
    for kind, stage in passes:
        if kind is Kind.I or kind is Kind.B:
            place = backwards.get(stage, 0)
            backwards[stage] = place + 1
            if kind is Kind.I:
                split.setdefault(stage, []).append(place)
    everything = range(len(passes))
    counts: dict[tuple[Kind, int], int] = {}
    order = []
    for kind, stage in passes:
        counted = (Kind.I if kind is Kind.B else kind, stage)
        place = counts.get(counted, 0)
        counts[counted] = place + 1
        if kind is Kind.W:
            place = split.get(stage, everything)[place]
        if place < num_units:
            order.append((kind, stage, place if kind is Kind.F else mirrored(place, slices)))
    return tuple(map(Action._make, order))
