"""Compare all schedules of a pipeline by memory and time, and mark those that another one dominates.

A schedule is dominated if another one is no worse in memory and time, and better in one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.features.vocabulary.orders import families_with_passes
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import doing, tell
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.search import MAX_CHUNKS
from megatron_pipemem.search.result import ResultCache

_TOLERANCE = 1e-9
LEAST_SAVED = 0.03
"""The least share of a step's time that more memory must save to be listed."""


Compared = tuple[Timeline, float | None]
"""A simulated schedule, and the memory cap of the search that found it; ``None`` for a family's schedule."""


def useful_caps(num_devices: int, most: int = 13) -> list[float]:
    """Return at most ``most`` memory caps, evenly spread, in activation units, for searches whose results are compared.

    They are between a quarter of 1F1B's peak (more for few devices) and 1F1B's peak. A V has ``2p`` stages, so all caps
    are multiples of ``1 / 2p``: a cap between two multiples would admit no more than the lower one.
    """
    counts = range(max(2, num_devices // 2), 2 * num_devices + 1)
    picked = {counts[round(i * (len(counts) - 1) / (most - 1))] for i in range(most)} if len(counts) > most else counts
    return [count / (2 * num_devices) for count in sorted(picked)]


def choices(
    num_devices: int,
    num_microbatches: int,
    costs: Costs | None = None,
    caps: Sequence[float] = (),
    seconds: float = 10.0,
    cache: ResultCache | None = None,
    barriers: Sequence[int] = (0,),
    priced: Callable[[Schedule], Costs] | None = None,
    max_chunks: int = MAX_CHUNKS,
) -> list[Compared]:
    """Return the schedules to compare, sorted by peak: those of families, and the search's result under every cap.

    Families are the synchronous ones with one replica that neither offload nor, by default, cut microbatches, with up
    to ``max_chunks`` chunks. Orders are fitted to ``costs``. ``priced`` returns the costs of a schedule for the
    comparison, if those differ (by the LM head, for example). ``caps`` are in the unit of the memory of ``costs``. Caps
    that no schedule keeps are left out. ``barriers`` lists numbers of vocabulary barriers, 0 for none. ``seconds`` is
    the limit of one search's processor time.
    """
    costs = costs or Costs()
    costs.require_alike("the table of all schedules")
    size, shape = (num_devices, num_microbatches), Shape(num_devices, None, num_microbatches)
    options = {"max_chunks": max_chunks, "seconds": seconds}
    candidates: list[tuple[Schedule, float | None]] = []
    searches, num_searches = itertools.count(1), len(barriers) * len(caps)
    for count in barriers:
        tell(lambda: f"families; {num_searches} searches in all")
        if count:
            family_schedules = families_with_passes(*size, costs, count, max_chunks)
        else:
            family_schedules = list(synchronous_schedules(*size, costs, max_chunks))
        candidates += ((schedule, None) for schedule in family_schedules)
        knowledge = Knowledge(costs, vocabulary_schedules=tuple(family_schedules) if count else None, cache=cache)
        for cap in caps:
            request = Request.for_search(MemoryCap(cap, costs.memory is not None), options, count)
            progress = f"memory cap {cap:.4g}, search {next(searches)} of {num_searches}"
            with suppress(PipememError), doing(progress):
                candidates.append((choose(request, shape, knowledge).schedule, cap))
    timelines = [simulate(schedule, priced(schedule) if priced else costs) for schedule, _ in candidates]
    compared = [(timeline, cap) for timeline, (_, cap) in zip(timelines, candidates, strict=True)]
    return sorted(compared, key=lambda choice: (choice[0].peak, choice[0].makespan))


def dominated(compared: Sequence[Compared]) -> list[bool]:
    """Return for every schedule whether another one is no worse in memory and time, and better in one of them."""
    rows = [(timeline.peak, timeline.makespan) for timeline, _ in compared]
    return [_is_dominated(index, rows) for index in range(len(rows))]


def _is_dominated(index: int, rows: Sequence[tuple[float, float]]) -> bool:
    """Return whether another row dominates the row at ``index``. Of equal rows all but the first are dominated.

    A row is ``(peak, makespan)``, and lower is better in both.
    """
    peak, makespan = rows[index]
    for other, (other_peak, other_makespan) in enumerate(rows):
        no_worse = other_peak <= peak * (1 + _TOLERANCE) and other_makespan <= makespan * (1 + _TOLERANCE)
        better = other_peak < peak * (1 - _TOLERANCE) or other_makespan < makespan * (1 - _TOLERANCE)
        if no_worse and (better or other < index):
            return True
    return False


def trades(compared: Sequence[Compared], least: float = LEAST_SAVED) -> list[tuple[Timeline, Timeline]]:
    """Return pairs of schedules, of which the second saves much time for a little more memory than the first.

    Both are neighbours among those that are not dominated. The second one's makespan is shorter by at least the share
    ``least``. Its peak is higher by at most a quarter of the largest peak.
    """
    front = [timeline for (timeline, _), is_out in zip(compared, dominated(compared), strict=True) if not is_out]
    largest = max((timeline.peak for timeline in front), default=0.0)
    return [
        (less, more)
        for less, more in zip(front, front[1:], strict=False)
        if more.peak - less.peak <= largest / 4 * (1 + _TOLERANCE)
        and less.makespan - more.makespan >= least * less.makespan
    ]


def bound_line(
    points: Sequence[Timeline],
    costs: Costs | None = None,
    priced: Callable[[Schedule], Costs] | None = None,
    levels: int = 64,
) -> list[tuple[float, float]]:
    """Return pairs ``(memory, bubble rate)`` by memory: no order within that memory has a lower bubble rate.

    That holds for all orders with a placement and a number of barriers that ``points`` have. The bubble rate is
    1 - (work of the busiest device / least time within that memory). If that work differs between placements, the least
    counts. The memory values are ``levels`` evenly spread ones, and the peaks of ``points``.
    """
    costs = costs or Costs()
    peaks = {choice.peak for choice in points}
    least, most = min(peaks), max(peaks)
    peaks |= {least + (most - least) * level / levels for level in range(levels)}
    kinds = {
        (point.schedule.placement, point.schedule.vocabulary_barriers, _is_plain(point.schedule)): point
        for point in points
    }
    prices = {kind: priced(point.schedule) if priced else costs for kind, point in kinds.items()}
    work = min(busy_seconds(choice) for choice in points)
    line = []
    for peak in sorted(peaks):
        least = min(_least_seconds(point, prices[kind], peak) for kind, point in kinds.items())
        line.append((peak, 1 - work / least if least else 0.0))
    return line


def busy_seconds(choice: Timeline) -> float:
    """Return the seconds that the busiest device computes, which do not depend on the order."""
    return choice.makespan * (1 - choice.bubble_rate)


def _least_seconds(choice: Timeline, costs: Costs, cap: float) -> float:
    """Return seconds that no order with a point's placement can beat under ``cap``; infinity if no order keeps it.

    ``choice`` is the point. ``cap`` is in the unit of the memory of ``costs``.
    """
    schedule = choice.schedule
    if not _is_plain(schedule):
        return busy_seconds(choice)
    try:
        return max(busy_seconds(choice), lower_bound(schedule.placement, schedule.num_microbatches, costs, cap))
    except UnsupportedError:
        return math.inf


def _is_plain(schedule: Schedule) -> bool:
    """Return whether ``lower_bound`` holds for a schedule: no slices, replicas, recomputation or offload."""
    return (
        schedule.units.are_whole and schedule.placement.replicas == 1 and not (schedule.recomputed or schedule.offloads)
    )
