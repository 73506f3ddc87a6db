"""Say when every compute action of a schedule runs, as a plan for transfers takes it.

Devices run as soon as they can, but nobody gains by a forward that ends long before anything consumes it. A plan is made for a
timetable in which such actions are late: waits for transfers that end before these times hold nobody up.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.dependencies import Dependencies
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline


class Timetable(NamedTuple):
    """Start and end of every action of every device's order."""

    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> Timetable:
        return cls(*(tuple(np.array(device, dtype=float) for device in times) for times in (starts, ends)))

    def stretched(self, factor: float) -> Timetable:
        """Return the same with all times multiplied, as if everything but transfers were slower."""
        return Timetable(*(tuple(device * factor for device in times) for times in self))


def paced(schedule: Schedule, costs: Costs, share: float) -> Timetable:
    """Return an order with the forwards of every stage no closer together than a share of the busiest device's work for
    one microbatch, which makes a warm-up longer that runs many forwards in a row.

    Args:
        schedule: compute actions only.
        costs: what they take.
        share: at most 1.
    """
    placement, pieces = schedule.placement, schedule.pieces
    seconds = {kind: [s / pieces for s in stages] for kind, stages in costs.seconds(placement).items()}
    work = [sum(seconds[action.kind][action.stage] for action in order) for order in schedule.orders]
    interval = share * max(work) / schedule.num_units * (1 - 1e-9)
    found = Dependencies.of_schedule(schedule)
    lags = [costs.link_seconds(*link) / pieces for link in found.links]
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    ended = [0.0] * len(found.actions)
    last: dict[int, float] = {}
    for node in found.walk.nodes:
        device, action = found.graph.lane_of[node], found.actions[node]
        start = ends[device][-1] if ends[device] else 0.0
        for needed, link in found.graph.waits[node]:
            start = max(start, ended[needed] + lags[link])
        if action.kind is Kind.F:
            start = max(start, last.get(action.stage, -interval) + interval)
            last[action.stage] = start
        starts[device].append(start)
        ended[node] = start + seconds[action.kind][action.stage]
        ends[device].append(ended[node])
    return Timetable.of(starts, ends)


def timetables(timeline: Timeline) -> tuple[Timetable, ...]:
    """Return timetables within the makespan of the schedule: the forwards of the warm-up late, and everything late.

    Args:
        timeline: of a schedule of compute actions only.
    """
    found = Dependencies.of_schedule(timeline.schedule)
    warm_up = {
        node for nodes in found.graph.lanes for node in takewhile(lambda n: found.actions[n].kind is Kind.F, nodes)
    }
    return tuple(_late(timeline, found, movable) for movable in (warm_up, range(len(found.actions))))


def _late(timeline: Timeline, found: Dependencies, movable: Container[int]) -> Timetable:
    """Return the same run with every movable node as late as its followers and consumers allow."""
    schedule, costs, spans = timeline.schedule, timeline.costs, timeline.spans
    end_of_run = max((device[-1][1] for device in spans if device), default=0.0)
    starts = [[start for start, _ in device] for device in spans]
    ends = [[end for _, end in device] for device in spans]
    limits = [end_of_run] * len(found.actions)
    lags = [costs.link_seconds(*link) / schedule.pieces for link in found.links]
    for node in reversed(found.walk.nodes):
        device = found.graph.lane_of[node]
        at = node - found.graph.lanes[device].start
        start, end = spans[device][at]
        if node in movable:
            following = starts[device][at + 1] if at + 1 < len(starts[device]) else end_of_run
            latest = max(end, min(limits[node], following))
            starts[device][at], ends[device][at] = latest - (end - start), latest
        for needed, link in found.graph.waits[node]:
            limits[needed] = min(limits[needed], starts[device][at] - lags[link])
    return Timetable.of(starts, ends)
