"""The comparison of all schedules of a pipeline by memory and bubble, with a mark on those that others dominate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.features.vocabulary.orders import families_with_passes
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import brief, doing, tell
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.search import MAX_CHUNKS
from megatron_pipemem.search.result import ResultCache

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ParetoPoint:
    """A schedule with its memory, in activation units or in the unit of the costs, and its seconds."""

    schedule: Schedule
    peak: float
    makespan: float
    bubble_rate: float
    cap: float | None
    """Cap of the search; ``None`` for a family's schedule."""
    dominated: bool
    """Whether another point is no worse in memory and time, and better in one of them."""

    def __repr__(self) -> str:
        cap = "" if self.cap is None else f" under {self.cap:.4g}"
        return (
            f"<ParetoPoint {brief(self.schedule.name)}{cap}: peak {self.peak:.4g}, makespan {self.makespan:.6g}, bubble "
            f"{self.bubble_rate:.2%}{', dominated' if self.dominated else ''}>"
        )


@dataclass(frozen=True)
class Trade:
    """A little memory for much time: a schedule, and the next one that is worth its memory."""

    less: ParetoPoint
    more: ParetoPoint

    def __repr__(self) -> str:
        return f"<Trade: {self}>"

    def __str__(self) -> str:
        work = min(_work(self.less), _work(self.more))
        before, after = (1 - work / choice.makespan for choice in (self.less, self.more))
        return (
            f"a peak of {self.more.peak:.4g} instead of {self.less.peak:.4g} saves {100 * (before - after):.1f} points of "
            f"bubble ({before:.1%} -> {after:.1%})"
        )


def useful_caps(num_devices: int, most: int = 13) -> list[float]:
    """Return at most so many memory caps, evenly spread, in activation units.

    They lie between the least that two chunks per device need and 1F1B's peak. A V has ``2p`` stages, so a cap
    between two multiples of ``1 / 2p`` is no better than the lower one.
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
) -> list[ParetoPoint]:
    """Return all synchronous one-pipeline families with any number of chunks, and the search under every cap, by peak.

    Orders are fitted to ``costs``. ``priced`` returns the costs of a found schedule if they are higher (a head). Caps
    that no schedule fits are left out. ``barriers`` lists numbers of vocabulary barriers, 0 for none. ``seconds`` are
    per search.
    """
    costs = costs or Costs()
    costs.require_alike("the table of all schedules")
    size, shape = (num_devices, num_microbatches), Shape(num_devices, None, num_microbatches)
    options = {"max_chunks": max_chunks, "seconds": seconds}
    found: list[tuple[Schedule, float | None]] = []
    for count in barriers:
        tell(lambda: f"families; {len(caps)} searches to come")
        if count:
            known = families_with_passes(*size, costs, count, max_chunks)
        else:
            known = list(synchronous_schedules(*size, costs, max_chunks))
        found += ((schedule, None) for schedule in known)
        knowledge = Knowledge(costs, with_passes=tuple(known) if count else None, cache=cache)
        for number, cap in enumerate(caps):
            at_most = (len(caps) - number) * seconds
            request = Request.for_search(MemoryCap(cap, costs.memory is not None), options, count)
            progress = f"memory cap {cap:.4g}, search {number + 1} of {len(caps)}, at most {at_most:.0f} s for all"
            with suppress(PipememError), doing(progress):
                found.append((choose(request, shape, knowledge).schedule, cap))
    timelines = [simulate(schedule, priced(schedule) if priced else costs) for schedule, _ in found]
    rows = [(t.peak, t.makespan) for t in timelines]
    return sorted(
        (
            ParetoPoint(schedule, t.peak, t.makespan, t.bubble_rate, cap, _dominated(index, rows))
            for index, ((schedule, cap), t) in enumerate(zip(found, timelines, strict=True))
        ),
        key=lambda choice: (choice.peak, choice.makespan),
    )


def _dominated(index: int, rows: Sequence[tuple[float, float]]) -> bool:
    """Return whether a point is dominated. Of equal points, all but the first are."""
    peak, makespan = rows[index]
    for other, (other_peak, other_makespan) in enumerate(rows):
        no_worse = other_peak <= peak * (1 + _TOLERANCE) and other_makespan <= makespan * (1 + _TOLERANCE)
        better = other_peak < peak * (1 - _TOLERANCE) or other_makespan < makespan * (1 - _TOLERANCE)
        if no_worse and (better or other < index):
            return True
    return False


def trades(front: Sequence[ParetoPoint], least: float = 0.03) -> list[Trade]:
    """Return steps along the front that save at least ``least`` of the makespan for at most a quarter of the largest peak.

    The front has the points that are not dominated, by peak.
    """
    largest = max((choice.peak for choice in front), default=0.0)
    return [
        Trade(less, more)
        for less, more in zip(front, front[1:], strict=False)
        if more.peak - less.peak <= largest / 4 * (1 + _TOLERANCE)
        and less.makespan - more.makespan >= least * less.makespan
    ]


def bound_line(
    found: Sequence[ParetoPoint],
    costs: Costs | None = None,
    priced: Callable[[Schedule], Costs] | None = None,
    levels: int = 64,
) -> list[tuple[float, float]]:
    """Return ``(memory, bubble rate)``, ascending: lower bounds for all orders with a placement of ``found`` and as many
    barriers.

    The bubble rate compares the least time within that memory with the work of the busiest device. Placements may
    share the work in different ways; then the smallest such work counts. Memory has evenly spread levels and the
    peaks of ``found``.
    """
    costs = costs or Costs()
    peaks = {choice.peak for choice in found}
    least, most = min(peaks), max(peaks)
    peaks |= {least + (most - least) * level / levels for level in range(levels)}
    kinds = {
        (each.schedule.placement, each.schedule.vocabulary_barriers, _is_plain(each.schedule)): each for each in found
    }
    prices = {kind: priced(each.schedule) if priced else costs for kind, each in kinds.items()}
    work = min(_work(choice) for choice in found)
    line = []
    for peak in sorted(peaks):
        least = min(_least_seconds(each, prices[kind], peak) for kind, each in kinds.items())
        line.append((peak, 1 - work / least if least else 0.0))
    return line


def _work(choice: ParetoPoint) -> float:
    """Return the seconds of the busiest device, which do not depend on the order."""
    return choice.makespan * (1 - choice.bubble_rate)


def _least_seconds(choice: ParetoPoint, costs: Costs, cap: float) -> float:
    """Return the least seconds of any order with a point's placement under a cap; infinity if none keeps it."""
    schedule = choice.schedule
    if not _is_plain(schedule):
        return _work(choice)
    try:
        return max(_work(choice), lower_bound(schedule.placement, schedule.num_microbatches, costs, cap))
    except UnsupportedError:
        return math.inf


def _is_plain(schedule: Schedule) -> bool:
    """Return whether ``lower_bound`` covers everything in the order."""
    return schedule.slices == 1 and schedule.placement.replicas == 1 and not (schedule.recomputed or schedule.offloads)
