"""Compare all schedules of a pipeline by memory and bubble, and mark those that anybody would choose."""

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
    """A schedule by its memory, in activation units or in the unit of the costs, and by its seconds."""

    schedule: Schedule
    peak: float
    makespan: float
    bubble_rate: float
    cap: float | None
    """Of the search; ``None`` for a family's schedule."""
    dominated: bool
    """Whether another one is no worse in both memory and time and better in one."""

    def __repr__(self) -> str:
        cap = "" if self.cap is None else f" under {self.cap:.4g}"
        return (
            f"<ParetoPoint {brief(self.schedule.name)}{cap}: peak {self.peak:.4g}, makespan {self.makespan:.6g}, bubble "
            f"{self.bubble_rate:.2%}{', dominated' if self.dominated else ''}>"
        )


@dataclass(frozen=True)
class Trade:
    """A little memory for much time: a schedule, and the next one worth its memory."""

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
    """Return at most so many memory caps, evenly spread, in activation units: between the least that two chunks per device
    need and 1F1B's. A V has ``2p`` stages, and a cap between two multiples of ``1 / 2p`` is no better than the lower.
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
    """Return every synchronous family that runs in one pipeline, with any number of chunks, and the search under every cap, by
    peak.

    Orders are fitted to ``costs``. ``priced`` gives what the actions of a found schedule take and hold, where that is more (a
    head). Caps that no schedule fits are left out. ``barriers`` gives schedules with that many barriers of vocabulary
    parallelism each, 0 those without. ``seconds`` are for each search.
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
            what = f"memory cap {cap:.4g}, search {number + 1} of {len(caps)}, at most {at_most:.0f} s for all"
            with suppress(PipememError), doing(what):
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
    """Return whether a point is dominated. Of equals, the first is no worse than the others."""
    peak, makespan = rows[index]
    for other, (other_peak, other_makespan) in enumerate(rows):
        no_worse = other_peak <= peak * (1 + _TOLERANCE) and other_makespan <= makespan * (1 + _TOLERANCE)
        better = other_peak < peak * (1 - _TOLERANCE) or other_makespan < makespan * (1 - _TOLERANCE)
        if no_worse and (better or other < index):
            return True
    return False


def trades(front: Sequence[ParetoPoint], least: float = 0.03) -> list[Trade]:
    """Return steps along the front (not dominated, by peak) that save at least ``least`` of the makespan for at most a quarter
    of the largest peak more.
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
    """Return ``(memory, bubble rate)``, ascending, that no order beats in a placement of ``found`` with as many barriers.

    What holds no more than that memory takes at least so much of its makespan beyond the work of the busiest device; of the
    least busy such one, where placements share the work in different ways. Memory has so many levels, evenly spread, besides
    the peaks of ``found``.
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
    """Return the seconds that any order of a choice's placement takes at least under a cap; infinitely many where none
    keeps it.
    """
    schedule = choice.schedule
    if not _is_plain(schedule):
        return _work(choice)
    try:
        return max(_work(choice), lower_bound(schedule.placement, schedule.num_microbatches, costs, cap))
    except UnsupportedError:
        return math.inf


def _is_plain(schedule: Schedule) -> bool:
    """Return whether ``lower_bound`` knows all that the order may do."""
    return schedule.slices == 1 and schedule.placement.replicas == 1 and not (schedule.recomputed or schedule.offloads)
