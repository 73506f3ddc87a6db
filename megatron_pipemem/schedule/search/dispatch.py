"""Schedule by list: whenever a device is free, run the most urgent pass that is ready and that its cap admits."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from megatron_pipemem.schedule.search.improve import Timetable
from megatron_pipemem.schedule.search.problem import Orders, Problem


def dispatch(problem: Problem, urgency: Sequence[float], patience: float = 0.0) -> Timetable | None:
    """Run the step by urgency.

    Args:
        problem: the passes and the caps.
        urgency: per pass, smaller runs earlier.
        patience: how many ticks a device waits for a more urgent pass that is on its way.

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
        best_urgency = coming_urgency = float("inf")
        coming = 0
        for c in classes_of[d]:
            k = upcoming[c]
            if k == m or missing[c][k]:
                continue
            delta = change[c]
            if delta > 0 and level + delta + reserve[c] > caps[d]:
                continue
            value = urgency[c * m + k]
            at = ready[c][k]
            if at <= now:
                if value < best_urgency:
                    best, best_urgency = c, value
            elif at - now <= patience and value < coming_urgency:
                coming, coming_urgency = at, value
        if coming_urgency < best_urgency:
            heappush(events, (coming, d))
            continue
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
