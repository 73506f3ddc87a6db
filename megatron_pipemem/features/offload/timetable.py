"""Say when every compute action of a schedule runs, as a plan for transfers takes it.

Devices run as soon as they can, but nobody gains by a forward that ends long before anything consumes it. A plan is made for a
timetable in which such actions are late: waits for transfers that end before these times hold nobody up.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from megatron_pipemem.features.offload.transfers import Item, Key, RoundTrip
from megatron_pipemem.schedule.action import ROUND_TRIP, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Times
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import Timeline


class PassTimes(NamedTuple):
    """Start and end of every action of every device's order."""

    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> PassTimes:
        return cls(*(tuple(np.array(device, dtype=float) for device in times) for times in (starts, ends)))

    def stretched(self, factor: float) -> PassTimes:
        """Return the same with all times multiplied, as if everything but transfers were slower."""
        return PassTimes(*(tuple(device * factor for device in times) for times in self))


def paced(schedule: Schedule, costs: Costs, share: float) -> PassTimes:
    """Return an order with the forwards of every stage no closer together than a share of the busiest device's work for
    one microbatch, which makes a warm-up longer that runs many forwards in a row.

    Args:
        schedule: compute actions only.
        costs: what they take.
        share: at most 1.
    """
    found = Dependencies.of_schedule(schedule)
    graph, seconds, lags = ActionPrices(schedule, costs).of_graph(found)
    work = [sum(seconds[graph.prices[node]] for node in nodes) for nodes in graph.lanes]
    interval = share * max(work) / schedule.num_units * (1 - 1e-9)
    times = Times(graph, (), lags, 0.0)
    last: dict[int, float] = {}
    for node in found.walk.nodes:
        kind, stage, _ = found.actions[node]
        start = times.start_of(node)
        if kind is Kind.F:
            start = last[stage] = max(start, last.get(stage, -interval) + interval)
        times.starts[node] = start
        times.ends[node] = times.free[graph.lane_of[node]] = start + seconds[graph.prices[node]]
    lanes = found.lanes
    return PassTimes.of(*([each[nodes.start : nodes.stop] for nodes in lanes] for each in (times.starts, times.ends)))


def timetables(timeline: Timeline) -> tuple[PassTimes, ...]:
    """Return timetables within the makespan of the schedule: the forwards of the warm-up late, and everything late.

    Args:
        timeline: of a schedule of compute actions only.
    """
    found = Dependencies.of_schedule(timeline.schedule)
    warm_up = {
        node for nodes in found.graph.lanes for node in takewhile(lambda n: found.actions[n].kind is Kind.F, nodes)
    }
    return tuple(_late(timeline, found, movable) for movable in (warm_up, range(len(found.actions))))


def _late(timeline: Timeline, found: Dependencies, movable: Container[int]) -> PassTimes:
    """Return the same run with every movable node as late as its followers and consumers allow."""
    spans = timeline.spans
    graph, _, lags = ActionPrices(timeline.schedule, timeline.costs).of_graph(found)
    end_of_run = max((device[-1][1] for device in spans if device), default=0.0)
    starts = [[start for start, _ in device] for device in spans]
    ends = [[end for _, end in device] for device in spans]
    limits = [end_of_run] * len(found.actions)
    for node in reversed(found.walk.nodes):
        device = graph.lane_of[node]
        at = node - found.lanes[device].start
        start, end = spans[device][at]
        if node in movable:
            following = starts[device][at + 1] if at + 1 < len(starts[device]) else end_of_run
            latest = max(end, min(limits[node], following))
            starts[device][at], ends[device][at] = latest - (end - start), latest
        for needed, link in graph.waits[node]:
            limits[needed] = min(limits[needed], starts[device][at] - lags[link])
    return PassTimes.of(starts, ends)


_DEVICE_MEMORY, _HOST_MEMORY = slice(1, 3), slice(0, 4, 3)


