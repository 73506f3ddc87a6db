"""Simulate a step in given orders or greedily by urgency, and improve orders by justification.

Justification (forward-backward improvement) is a method of project scheduling. It moves every pass as late as
possible, also into idle gaps, and then every pass as early as possible. No move makes the step longer or exceeds the
caps, so the result is a valid schedule, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_pipemem.schedule.dependencies import Graph, Times
from megatron_pipemem.search.problem import FORWARD, Orders, PassTable, Problem


@dataclass(frozen=True)
class Timetable:
    """The orders of all devices, and the start of every pass, in ticks."""

    orders: Orders  # per device, its passes in order
    starts: list[int]  # the tick in which every pass starts
    makespan: int  # ticks from the first start, which is 0, to the last end


def as_soon_as_possible(problem: Problem, orders: Orders) -> Timetable | None:
    """Return the timetable of these orders in which every pass starts as early as possible; ``None`` for a deadlock."""
    passes = problem.passes
    graph = Graph(orders, passes.waits, passes.price, passes.device)
    nodes = graph.walk().nodes
    if len(nodes) < len(passes.waits):
        return None
    times = Times(graph, problem.ticks, passes.lags, zero=0)
    times.run(graph.steps(nodes))
    return Timetable(orders, times.starts, max(times.free))


def timetable(problem: Problem, orders: Orders) -> Timetable:
    """Return ``as_soon_as_possible`` of orders that are known to have no deadlock."""
    table = as_soon_as_possible(problem, orders)
    assert table is not None, "the orders wait for one another"
    return table


def dispatch(problem: Problem, urgency: Sequence[float]) -> Timetable | None:
    """Return a greedy timetable: a free device runs the ready pass with the least ``urgency`` that its cap admits.

    ``urgency`` has one number per pass, and a smaller number is more urgent. The result is ``None`` if the caps block
    all devices before the end.
    """
    units, ticks, change, caps, reserve = (
        len(problem.units),
        problem.ticks,
        problem.change,
        problem.caps,
        problem.reserve,
    )
    classes_of, passes = problem.classes, problem.reversed
    device_of, price_of, followers, lags = passes.device, passes.price, passes.waits, passes.lags
    left, in_parts = len(followers), not problem.units.are_whole
    ready, starts = [0] * left, [-1] * left
    missing = [len(waits) for waits in problem.waits for _ in range(units)]
    upcoming = list(range(0, left, units))
    levels = [0] * problem.num_devices
    busy = [0] * problem.num_devices
    orders: Orders = [[] for _ in range(problem.num_devices)]
    events = [(0, d) for d in range(problem.num_devices)]
    while events:
        now, d = heappop(events)
        if busy[d] > now:
            continue
        level = levels[d]
        best = -1
        best_urgency = float("inf")
        for c in classes_of[d]:
            pass_ = upcoming[c]
            if pass_ == (c + 1) * units or missing[pass_]:
                continue
            price = price_of[pass_]
            delta = change[price]
            if delta > 0:
                is_forward_of_part = in_parts and c % 3 == FORWARD
                needed = problem.owed(c, upcoming) if is_forward_of_part else delta + reserve[price]
                if level + needed > caps[d]:
                    continue
            value = urgency[pass_]
            if ready[pass_] <= now and value < best_urgency:
                best, best_urgency = pass_, value
        if best < 0:
            continue
        upcoming[best // units] = best + 1
        price = price_of[best]
        end = now + ticks[price]
        starts[best] = now
        orders[d].append(best)
        levels[d] = level + change[price]
        busy[d] = end
        left -= 1
        heappush(events, (end, d))
        for pass_, link in followers[best]:
            at = end + lags[link]
            if at > ready[pass_]:
                ready[pass_] = at
            missing[pass_] -= 1
            other = device_of[pass_]
            if other != d:
                heappush(events, (at, other))
    if left:
        return None
    return Timetable(orders, starts, max(busy))


def justify(problem: Problem, table: Timetable, frozen: Collection[int] = frozenset()) -> Timetable:
    """Justify a timetable: move all passes as late as possible, and then all as early as possible.

    ``frozen`` passes do not move into idle gaps. Another choice of these passes gives another result.
    """
    late = earlier(problem.reversed, _mirrored(problem, table), frozen)
    return earlier(problem.passes, _mirrored(problem, late), frozen)


def _mirrored(problem: Problem, table: Timetable) -> list[int]:
    """Return the starts that the passes of a timetable have if time runs backwards."""
    ticks, end = problem.ticks, table.makespan
    return [end - start - ticks[price] for start, price in zip(table.starts, problem.passes.price, strict=True)]


class Row:
    """The passes of a device that have been placed, and the idle gaps in which its shortest pass fits."""

    def __init__(self, cap: int, shortest: int) -> None:
        self._cap, self._shortest = cap, shortest
        self.order: list[int] = []
        self.end = 0
        self._levels: list[int] = []  # the memory after each pass placed so far
        self._gap_starts: list[int] = []
        self._gap_ends: list[int] = []
        self._gap_places: list[int] = []  # the number of passes before the gap

    def into_gap(self, pass_: int, ready: int, length: int, change: int) -> int:
        """Place a pass into the first gap that it fits into, and return its end; -1 if there is no such gap.

        The passes after the gap must keep the device's cap, too.
        """
        levels, heads, tails, places = self._levels, self._gap_starts, self._gap_ends, self._gap_places
        earliest = bisect_left(tails, ready + length)
        if earliest == len(tails):
            return -1
        first = 0
        if change > 0:
            # All passes between the gap and the end of the row would run with this much more memory.
            allowed = self._cap - change
            place, least = len(levels), places[earliest]
            # The level before the gap counts too, because the pass adds to it.
            while place and place >= least and levels[place - 1] <= allowed:
                place -= 1
            first = place + 1 if place or allowed < 0 else 0
        for gap in range(earliest, len(tails)):
            begin = heads[gap]
            if ready > begin:
                begin = ready
            if begin + length <= tails[gap] and places[gap] >= first:
                break
        else:
            return -1
        place = places[gap]
        self.order.insert(place, pass_)
        levels.insert(place, levels[place - 1] if place else 0)
        if change:
            for index in range(place, len(levels)):
                levels[index] += change
        end = begin + length
        # The gap splits in two. Pieces too short for any pass are dropped.
        pieces = []
        if begin - heads[gap] >= self._shortest:
            pieces.append((heads[gap], begin, place))
        if tails[gap] - end >= self._shortest:
            pieces.append((end, tails[gap], place + 1))
        heads[gap : gap + 1] = [piece[0] for piece in pieces]
        tails[gap : gap + 1] = [piece[1] for piece in pieces]
        places[gap : gap + 1] = [piece[2] for piece in pieces]
        for index in range(gap + len(pieces), len(places)):
            places[index] += 1
        return end

    def append(self, pass_: int, ready: int, length: int, change: int) -> int:
        """Place a pass after all others of the device, at ``ready`` or later, and return its end."""
        begin = self.end
        if ready > begin:
            if ready - begin >= self._shortest:
                self._gap_starts.append(begin)
                self._gap_ends.append(ready)
                self._gap_places.append(len(self.order))
            begin = ready
        self.order.append(pass_)
        self._levels.append((self._levels[-1] if self._levels else 0) + change)
        self.end = begin + length
        return self.end


def earlier(passes: PassTable, starts: Sequence[int], frozen: Collection[int]) -> Timetable:
    """Return a new timetable, in which all passes are placed in the order of ``starts``.

    A pass goes into the first gap that it fits into. If there is none, or the pass is in ``frozen``, it goes after the
    other passes of its device. ``starts`` has one tick per pass.
    """
    device_of, price_of, before, waits, ticks, change, lags, caps, shortest = passes
    rows = [Row(cap, least) for cap, least in zip(caps, shortest, strict=True)]
    ends = [0] * (len(starts) + 1)  # the last entry stands for the pass before the first of a class
    for pass_ in sorted(range(len(starts)), key=starts.__getitem__):
        ready, price = ends[before[pass_]], price_of[pass_]
        for other, link in waits[pass_]:
            end = ends[other] + lags[link]
            if end > ready:
                ready = end
        row = rows[device_of[pass_]]
        end = -1 if pass_ in frozen else row.into_gap(pass_, ready, ticks[price], change[price])
        ends[pass_] = end if end >= 0 else row.append(pass_, ready, ticks[price], change[price])
    new_starts = [end - ticks[price] for end, price in zip(ends, price_of, strict=False)]
    # Mirrored timetables may begin late when everything moved towards the end.
    first = min(new_starts)
    if first:
        new_starts = [start - first for start in new_starts]
    return Timetable([row.order for row in rows], new_starts, max(row.end for row in rows) - first)
