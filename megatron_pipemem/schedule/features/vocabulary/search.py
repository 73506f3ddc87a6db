"""The search for a memory cap that the schedule keeps with its vocabulary passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.core.bounds import lower_bound
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import loosened, per_device
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import simulate
from megatron_pipemem.schedule.families.serial_orders import serial_schedule
from megatron_pipemem.schedule.features.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.search import MAX_CHUNKS, Candidate, SearchResult, search_schedule
from megatron_pipemem.schedule.search.cache import ResultCache
from megatron_pipemem.schedule.search.problem import better_full

_SEARCHES = 4


def search_vocabulary(
    *,
    barriers: int,
    num_devices: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    placements: Sequence[Placement] | None = None,
    max_chunks: int = MAX_CHUNKS,
    seconds: float = 20.0,
    effort: float = 1.0,
    seed: int = 0,
    cache: ResultCache | None = None,
    known: Sequence[Schedule] | None = None,
) -> SearchResult:
    """The fastest schedule with vocabulary passes under a memory cap.

    Every family with its passes that keeps the cap comes first, whatever the time. The passes keep microbatches in flight for
    longer, so a search under the cap itself may find what breaks the cap with them. Then the next one gets as much less as
    was too much; the last resort runs one microbatch after another.

    Args:
        barriers: 1 or 2.
        seconds: of all searches together.
        known: schedules with their passes to compare with; default those of all families.
        num_devices: and all others: of ``search_schedule``.

    Raises:
        UnsupportedError: no schedule of any of the placements keeps the cap.
        CostsError: the costs do not fit a placement.
    """
    started = time.perf_counter()
    costs = costs or Costs()
    caps = allowed = None if memory_cap is None else per_device(memory_cap, num_devices)
    best: dict[Placement, Candidate] = {}

    def consider(candidate: Candidate) -> bool:
        """Whether it keeps the cap."""
        keeps, placement = allowed is None or _keeps(candidate, allowed), candidate.schedule.placement
        if keeps:
            best[placement] = min(best.get(placement, candidate), candidate, key=lambda c: c.makespan)
        return keeps

    if known is None:
        chunks = None if placements is None else max(placement.num_chunks for placement in placements)
        known = families_with_passes(num_devices, num_microbatches, costs, barriers, chunks)
    for schedule in known:
        placement = schedule.placement
        if placement.num_chunks <= max_chunks if placements is None else placement in placements:
            consider(_candidate(schedule, costs, schedule.name))
    for attempt in range(_SEARCHES):
        try:
            result = search_schedule(
                num_devices=num_devices,
                num_microbatches=num_microbatches,
                costs=costs,
                memory_cap=caps,
                placements=placements,
                max_chunks=max_chunks,
                seconds=seconds / (1 if allowed is None else _SEARCHES),
                effort=effort,
                seed=seed,
                cache=cache,
            )
        except UnsupportedError:
            if attempt == 0:
                raise
            break
        passed = [_with_passes(found, barriers, costs) for found in result.candidates]
        over = [candidate.peaks for candidate in passed if not consider(candidate)]
        if not over:
            break
        caps = tuple(cap - max(0.0, max(held) - most) for cap, most, *held in zip(caps, allowed, *over, strict=True))
        if min(caps) <= 0:
            break
    if not best:
        best = _serial(result, barriers, costs, allowed)
    candidates = sorted(best.values(), key=lambda c: (c.makespan, -c.lower_bound))
    bound = min(candidate.lower_bound for candidate in candidates)
    return SearchResult(tuple(candidates), bound, time.perf_counter() - started)


def families_with_passes(
    num_devices: int, num_microbatches: int, costs: Costs, barriers: int, max_chunks: int | None = None
) -> list[Schedule]:
    """The schedules of all synchronous families that the costs are for, with their passes; see ``synchronous_schedules``."""
    found = []
    for schedule in synchronous_schedules(num_devices, num_microbatches, costs, max_chunks):
        with suppress(CostsError):
            found.append(with_vocabulary(schedule, barriers, costs))
    return found


def _with_passes(found: Candidate, barriers: int, costs: Costs) -> Candidate:
    return _candidate(with_vocabulary(found.schedule, barriers, costs), costs, found.found_by)


def _candidate(schedule: Schedule, costs: Costs, found_by: str) -> Candidate:
    timeline = simulate(schedule, costs)
    bound = max(lower_bound(schedule.placement, schedule.num_microbatches, costs), timeline.ideal)
    return Candidate(schedule, timeline.makespan, timeline.peaks, bound, found_by)


def _keeps(candidate: Candidate, caps: Sequence[float]) -> bool:
    return all(peak <= loosened(cap) for peak, cap in zip(candidate.peaks, caps, strict=True))


def _serial(result: SearchResult, barriers: int, costs: Costs, allowed: Sequence[float]) -> dict[Placement, Candidate]:
    """One microbatch at a time, in the placements where that keeps the cap."""
    fitting, least = {}, []
    for found in result.candidates:
        placement, m = found.schedule.placement, found.schedule.num_microbatches
        serial = serial_schedule(placement, m, found.schedule.name, better_full(placement, costs))
        candidate = _candidate(with_vocabulary(serial, barriers, costs), costs, "one by one")
        least.append(max(candidate.peaks))
        if _keeps(candidate, allowed):
            fitting[placement] = candidate
    if not fitting:
        raise UnsupportedError(
            f"no schedule with vocabulary passes keeps the memory cap of {max(allowed):.6g}: one microbatch after the "
            f"other holds {min(least):.6g} with them; raise the cap, or switch vocabulary parallelism off"
        )
    return fitting