class PlacedTrips(NamedTuple):
    """Say where in a device's order the four actions of its round trips go, by their columns in ``ROUND_TRIP``.

    Args:
        trips: one row each.
        places: positions in the order that they go before.
        times: when they are; decides between those that go before the same position.
        ranks: decide between those of the same time.
    """

    trips: Sequence[RoundTrip]
    places: np.ndarray
    times: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(
        cls, device: int, timetable: PassTimes, trips: Sequence[RoundTrip], lives: Mapping[Key, tuple[int, int]]
    ) -> PlacedTrips:
        """Place every transfer where the device stands when its channel gets to it.

        Args:
            device: whose order it is.
            timetable: when its actions run.
            trips: those of other devices are left out.
            lives: see ``lives`` below.
        """
        own = _of(device, trips)
        starts, ends = timetable.starts[device], timetable.ends[device]
        exact = _exact(ends)
        made, used = np.array([lives[trip.item.key] for trip in own], dtype=int).reshape(-1, 2).T
        times = np.array([(out, out + item.out, back, item.used) for item, out, back in own], dtype=float).reshape(
            -1, len(ROUND_TRIP)
        )
        out, left, back, _ = times.T
        # Where passes take no time, many positions have the same time; a round trip's four actions stay in their order.
        at_out = np.minimum(used, np.maximum(made + 1, ends.searchsorted(out + exact, "right")))
        at_left = np.maximum(at_out, starts.searchsorted(left - exact))
        at_back = np.minimum(used, np.maximum(at_left, ends.searchsorted(back + exact, "right")))
        # Of what happens at one time: what has ended gives room to what begins. A transfer that takes no time is both.
        ranks = [(2 if item.out else -1, 0, 2 if item.back else 0.5, 1) for item, _, _ in own]
        places = np.stack([at_out, at_left, at_back, used], axis=1)
        return cls(own, places, times, np.array(ranks, dtype=float).reshape(places.shape))

    def peak(self, changes: Mapping[Kind, Sequence[float]], base: np.ndarray) -> float:
        """Return the most that the device holds, where the order alone changes what it holds by ``base``."""
        every = np.append(self._changes(changes, _DEVICE_MEMORY), base)
        return float(every[self._merged(_DEVICE_MEMORY, len(base))].cumsum().max(initial=0.0))

    def host_peak(self, changes: Mapping[Kind, Sequence[float]]) -> float:
        """Return the most host memory that the device uses."""
        every = self._changes(changes, _HOST_MEMORY)
        return float(every[self._merged(_HOST_MEMORY, 0)].cumsum().max(initial=0.0))

    def order(self, base: Order) -> Order:
        """Return the order of the device with its round trips."""
        actions = [Action(kind, *trip.item.key) for trip in self.trips for kind in ROUND_TRIP]
        actions += base
        return tuple(actions[at] for at in self._merged(slice(None), len(base)))

    def _merged(self, columns: slice, length: int) -> np.ndarray:
        """Return the sequence of these columns, counted row by row, and of an order of some length, counted behind
        them.
        """
        chosen = (np.asarray(each)[:, columns].ravel() for each in (self.ranks, self.times, self.places))
        own = (np.zeros(length), np.full(length, np.inf), np.arange(length))
        return np.lexsort([np.append(*each) for each in zip(chosen, own, strict=True)])

    def _changes(self, changes: Mapping[Kind, Sequence[float]], columns: slice) -> np.ndarray:
        """Return what these columns change, row by row."""
        places = [trip.item.place for trip in self.trips]
        weights = np.array([trip.item.weight for trip in self.trips])
        by_kind = [np.array(changes[kind], dtype=np.float64)[places] * weights for kind in ROUND_TRIP[columns]]
        return np.stack(by_kind, axis=1).ravel()


def lives(order: Order) -> dict[Key, tuple[int, int]]:
    """Return the positions between which activations may be away: of their F, and of what needs them first."""
    made: dict[Key, int] = {}
    found: dict[Key, tuple[int, int]] = {}
    for at, action in enumerate(order):
        key = (action.stage, action.microbatch)
        if action.kind is Kind.F:
            made[key] = at
        elif action.kind in (Kind.RS, Kind.I, Kind.B) and key not in found:
            found[key] = made[key], at
    return found


def useless(device: int, timetable: PassTimes, trips: Sequence[RoundTrip]) -> list[Item]:
    """Return those of a device's items in whose absence nothing runs.

    Args:
        device: number of the device.
        timetable: when compute actions run.
        trips: round trips of all devices.
    """
    own = _of(device, trips)
    starts, ends = timetable.starts[device], timetable.ends[device]
    exact = _exact(ends)
    left, back = (np.array(times) for times in ([t.out + t.item.out for t in own], [t.back for t in own]))
    frees = starts.searchsorted(left - exact) < ends.searchsorted(back + exact, "right")
    return [trip.item for trip, does in zip(own, frees, strict=True) if not does]


def _of(device: int, trips: Sequence[RoundTrip]) -> list[RoundTrip]:
    return [trip for trip in trips if trip.item.device == device]


def _exact(ends: np.ndarray) -> float:
    """Return what times may be off by."""
    return 1e-9 * ends[-1] if len(ends) else 0.0
