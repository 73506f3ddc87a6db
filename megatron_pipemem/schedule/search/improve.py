"""Run a step by urgency, or in given orders, and improve orders by justification (forward-backward improvement).

Justification comes from project scheduling: move every pass as late as possible, into idle gaps too, then every pass as
early as possible, and repeat. No move makes the step longer or takes more memory than the caps, so every order on the
way is a valid schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_pipemem.schedule.core.walk import Graph, Times
from megatron_pipemem.schedule.search.problem import Orders, Problem


@dataclass(frozen=True)
class Timetable:
    """Orders and when their passes start.

    Args:
        orders: per device, its passes in order.
        starts: tick in which every pass starts.
        makespan: ticks until the last pass ends; the first starts at 0.
    """

    orders: Orders
    starts: list[int]
    makespan: int


def as_soon_as_possible(problem: Problem, orders: Orders) -> Timetable | None:
    """Run every device's order without waiting longer than it must; ``None`` when the orders wait for one another."""
    lags, waits, classes, devices = problem.passes
    graph = Graph(orders, waits, classes, devices)
    nodes, _ = graph.walk()
    if len(nodes) < len(waits):
        return None
    times = Times(graph, problem.ticks, lags, zero=0)
    times.run(graph.steps(nodes))
    return Timetable(orders, times.starts, max(times.free))


def timetable(problem: Problem, orders: Orders) -> Timetable:
    """Return ``as_soon_as_possible`` of orders that are known to end."""
    table = as_soon_as_possible(problem, orders)
    assert table is not None, "the orders wait for one another"
    return table


def dispatch(problem: Problem, urgency: Sequence[float]) -> Timetable | None:
    """Run the step by urgency.

    Args:
        problem: the passes and the caps.
        urgency: per pass, smaller runs earlier.

    Returns:
        ``None`` when the devices came to a stop because no cap admitted what was ready.
    """
    m, ticks, change, device_of = problem.num_microbatches, problem.ticks, problem.change, problem.device
    classes_of, caps, followers, reserve = problem.classes, problem.caps, problem.followers, problem.reserve
    num_classes = len(ticks)
    ready: list[list[int]] = [[0] * m for _ in range(num_classes)]
    missing = [[len(waits)] * m for waits in problem.waits]
    upcoming = [0] * num_classes
    levels = [0] * problem.num_devices
    busy = [0] * problem.num_devices
    orders: Orders = [[] for _ in range(problem.num_devices)]
    starts = [-1] * (num_classes * m)
    events = [(0, d) for d in range(problem.num_devices)]
    left = num_classes * m
    while events:
        now, d = heappop(events)
        if busy[d] > now:
            continue
        level = levels[d]
        best = -1
        best_urgency = float("inf")
        for c in classes_of[d]:
            k = upcoming[c]
            if k == m or missing[c][k]:
                continue
            delta = change[c]
            if delta > 0 and level + delta + reserve[c] > caps[d]:
                continue
            value = urgency[c * m + k]
            if ready[c][k] <= now and value < best_urgency:
                best, best_urgency = c, value
        if best < 0:
            continue
        k = upcoming[best]
        upcoming[best] = k + 1
        end = now + ticks[best]
        each = best * m + k
        starts[each] = now
        orders[d].append(each)
        levels[d] = level + change[best]
        busy[d] = end
        left -= 1
        heappush(events, (end, d))
        for c, lag in followers[best]:
            at = end + lag
            if at > ready[c][k]:
                ready[c][k] = at
            missing[c][k] -= 1
            other = device_of[c]
            if other != d:
                heappush(events, (at, other))
    if left:
        return None
    return Timetable(orders, starts, max(busy))


def justify(problem: Problem, table: Timetable, frozen: Collection[int] = frozenset()) -> Timetable:
    """Move all passes as late as possible, then all as early as possible.

    Args:
        problem: what the orders must satisfy.
        table: within the caps.
        frozen: passes that are moved within their place only, to look elsewhere than a plain justification does.
    """
    late = _earlier(problem.reversed, _mirror(problem, table), _mirrored(problem, frozen))
    return _earlier(problem, _mirror(problem.reversed, late), frozen)


def _mirrored(problem: Problem, passes: Collection[int]) -> set[int]:
    m = problem.num_microbatches
    return {each + m - 1 - 2 * (each % m) for each in passes}


def _mirror(problem: Problem, table: Timetable) -> Timetable:
    """Return the timetable of the reversed problem."""
    m, ticks = problem.num_microbatches, problem.ticks
    starts = [0] * len(table.starts)
    for each, start in enumerate(table.starts):
        c, k = divmod(each, m)
        starts[c * m + m - 1 - k] = table.makespan - start - ticks[c]
    orders = [[each + m - 1 - 2 * (each % m) for each in reversed(order)] for order in table.orders]
    return Timetable(orders, starts, table.makespan)


