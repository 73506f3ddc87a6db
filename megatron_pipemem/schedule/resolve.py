"""Turn what a user asks into the schedule that runs: the one place that searches for orders and tightens memory caps.

A run asks here on its rank 0, again whenever it has measured more; the command line and the planner ask the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_pipemem.errors import PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.core.bounds import lower_bound
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import MemoryCap
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate
from megatron_pipemem.schedule.core.validator import validate
from megatron_pipemem.schedule.core.vocabulary import BARRIERS
from megatron_pipemem.schedule.features.offload import (
    OffloadPlan,
    fastest_within,
    in_words,
    plan_offload,
    recompute_plans,
    with_early_recompute,
)
from megatron_pipemem.schedule.features.vocabulary.families import families_with_passes
from megatron_pipemem.schedule.features.vocabulary.passes import with_barriers
from megatron_pipemem.schedule.knowledge import UNIT, Knowledge, Shape
from megatron_pipemem.schedule.model_cut import searched
from megatron_pipemem.schedule.one_by_one import COUNTING, ONE_BY_ONE, counting, last_resort, serial
from megatron_pipemem.schedule.options import OFF, SEARCH_SECONDS
from megatron_pipemem.schedule.registry import build_schedule, family
from megatron_pipemem.schedule.request import Request, check_devices_of_file, check_microbatches_of_file
from megatron_pipemem.schedule.search import Candidate, SearchResult, search_schedule
from megatron_pipemem.schedule.search.offload import OffloadSearchResult, search_offload
from megatron_pipemem.schedule.search.problem import better_full
from megatron_pipemem.schedule.search.result import fastest_first

logger = logging.getLogger(__name__)

_ATTEMPTS = 4


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
        offload_search: the other plans, where ``offload`` was searched for with its order.
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
    offload_search: OffloadSearchResult | None = None

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)

    @property
    def alone(self) -> ChosenSchedule:
        """Return the schedule without what else was found: what ranks tell each other."""
        return replace(self, search=None, offload=None, offload_search=None)


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
    if request.barriers and request.plans_offload:
        raise UnsupportedError(
            "offload and recomputation are not planned together with vocabulary passes; leave one of them out"
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
    options, accepted = dict(request.options), family(request.name).options
    # Megatron's default, and ours, which copes better with an odd last group.
    group_size = None if shape.group_size == shape.num_devices else shape.group_size
    # Only where the user left them to us: Megatron's own flags then say how the model is cut.
    for option, value in (("chunks", shape.chunks), ("group_size", group_size)):
        if option in accepted and value is not None:
            options.setdefault(option, value)
    return build_schedule(
        request.name,
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
    ways = {0: resolved(replace(request, barriers=0))}
    for barriers in BARRIERS:
        try:
            ways[barriers] = resolved(replace(request, barriers=barriers))
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
    attempts = _attempts(request, knowledge)
    best: dict[Placement, Candidate] = {}
    results: list[SearchResult] = []

    def consider(found: Candidate) -> Sequence[float]:
        """Keep it, if nothing is faster within the cap; by how much it exceeds that."""
        schedule = with_barriers(found.schedule, request.barriers, costs)
        if request.barriers or attempts > 1:
            found = _candidate(schedule, costs, caps if not request.barriers else None, found.found_by)
        over = knowledge.excess(request, schedule, costs)
        if not any(over):
            placement = schedule.placement
            best[placement] = min(best.get(placement, found), found, key=lambda each: each.makespan)
        return over

    def find(caps: Sequence[float] | None) -> Sequence[float]:
        """Search within caps; by how much what was found exceeds those that are asked for."""
        result = search_schedule(
            num_devices=devices,
            num_microbatches=microbatches,
            costs=replace(costs, channel=None),  # of no use to it, and results kept before are found again
            memory_cap=caps,
            placements=placements,
            seconds=options.get("seconds", SEARCH_SECONDS) / attempts,
            effort=options.get("effort", 1.0),
            seed=options.get("seed", 0),
            cache=knowledge.cache,
        )
        results.append(result)
        return [max(each) for each in zip(*map(consider, result.candidates), strict=True)]

    if request.barriers:
        known = knowledge.with_passes
        if known is None:
            chunks = max(placement.num_chunks for placement in placements)
            known = families_with_passes(devices, microbatches, costs, request.barriers, chunks)
        for schedule in known:
            if schedule.placement in placements:
                consider(_candidate(schedule, costs, None, schedule.name))
    why = "what was found exceeds it"
    try:
        _tightened(caps, find, lambda over: over, attempts)
    except UnsupportedError as error:
        if request.memory_cap is None:
            raise
        why = str(error)
    notes = ""
    if not best:
        notes = ONE_BY_ONE
        for one_by_one in last_resort(request, placements, microbatches, knowledge, costs):
            best[one_by_one.placement] = _candidate(one_by_one, costs, None, "one by one")
        logger.warning("memory cap of %s: %s (%s)", request.memory_cap, ONE_BY_ONE, why)
    candidates = fastest_first(best.values())
    bound = min(each.lower_bound for each in candidates)
    if results and not request.barriers:
        bound = min(bound, results[0].lower_bound)
    seconds = sum(each.seconds for each in results)
    result = SearchResult(candidates, bound, seconds)
    schedule = result.schedule
    return ChosenSchedule(
        schedule, costs, lower_bound=result.best.lower_bound, search_seconds=seconds, notes=notes, search=result
    )


def _with_planned_offload(request: Request, shape: Shape, knowledge: Knowledge) -> ChosenSchedule:
    """Build another request's schedule without the cap, with what is recomputed and the round trips of its activations
    within it.
    """
    base = resolve(without_offload(request), shape, knowledge)
    costs, budget = knowledge.offload_costs(request, base.schedule.placement), knowledge.host_budget
    caps = request.caps(shape.num_devices)

    def over(plan: OffloadPlan) -> Sequence[float]:
        return knowledge.excess(request, plan.schedule, costs)

    def planned(schedule: Schedule, caps: Sequence[float] | None = None) -> OffloadPlan:
        return plan_offload(schedule, costs, request.offload, caps, budget)

    def within_cap(schedule: Schedule) -> OffloadPlan:
        attempts = _attempts(request, knowledge)
        return _tightened(caps, lambda caps: planned(schedule, caps), over, attempts, knowledge.message)

    def needy(schedule: Schedule) -> Collection[int]:
        return [device for device, more in enumerate(over(planned(schedule))) if more]

    plans = recompute_plans(base.schedule, costs, request.recompute, within_cap, needy)
    best = fastest_within(plans, lambda plan: max(over(plan)))
    if any(over(best)):
        raise UnsupportedError(_refusal(request, best, knowledge, costs))
    best = with_early_recompute(best, lambda plan: not any(over(plan)))
    validate(best.schedule, costs, host_budget=budget, microbatch_order=request.file is None)
    return ChosenSchedule(best.schedule, costs, notes=in_words(best), offload=best)


def _with_searched_offload(request: Request, shape: Shape, knowledge: Knowledge) -> ChosenSchedule:
    """Return the fastest plan of any order that keeps the cap."""
    placements = searched(request, shape, knowledge)
    costs, budget = knowledge.offload_costs(request, placements[0]), knowledge.host_budget
    attempts, options = _attempts(request, knowledge), request.options
    results: list[OffloadSearchResult] = []

    def find(caps: Sequence[float]) -> OffloadSearchResult:
        result = search_offload(
            shape.num_devices,
            shape.num_microbatches,
            costs,
            caps,
            host_budget=budget,
            placements=placements,
            offload=request.offload != OFF,
            recompute=request.recompute,
            seconds=options.get("seconds", SEARCH_SECONDS) / attempts,
            effort=options.get("effort", 0.3),
        )
        results.append(result)
        return result

    def over(result: OffloadSearchResult) -> Sequence[float]:
        return knowledge.excess(request, result.schedule, costs)

    result = _tightened(request.caps(shape.num_devices), find, over, attempts, knowledge.message)
    seconds = sum(each.seconds for each in results)
    if not any(over(result)):
        validate(result.schedule, costs, host_budget=budget)
        notes = f"{result.best.found_by}: {in_words(result.plan)}"
        return ChosenSchedule(
            result.schedule, costs, search_seconds=seconds, notes=notes, offload=result.plan, offload_search=result
        )
    for placement in placements:
        one_by_one = serial(request, placement, shape.num_microbatches, request.name, better_full(placement, costs))
        if not any(knowledge.excess(request, one_by_one, costs)):
            logger.warning("memory cap of %s: %s", request.memory_cap, ONE_BY_ONE)
            return ChosenSchedule(one_by_one, costs, search_seconds=seconds, notes=ONE_BY_ONE)
    raise UnsupportedError(_refusal(request, result.plan, knowledge, costs))


def _tightened[T](
    caps: Sequence[float] | None,
    find: Callable[[Sequence[float] | None], T],
    over: Callable[[T], Sequence[float]],
    attempts: int,
    margin: float = 0.0,
) -> T:
    """Return what is found within the caps; as long as that exceeds them after all, within caps lowered by as much.

    Args:
        caps: one per device; ``None`` for none, with one attempt.
        find: finds something within caps, as far as it can count.
        over: by how much every device really exceeds the caps.
        attempts: how often to look at most.
        margin: by which caps are lowered besides.
    """
    found = find(caps)
    for _ in range(attempts - 1):
        more = over(found)
        caps = tuple(cap - each - margin if each else cap for cap, each in zip(caps, more, strict=True))
        if not any(more) or min(caps) <= 0:
            break
        try:
            found = find(caps)
        except UnsupportedError:  # nothing is within the lower caps
            break
    return found


def _attempts(request: Request, knowledge: Knowledge) -> int:
    """Return how often to search: several times where what is searched for grows afterwards, by messages whose bytes
    are known, or by vocabulary passes.
    """
    grows = request.barriers or (request.in_bytes and knowledge.changes is not None)
    return _ATTEMPTS if grows and request.memory_cap is not None else 1


def _candidate(schedule: Schedule, costs: Costs, caps: Sequence[float] | None, found_by: str) -> Candidate:
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule.placement, schedule.num_microbatches, costs, caps)
    return Candidate(schedule, timeline.makespan, timeline.peaks, max(bound, timeline.ideal), found_by)


def _refusal(request: Request, plan: OffloadPlan, knowledge: Knowledge, costs: Costs) -> str:
    least = MemoryCap(max(knowledge.held(plan.schedule, costs)), request.in_bytes)
    why = f"; what stays: {plan.binds}" if plan.binds else ""
    return (
        f"no plan of {request.name} with offload {request.offload} and recompute {request.recompute} keeps a memory cap of "
        f"{request.memory_cap}: the least found is {least}{why}; raise the cap, or let offload, recompute or the schedule "
        "be chosen (auto)"
    )
