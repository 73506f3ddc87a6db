"""Write schedules as passes: what a device runs next, not yet for which microbatch.

Every family here takes the microbatches of a stage in order, forward as well as backward. A device's order is then fully
told by the sequence of its passes, and weight gradients accumulate in the order in which 1F1B does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule


class Pass(NamedTuple):
    """Name one class of compute actions: a kind on a stage, for whichever microbatch comes next."""

    kind: Kind
    stage: int


def in_microbatch_order(
    name: str, placement: Placement, num_microbatches: int, passes: Iterable[Iterable[Pass]]
) -> Schedule:
    """Return the schedule in which the n-th forward, and the n-th backward, I or B, of a stage is of microbatch ``n``.

    The n-th W of a stage is of the microbatch of its n-th I; where a stage has no I at all, of microbatch ``n``.

    Args:
        name: name of the schedule.
        placement: which device holds which stage.
        num_microbatches: microbatches of one step; occurrences beyond it are dropped.
        passes: the passes of every device, in order.
    """
    orders = (_order(list(device_passes), num_microbatches) for device_passes in passes)
    return Schedule(name, placement, num_microbatches, tuple(orders))


def _order(passes: list[Pass], num_microbatches: int) -> tuple[Action, ...]:
    # Only a stage that mixes I and B has a W whose microbatch is not simply the number of W before it.
    split: dict[int, list[int]] = {}
    backwards: dict[int, int] = {}
    for kind, stage in passes:
        if kind is Kind.I or kind is Kind.B:
            microbatch = backwards.get(stage, 0)
            backwards[stage] = microbatch + 1
            if kind is Kind.I:
                split.setdefault(stage, []).append(microbatch)
    everything = range(len(passes))
    counts: dict[tuple[Kind, int], int] = {}
    order = []
    for kind, stage in passes:
        counted = (Kind.I if kind is Kind.B else kind, stage)
        microbatch = counts.get(counted, 0)
        counts[counted] = microbatch + 1
        if kind is Kind.W:
            microbatch = split.get(stage, everything)[microbatch]
        if microbatch < num_microbatches:
            order.append((kind, stage, microbatch))
    return tuple(map(Action._make, order))
