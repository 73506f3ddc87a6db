"""Improve given orders: run every pass as soon as possible, then justify (forward-backward improvement).

Justification comes from project scheduling: move every pass as late as possible, into idle gaps too, then every pass as
early as possible, and repeat. No move makes the step longer or takes more memory than the caps, so every order on the
way is a valid schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
    m, ticks, waits = problem.num_microbatches, problem.ticks, problem.waits
    ends = [-1] * (len(ticks) * m)
    reached = [0] * len(orders)
    free = [0] * len(orders)
    blocked: dict[int, list[int]] = {}
    runnable = list(range(len(orders)))
    while runnable:
        device = runnable.pop()
        order, now = orders[device], free[device]
        position = reached[device]
        while position < len(order):
            each = order[position]
            c, k = divmod(each, m)
            start = now
            for other, shift, lag in waits[c]:
                if k + shift < 0:
                    continue
                end = ends[other * m + k + shift]
                if end < 0:
                    blocked.setdefault(other * m + k + shift, []).append(device)
                    break
                if end + lag > start:
                    start = end + lag
            else:
                now = start + ticks[c]
                ends[each] = now
                position += 1
                if each in blocked:
                    runnable += blocked.pop(each)
                continue
            break
        reached[device], free[device] = position, now
    if any(position < len(order) for position, order in zip(reached, orders, strict=True)):
        return None
    return Timetable(orders, [end - ticks[each // m] for each, end in enumerate(ends)], max(free))


def justify(problem: Problem, table: Timetable, frozen: frozenset[int] | set[int] = frozenset()) -> Timetable:
    """All passes as late as possible, then all as early as possible.

    Args:
        problem: what the orders must satisfy.
        table: within the caps.
        frozen: passes that are moved within their place only, to look elsewhere than a plain justification does.
    """
    late = _earlier(problem.reversed, _mirror(problem, table), _mirrored(problem, frozen))
    return _earlier(problem, _mirror(problem.reversed, late), frozen)


def _mirrored(problem: Problem, passes) -> set[int]:
    m = problem.num_microbatches
    return {each + m - 1 - 2 * (each % m) for each in passes}


def _mirror(problem: Problem, table: Timetable) -> Timetable:
    """The timetable of the reversed problem."""
    m, ticks = problem.num_microbatches, problem.ticks
    starts = [0] * len(table.starts)
    for each, start in enumerate(table.starts):
        c, k = divmod(each, m)
        starts[c * m + m - 1 - k] = table.makespan - start - ticks[c]
    orders = [[each + m - 1 - 2 * (each % m) for each in reversed(order)] for order in table.orders]
    return Timetable(orders, starts, table.makespan)


def _earlier(problem: Problem, table: Timetable, frozen: Sequence[int] | set[int]) -> Timetable:
    """Every pass, by time, into the first gap that it fits, by its inputs, its length and the cap."""
    m, ticks, waits, change, caps = (
        problem.num_microbatches,
        problem.ticks,
        problem.waits,
        problem.change,
        problem.caps,
    )
    device_of = problem.device
    shortest = [min(ticks[c] for c in classes) for classes in problem.classes]
    ends = [0] * len(table.starts)
    count = len(table.orders)
    orders: Orders = [[] for _ in range(count)]
    levels: list[list[int]] = [[] for _ in range(count)]  # what the device holds after each pass placed so far
    gap_starts: list[list[int]] = [[] for _ in range(count)]
    gap_ends: list[list[int]] = [[] for _ in range(count)]
    gap_places: list[list[int]] = [[] for _ in range(count)]  # how many passes stand before the gap
    last_end = [0] * count
    starts = table.starts
    for each in sorted(range(len(starts)), key=starts.__getitem__):
        c, k = divmod(each, m)
        device = device_of[c]
        length, delta = ticks[c], change[c]
        ready = 0
        for other, shift, lag in waits[c]:
            if k + shift >= 0:
                end = ends[other * m + k + shift] + lag
                if end > ready:
                    ready = end
        order, level = orders[device], levels[device]
        tails = gap_ends[device]
        gap = bisect_left(tails, ready + length)
        if gap < len(tails) and each not in frozen:
            heads, places = gap_starts[device], gap_places[device]
            if delta > 0:
                # Whatever stands between the gap and here would be run with this much more held.
                allowed = caps[device] - delta
                place, least = len(level), places[gap]
                # The level before the gap counts too: it is what the pass itself adds to.
                while place and place >= least and level[place - 1] <= allowed:
                    place -= 1
                first = place + 1 if place or allowed < 0 else 0
            else:
                first = 0
            found = -1
            for index in range(gap, len(tails)):
                begin = heads[index]
                if ready > begin:
                    begin = ready
                if begin + length <= tails[index] and places[index] >= first:
                    found = index
                    break
            if found >= 0:
                place = places[found]
                order.insert(place, each)
                level.insert(place, level[place - 1] if place else 0)
                if delta:
                    for index in range(place, len(level)):
                        level[index] += delta
                end = begin + length
                ends[each] = end
                # The gap splits in two; slivers that nothing fits are forgotten.
                pieces = []
                if begin - heads[found] >= shortest[device]:
                    pieces.append((heads[found], begin, place))
                if tails[found] - end >= shortest[device]:
                    pieces.append((end, tails[found], place + 1))
                heads[found : found + 1] = [piece[0] for piece in pieces]
                tails[found : found + 1] = [piece[1] for piece in pieces]
                places[found : found + 1] = [piece[2] for piece in pieces]
                for index in range(found + len(pieces), len(places)):
                    places[index] += 1
                continue
        begin = last_end[device]
        if ready > begin:
            if ready - begin >= shortest[device]:
                gap_starts[device].append(begin)
                tails.append(ready)
                gap_places[device].append(len(order))
            begin = ready
        order.append(each)
        level.append((level[-1] if level else 0) + delta)
        ends[each] = last_end[device] = begin + length
    new_starts = [end - ticks[each // m] for each, end in enumerate(ends)]
    # Mirrored timetables may begin late when everything moved towards the end.
    first = min(new_starts)
    if first:
        new_starts = [start - first for start in new_starts]
    return Timetable(orders, new_starts, max(last_end) - first)
