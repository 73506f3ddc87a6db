"""Turn what a user asks into the schedule that runs: the one place that searches for orders and tightens memory caps.

A run asks here on its rank 0, again whenever it has measured more; the command line and the planner ask the same way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

from megatron_pipemem.choose.knowledge import UNIT, Knowledge, Shape
from megatron_pipemem.choose.model_cut import searched
from megatron_pipemem.choose.one_by_one import COUNTING, ONE_BY_ONE, counting, last_resort
from megatron_pipemem.choose.within_cap import Plans, attempts, known_orders, prompt_orders, tightened
from megatron_pipemem.conflicts import check_conflicts
from megatron_pipemem.errors import PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.features.offload.transfers import OffloadPlan
from megatron_pipemem.features.recompute.orders import in_words
from megatron_pipemem.features.vocabulary.orders import families_with_passes, with_barriers
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import doing
from megatron_pipemem.schedule.options import OFF, SEARCH_SECONDS
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, family, synchronous_schedules
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.schedule_file import check_devices_of_file, check_microbatches_of_file
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.schedule.vocabulary import BARRIERS
from megatron_pipemem.search import Candidate, SearchResult, search_schedule
from megatron_pipemem.search.result import fastest_first

logger = logging.getLogger(__name__)

# Times the cap, what orders may hold that are searched for: what exceeds the cap is to leave the device.
_HIGHER = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class ChosenSchedule:
    """A schedule, and what was expected of it when it was chosen.

    Args:
        schedule: what to run.
        costs: what it was chosen for; seconds unless they are unit costs. Where it was searched for, their memory is what
            the cap is about: none for activation units.
        priced_by: ``unit``, ``file`` or ``measured``.
        reason: why it was chosen now.
        lower_bound: no schedule of this placement within the cap is faster; ``None`` where nobody searched.
        search_seconds: how long the search took.
        notes: what else there is to say about it.
        search: the best of all placements, where orders were searched for.
        offload: what leaves the device or is computed again, and why not more, where that was planned.
        arrival_makespan: of the microbatches of one step in arrival order, by the schedule that all steps begin with, where the
            step has a plan of its own.
    """

    schedule: Schedule
    costs: Costs
    priced_by: str = UNIT
    reason: str = ""
    lower_bound: float | None = None
    search_seconds: float | None = None
    notes: str = ""
    search: SearchResult | None = None
    offload: OffloadPlan | None = None
    arrival_makespan: float | None = None

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)

    @property
    def alone(self) -> ChosenSchedule:
        """Return the schedule without what else was found: what ranks tell each other."""
        return replace(self, search=None, offload=None)


def resolve(request: Request, shape: Shape, knowledge: Knowledge) -> ChosenSchedule:
    """Return the schedule for a request: proved, and within its memory cap as far as bytes are known.

    Args:
        request: what is asked for.
        shape: of the step.
        knowledge: prices, and what a run has measured. Where it lacks bytes that it will count, the schedule is the one for
            counting them: one microbatch after another, which holds least.

    Raises:
        UnsupportedError: there is no such schedule, or none keeps the cap; the message names the least that would do.
        ScheduleError: a family has built what must not run.
        CostsError: the costs do not fit the schedule's placement.
    """
    check_conflicts(request)
    if max(request.slice_counts) > 1 and request.in_bytes and (knowledge.measures or knowledge.changes is not None):
        raise UnsupportedError(
            "unit-mismatch",
            "a run counts the bytes of whole microbatches, not of slices; give the memory cap in activation units, or drop the "
            "option slices",
        )
    if knowledge.lacks_bytes(request):
        schedule = counting(request, shape.num_microbatches, knowledge)
        chosen = ChosenSchedule(schedule, knowledge.costs, reason=COUNTING)
    elif request.chooses_offload:
        chosen = _with_searched_offload(request, shape, knowledge)
    elif request.plans_offload:
        chosen = _with_planned_offload(request, shape, knowledge)
    elif request.searches:
        chosen = _searched(request, shape, knowledge)
    else:
        chosen = _built(request, shape, knowledge)
    return replace(chosen, priced_by=knowledge.priced_by)


def family_schedule(request: Request, shape: Shape, knowledge: Knowledge) -> Schedule:
    """Build a family's schedule for a model with as many chunks per rank as ``shape`` says, without anything added.

    Args:
        request: what the user asks.
        shape: size and cut of the model.
        knowledge: what is known of it.

    Raises:
        UnsupportedError: the family cannot be built so, or not within the cap.
    """
    options, accepted = dict(request.options), family(request.schedule).options
    # Megatron's default, and ours, which copes better with an odd last group.
    group_size = None if shape.group_size == shape.num_devices else shape.group_size
    # Only where the user left them to us: Megatron's own flags then say how the model is cut.
    for option, value in (("chunks", shape.chunks), ("group_size", group_size)):
        if option in accepted and value is not None:
            options.setdefault(option, value)
    return build_schedule(
        request.schedule,
        num_devices=shape.num_devices,
        num_microbatches=shape.num_microbatches,
        memory_cap=request.cap_in_units,
        costs=knowledge.costs,
        **options,
    )


def vocabulary_ways(
    request: Request, resolved: Callable[[Request], ChosenSchedule], refused: Callable[[int, PipememError], None]
) -> dict[int, ChosenSchedule]:
    """Return what becomes of a request without vocabulary passes, and with those of either algorithm where that is possible.

    Args:
        request: whatever number of barriers it says.
        resolved: resolves it for a number of barriers.
        refused: is told of a number of barriers that cannot be, and why.

    Returns:
        By number of barriers, 0 without passes.

    Raises:
        PipememError: there is no schedule without passes.
    """
    ways = {0: resolved(request.decided(0))}
    for barriers in BARRIERS:
        try:
            ways[barriers] = resolved(request.decided(barriers))
        except (ScheduleError, UnsupportedError) as error:
            refused(barriers, error)
    return ways


def without_offload(request: Request) -> Request:
    """Return the request for what offload and recomputation are added to: they keep its cap."""
    if not request.plans_offload:
        return request
    return replace(request, memory_cap=None, offload=OFF, recompute="none")


def _built(request: Request, shape: Shape, knowledge: Knowledge) -> ChosenSchedule:
    if request.file is not None:
        check_devices_of_file(request.file, shape.num_devices)
        check_microbatches_of_file(request.file, shape.num_microbatches)
    alone = request.file or family_schedule(request, shape, knowledge)
    schedule = with_barriers(alone, request.barriers, knowledge.costs)
    if schedule is not request.file:  # which was proved when it was read
        counted = knowledge.counted_costs(schedule.placement, request.in_bytes)
        cap = None if request.memory_cap is None else request.memory_cap.amount
        validate(schedule, counted, cap, microbatch_order=request.file is None)
    return ChosenSchedule(schedule, knowledge.costs)


def _searched(request: Request, shape: Shape, knowledge: Knowledge) -> ChosenSchedule:
    """Return the fastest schedule of any order that keeps the cap, with its vocabulary passes and messages.

    Both come on top of what a search counts, so what it finds may exceed the cap with them. Every family with its passes is
    considered first, whatever the time.
    """
    devices, microbatches, options = shape.num_devices, shape.num_microbatches, request.options
    placements = searched(request, shape, knowledge)
    costs = knowledge.counted_costs(placements[0], request.in_bytes)
    caps = request.caps(devices)
    tries = attempts(request, knowledge)
    search = _search(request, shape, knowledge, costs, placements, effort=1.0)
    best: dict[tuple[Placement, int], Candidate] = {}
    results: list[SearchResult] = []

    def consider(found: Candidate) -> Sequence[float]:
        """Keep it, if nothing is faster within the cap; by how much it exceeds that."""
        schedule = with_barriers(found.schedule, request.barriers, costs)
        if not request.searches_period and (request.barriers or tries > 1):
            found = _candidate(schedule, costs, caps if not request.barriers else None, found.found_by)
        over = knowledge.excess(request, schedule, costs)
        if not any(over):
            which = schedule.placement, schedule.slices
            best[which] = min(best.get(which, found), found, key=lambda each: each.makespan)
        return over

    def find(caps: Sequence[float] | None) -> tuple[SearchResult, Sequence[float]]:
        seconds = options.get("seconds", SEARCH_SECONDS) / tries
        results.append(result := search(memory_cap=caps, seconds=seconds))
        return result, [max(each) for each in zip(*map(consider, result.candidates), strict=True)]

    if request.barriers:
        known: Sequence[Schedule] | None = knowledge.with_passes
        if known is None:
            chunks = max(placement.num_chunks for placement in placements)
            known = families_with_passes(devices, microbatches, costs, request.barriers, chunks)
        for schedule in known:
            if schedule.placement in placements:
                consider(_candidate(schedule, costs, None, schedule.name))
    why = "what was found exceeds it"
    try:
        tightened(caps, find, tries)
    except UnsupportedError as error:
        if request.memory_cap is None or max(request.slice_counts) > 1:
            raise
        why = str(error)
    notes = ""
    if not best:
        notes = ONE_BY_ONE
        for one_by_one in last_resort(request, placements, microbatches, knowledge, costs):
            best[one_by_one.placement, 1] = _candidate(one_by_one, costs, None, "one by one")
        logger.warning("memory cap of %s: %s (%s)", request.memory_cap, ONE_BY_ONE, why)
    candidates = fastest_first(best.values())
    bound = min(each.lower_bound for each in candidates)
    if results and not request.barriers:
        bound = min(bound, results[0].lower_bound)
    seconds = sum(each.seconds for each in results)
    result = SearchResult(candidates, bound, seconds, costs)
    schedule = result.schedule
    return ChosenSchedule(
        schedule, costs, lower_bound=result.best.lower_bound, search_seconds=seconds, notes=notes, search=result
    )


def _with_planned_offload(request: Request, shape: Shape, knowledge: Knowledge) -> ChosenSchedule:
    """Build another request's schedule without the cap, with what is recomputed and the round trips of its activations
    within it.
    """
    base = resolve(without_offload(request), shape, knowledge).schedule
    costs = knowledge.offload_costs(request, base.placement)
    plans = Plans(request, knowledge, costs)
    plans.add(base.name, base)
    best, _ = plans.fastest()
    validate(best.schedule, costs, host_budget=knowledge.host_budget, microbatch_order=request.file is None)
    return ChosenSchedule(best.schedule, costs, notes=in_words(best), offload=best)


def _with_searched_offload(request: Request, shape: Shape, knowledge: Knowledge) -> ChosenSchedule:
    """Return the fastest plan of any order that keeps the cap.

    Orders are those of all families and uniform repeating. All that could win are planned for, whatever the time, unless fewer
    seconds than the default are given: then the fastest of them are, as long as there is time. Then, as long as there is time,
    families over a V with fewer W waiting, and those of searches under higher caps.
    """
    started, p, m = time.perf_counter(), shape.num_devices, shape.num_microbatches
    placements = searched(request, shape, knowledge)
    costs = knowledge.offload_costs(request, placements[0])
    plans, allowed = Plans(request, knowledge, costs), request.options.get("seconds", SEARCH_SECONDS)
    deadline = started + allowed
    families = [schedule for schedule in synchronous_schedules(p, m, costs) if schedule.placement in placements]
    plans.add_all(known_orders(families, m, placements), math.inf if allowed >= SEARCH_SECONDS else deadline)
    higher = _under_higher_caps(request, shape, knowledge, costs, placements, deadline)
    plans.add_all(chain(prompt_orders(families, costs), higher), deadline)
    seconds = time.perf_counter() - started
    if not plans.kept:
        with suppress(UnsupportedError):
            one_by_one = next(last_resort(request, placements, m, knowledge, costs))
            logger.warning("memory cap of %s: %s", request.memory_cap, ONE_BY_ONE)
            return ChosenSchedule(one_by_one, costs, search_seconds=seconds, notes=ONE_BY_ONE)
    best, found_by = plans.fastest()
    validate(best.schedule, costs, host_budget=knowledge.host_budget)
    # What is away takes no memory, so bounds are those without a cap.
    fastest = {}
    for plan, how in sorted(plans.kept, key=lambda each: each[0].makespan):
        placement = plan.schedule.placement
        if placement not in fastest:
            bound = lower_bound(placement, m, costs)
            fastest[placement] = Candidate(plan.schedule, plan.makespan, plan.peaks, bound, how)
    bound = min(each.lower_bound for each in fastest.values())
    result = SearchResult(tuple(fastest.values()), bound, seconds, costs)
    notes = f"{found_by}: {in_words(best)}"
    return ChosenSchedule(best.schedule, costs, search_seconds=seconds, notes=notes, search=result, offload=best)


def _under_higher_caps(
    request: Request,
    shape: Shape,
    knowledge: Knowledge,
    costs: Costs,
    placements: Sequence[Placement],
    deadline: float,
) -> Iterator[tuple[str, Schedule]]:
    """Yield orders that are found in half of the time that is left, under caps that what leaves the device may exceed."""
    search = _search(request, shape, knowledge, costs, placements, effort=0.3)
    for number, factor in enumerate(_HIGHER):
        left = (deadline - time.perf_counter()) / 2 / (len(_HIGHER) - number)
        if left <= 0:
            return
        try:
            with doing(f"orders under {factor:g} times the cap, search {number + 1} of {len(_HIGHER)}"):
                caps = request.caps(shape.num_devices)
                assert caps is not None, "without a cap nothing is planned within one"
                found = search(memory_cap=[cap * factor for cap in caps], seconds=left)
        except PipememError:
            continue
        for candidate in found.candidates:
            yield f"search under {factor:g} times the cap", candidate.schedule


def _search(
    request: Request, shape: Shape, knowledge: Knowledge, costs: Costs, placements: Sequence[Placement], effort: float
) -> Callable[..., SearchResult]:
    """Return the search that takes what is left: caps and seconds."""
    return partial(
        search_schedule,
        num_devices=shape.num_devices,
        num_microbatches=shape.num_microbatches,
        costs=replace(costs, channel=None),  # of no use to it, and results kept before are found again
        placements=placements,
        effort=request.options.get("effort", effort),
        seed=request.options.get("seed", 0),
        period=request.searches_period,
        slices=request.slice_counts,
        cache=knowledge.cache,
    )


def _candidate(schedule: Schedule, costs: Costs, caps: Sequence[float] | None, found_by: str) -> Candidate:
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule.placement, schedule.num_microbatches, costs, caps, slices=schedule.slices)
    return Candidate(schedule, timeline.makespan, timeline.peaks, max(bound, timeline.ideal), found_by)
