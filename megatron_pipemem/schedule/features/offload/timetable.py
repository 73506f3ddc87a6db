"""When every compute action of a schedule runs, as a plan for transfers takes it.

Devices run as soon as they can, but nobody gains by a forward that ends long before anything consumes it. A plan is made for a
timetable in which such actions are late: waits for transfers that end before these times hold nobody up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, dependencies


class Timetable(NamedTuple):
    """Start and end of every action of every device's order."""

    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> Timetable:
        return cls(*(tuple(np.array(device, dtype=float) for device in times) for times in (starts, ends)))

    def stretched(self, factor: float) -> Timetable:
        """The same with all times multiplied, as if everything but transfers were slower."""
        return Timetable(*(tuple(device * factor for device in times) for times in self))


def paced(schedule: Schedule, costs: Costs, share: float) -> Timetable:
    """The forwards of every stage no closer together than a share of the busiest device's work for one microbatch, which
    makes a warm-up longer that runs many forwards in a row, and leaves the steady state alone.

    Args:
        schedule: compute actions only.
        costs: what they take.
        share: at most 1.
    """
    placement, pieces = schedule.placement, schedule.pieces
    seconds = {kind: [s / pieces for s in stages] for kind, stages in costs.seconds(placement).items()}
    work = [sum(seconds[action.kind][action.stage] for action in order) for order in schedule.orders]
    interval = share * max(work) / schedule.num_units * (1 - 1e-9)
    needs = _needs(schedule)
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    ended: dict[Action, float] = {}
    last: dict[int, float] = {}
    for device, _, action in reversed(list(_backwards(schedule, needs))):
        start = ends[device][-1] if ends[device] else 0.0
        for needed in needs[action]:
            link = costs.link_seconds(placement.devices[needed.stage], device) / pieces
            start = max(start, ended[needed] + link)
        if action.kind is Kind.F:
            start = max(start, last.get(action.stage, -interval) + interval)
            last[action.stage] = start
        starts[device].append(start)
        ended[action] = start + seconds[action.kind][action.stage]
        ends[device].append(ended[action])
    return Timetable.of(starts, ends)


def timetables(timeline: Timeline) -> tuple[Timetable, ...]:
    """Timetables within the makespan of the schedule: the forwards of the warm-up late, and everything late.

    Args:
        timeline: of a schedule of compute actions only.
    """
    schedule = timeline.schedule
    warm_up = set()
    for order in schedule.orders:
        for action in order:
            if action.kind is not Kind.F:
                break
            warm_up.add(action)
    everything = {action for order in schedule.orders for action in order}
    needs = _needs(schedule)
    walk = list(_backwards(schedule, needs))
    return tuple(_late(timeline, needs, walk, movable) for movable in (warm_up, everything))


def _late(
    timeline: Timeline,
    needs: dict[Action, tuple[Action, ...]],
    walk: Sequence[tuple[int, int, Action]],
    movable: set[Action],
) -> Timetable:
    """The same run with every movable action as late as its followers and consumers allow; ``walk`` is ``_backwards``."""
    schedule, costs, spans = timeline.schedule, timeline.costs, timeline.spans
    placement, pieces = schedule.placement, schedule.pieces
    end_of_run = max((device[-1][1] for device in spans if device), default=0.0)
    starts = [[start for start, _ in device] for device in spans]
    ends = [[end for _, end in device] for device in spans]
    limits: dict[Action, float] = {}
    for device, at, action in walk:
        start, end = spans[device][at]
        if action in movable:
            following = starts[device][at + 1] if at + 1 < len(starts[device]) else end_of_run
            latest = max(end, min(limits.get(action, end_of_run), following))
            starts[device][at], ends[device][at] = latest - (end - start), latest
        for needed in needs[action]:
            link = costs.link_seconds(placement.devices[needed.stage], device) / pieces
            limits[needed] = min(limits.get(needed, end_of_run), starts[device][at] - link)
    return Timetable.of(starts, ends)


def _needs(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    actions = [action for order in schedule.orders for action in order]
    fused = {action for action in actions if action.kind is Kind.B}
    return {action: dependencies(action, schedule.placement, fused, schedule.pieces) for action in actions}


def _backwards(schedule: Schedule, needs: dict[Action, tuple[Action, ...]]) -> Iterator[tuple[int, int, Action]]:
    """Device, position and action, everything after all that needs it."""
    unseen = Counter(needed for wanted in needs.values() for needed in wanted)
    left = [len(order) for order in schedule.orders]
    waiting: dict[Action, int] = {}
    runnable = list(range(len(left)))
    while runnable:
        device = runnable.pop()
        order = schedule.orders[device]
        while left[device]:
            action = order[left[device] - 1]
            if unseen[action]:
                waiting[action] = device
                break
            left[device] -= 1
            yield device, left[device], action
            for needed in needs[action]:
                unseen[needed] -= 1
                if not unseen[needed] and needed in waiting:
                    runnable.append(waiting.pop(needed))