class Row:
    """A device while its passes are placed, one after another.

    Args:
        cap: the most that it may hold.
        shortest: its shortest pass; smaller gaps are forgotten.
    """

    def __init__(self, cap: int, shortest: int) -> None:
        self._cap, self._shortest = cap, shortest
        self.order: list[int] = []
        self.end = 0
        self._levels: list[int] = []  # what it holds after each pass placed so far
        self._gap_starts: list[int] = []
        self._gap_ends: list[int] = []
        self._gap_places: list[int] = []  # how many passes stand before the gap

    def into_gap(self, each: int, ready: int, length: int, change: int) -> int:
        """Put a pass into the first gap that it fits, by its inputs, its length and the cap; when it ends, or -1.

        Args:
            each: the pass.
            ready: tick from which its inputs are there.
            length: ticks that it takes.
            change: by how much it changes what the device holds.
        """
        levels, heads, tails, places = self._levels, self._gap_starts, self._gap_ends, self._gap_places
        gap = bisect_left(tails, ready + length)
        if gap == len(tails):
            return -1
        first = 0
        if change > 0:
            # Whatever stands between the gap and here would be run with this much more held.
            allowed = self._cap - change
            place, least = len(levels), places[gap]
            # The level before the gap counts too: it is what the pass itself adds to.
            while place and place >= least and levels[place - 1] <= allowed:
                place -= 1
            first = place + 1 if place or allowed < 0 else 0
        for found in range(gap, len(tails)):
            begin = heads[found]
            if ready > begin:
                begin = ready
            if begin + length <= tails[found] and places[found] >= first:
                break
        else:
            return -1
        place = places[found]
        self.order.insert(place, each)
        levels.insert(place, levels[place - 1] if place else 0)
        if change:
            for index in range(place, len(levels)):
                levels[index] += change
        end = begin + length
        # The gap splits in two; slivers that nothing fits are forgotten.
        pieces = []
        if begin - heads[found] >= self._shortest:
            pieces.append((heads[found], begin, place))
        if tails[found] - end >= self._shortest:
            pieces.append((end, tails[found], place + 1))
        heads[found : found + 1] = [piece[0] for piece in pieces]
        tails[found : found + 1] = [piece[1] for piece in pieces]
        places[found : found + 1] = [piece[2] for piece in pieces]
        for index in range(found + len(pieces), len(places)):
            places[index] += 1
        return end

    def append(self, each: int, ready: int, length: int, change: int) -> int:
        """Put a pass behind all others; when it ends.

        Args:
            each: the pass.
            ready: tick from which its inputs are there.
            length: ticks that it takes.
            change: by how much it changes what the device holds.
        """
        begin = self.end
        if ready > begin:
            if ready - begin >= self._shortest:
                self._gap_starts.append(begin)
                self._gap_ends.append(ready)
                self._gap_places.append(len(self.order))
            begin = ready
        self.order.append(each)
        self._levels.append((self._levels[-1] if self._levels else 0) + change)
        self.end = begin + length
        return self.end


def _earlier(problem: Problem, table: Timetable, frozen: Collection[int]) -> Timetable:
    """Move every pass, by time, into the first gap that it fits, or else behind the others."""
    m, ticks, waits, change, device_of = (
        problem.num_microbatches,
        problem.ticks,
        problem.waits,
        problem.change,
        problem.device,
    )
    rows = [
        Row(cap, min(ticks[c] for c in classes)) for cap, classes in zip(problem.caps, problem.classes, strict=True)
    ]
    ends, starts = [0] * len(table.starts), table.starts
    for each in sorted(range(len(starts)), key=starts.__getitem__):
        c, k = divmod(each, m)
        ready = ends[each - 1] if k else 0
        for other, lag in waits[c]:
            end = ends[other * m + k] + lag
            if end > ready:
                ready = end
        row = rows[device_of[c]]
        end = -1 if each in frozen else row.into_gap(each, ready, ticks[c], change[c])
        ends[each] = end if end >= 0 else row.append(each, ready, ticks[c], change[c])
    new_starts = [end - ticks[each // m] for each, end in enumerate(ends)]
    # Mirrored timetables may begin late when everything moved towards the end.
    first = min(new_starts)
    if first:
        new_starts = [start - first for start in new_starts]
    return Timetable([row.order for row in rows], new_starts, max(row.end for row in rows) - first)
