"""Schedules written as passes: what a device runs next, not yet for which microbatch.

Every family here takes the microbatches of a class of passes (say, all forwards of stage 2) in order. A device's order
is then fully told by the sequence of its passes, and weight gradients accumulate in the order in which 1F1B does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


class Pass(NamedTuple):
    """One class of compute actions: a kind on a stage, for whichever microbatch comes next."""

    kind: Kind
    stage: int


def in_microbatch_order(
    name: str, placement: Placement, num_microbatches: int, passes: Iterable[Iterable[Pass]]
) -> Schedule:
    """The schedule in which the n-th occurrence of a pass is of microbatch ``n``.

    Args:
        name: name of the schedule.
        placement: which device holds which stage.
        num_microbatches: microbatches of one step; occurrences beyond it are dropped.
        passes: the passes of every device, in order.
    """
    orders = []
    for device_passes in passes:
        counts: dict[Pass, int] = {}
        order = []
        for each in device_passes:
            microbatch = counts.get(each, 0)
            if microbatch < num_microbatches:
                order.append(Action(each[0], each[1], microbatch))
            counts[each] = microbatch + 1
        orders.append(tuple(order))
    return Schedule(name, placement, num_microbatches, tuple(orders))
