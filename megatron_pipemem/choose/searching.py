"""Search for the schedule of a request: the fastest order within a memory cap, with offload and recomputation.

A search does not count all of the memory. So it is repeated under a lower cap until its result keeps the real cap
(``find_within_caps``). If nothing else keeps the cap, one microbatch runs after another. That order is also used in the step
that counts bytes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter

from megatron_pipemem.choose.knowledge import Choice, Knowledge, Shape
from megatron_pipemem.errors import MemoryCapError, PipememError, UnsupportedError
from megatron_pipemem.families.offload import uniform_repeating, with_prompt_weights
from megatron_pipemem.features.offload.orders import OffloadPlan, plan_offload
from megatron_pipemem.features.recompute.orders import plan_text, recompute_plans, with_early_recompute, with_recompute
from megatron_pipemem.features.vocabulary.orders import families_with_passes, with_barriers
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import doing, tell
from megatron_pipemem.schedule.memory_cap import MemoryCap, unreachable
from megatron_pipemem.schedule.options import OFF, SEARCH_SECONDS, searched_placements
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import MAX_CHUNKS, Candidate, SearchResult, search_schedule
from megatron_pipemem.search.problem import better_full
from megatron_pipemem.search.result import fastest_first
from megatron_pipemem.search.search import fitting, usual_placements

logger = logging.getLogger(__name__)

ONE_BY_ONE = "one microbatch at a time, because nothing else was found to keep the cap"
TO_COUNT_BYTES = "one microbatch at a time, to count bytes"
UNIFORM = "uniform repeating"

_CAP_FACTORS = (1.0, 2.0, 4.0)
"""Orders are searched under the cap times these factors. The memory that exceeds the cap is then offloaded."""
_ATTEMPTS = 4


def fastest(request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
    """Return the choice with the fastest order that keeps the cap, with the memory of vocabulary passes and messages.

    The search has no such actions (bytes of messages count with F, I and W), so its result may exceed the cap. If
    vocabulary passes are requested, families' schedules with them are considered first, without a time limit.
    One microbatch runs after another if no other order keeps the cap. Raise an UnsupportedError if that does not either.
    """
    devices, microbatches, options = shape.num_devices, shape.num_microbatches, request.options
    placements = candidate_placements(request, shape, knowledge)
    costs = knowledge.counted_costs(placements[0], request.in_bytes)
    caps = request.caps(devices)
    tries = _num_attempts(request, knowledge)
    search = _search(request, shape, knowledge, costs, placements, effort=1.0)
    best: dict[tuple[Placement, Units], Candidate] = {}
    results: list[SearchResult] = []

    def consider(candidate: Candidate) -> Sequence[float]:
        """Store a candidate that keeps the cap, if it is the fastest of its kind, and return its excess per device."""
        schedule = with_barriers(candidate.schedule, request.barriers, costs)
        if not request.searches_period and (request.barriers or tries > 1):
            candidate = _candidate(schedule, costs, caps if not request.barriers else None, candidate.found_by)
        over = knowledge.excess(request, schedule, costs)
        if not any(over):
            which = schedule.placement, schedule.units
            best[which] = min(best.get(which, candidate), candidate, key=attrgetter("makespan"))
        return over

    def find(caps: Sequence[float] | None) -> tuple[SearchResult, Sequence[float]]:
        seconds = options.get("seconds", SEARCH_SECONDS) / tries
        results.append(result := search(memory_cap=caps, seconds=seconds))
        excesses = map(consider, result.candidates)
        return result, [max(of_device) for of_device in zip(*excesses, strict=True)]

    if request.barriers:
        families: Sequence[Schedule] | None = knowledge.vocabulary_schedules
        if families is None:
            chunks = max(placement.num_chunks for placement in placements)
            families = families_with_passes(devices, microbatches, costs, request.barriers, chunks)
        for schedule in families:
            if schedule.placement in placements:
                consider(_candidate(schedule, costs, None, schedule.name))
    why = "the found schedules exceed it"
    try:
        find_within_caps(caps, find, tries)
    except UnsupportedError as error:
        if request.memory_cap is None or request.may_cut:
            raise
        why = str(error)
    notes = ""
    if not best:
        notes = ONE_BY_ONE
        for one_by_one in _last_resort(request, placements, microbatches, knowledge, costs):
            best[one_by_one.placement, one_by_one.units] = _candidate(one_by_one, costs, None, "one by one")
        logger.warning("memory cap of %s: %s (%s)", request.memory_cap, ONE_BY_ONE, why)
    candidates = fastest_first(best.values())
    bound = min(candidate.lower_bound for candidate in candidates)
    if results and not request.barriers:
        bound = min(bound, results[0].lower_bound)
    seconds = sum(result.seconds for result in results)
    result = SearchResult(candidates, bound, seconds, costs)
    bound = result.best.lower_bound
    return Choice(result.schedule, costs, bound=bound, search_seconds=seconds, notes=notes, search=result)


def with_planned_offload(base: Schedule, request: Request, knowledge: Knowledge) -> Choice:
    """Return the choice with the order of ``base``, and with recomputation and offload so that it keeps the cap."""
    costs = knowledge.offload_costs(request, base.placement)
    plans = Plans(request, knowledge, costs)
    plans.add(base.name, base)
    best, _ = plans.fastest()
    validate(best.schedule, costs, host_budget=knowledge.host_budget, microbatch_order=request.file is None)
    return Choice(best.schedule, costs, notes=plan_text(best), offload=best)


def with_chosen_offload(request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
    """Return the choice with the fastest order that keeps the cap with offload and recomputation.

    First come the orders of all families and of uniform repeating (``families.offload``). Offload is planned for each
    of them that could be the fastest. This has no time limit, unless the user gives fewer seconds than the default.
    Then, while there is time, come families over a V with W moved, and the results of searches under higher caps. If none keeps
    the cap, one microbatch runs after another.
    """
    started, p, m = time.perf_counter(), shape.num_devices, shape.num_microbatches
    placements = candidate_placements(request, shape, knowledge)
    costs = knowledge.offload_costs(request, placements[0])
    plans, allowed = Plans(request, knowledge, costs), request.options.get("seconds", SEARCH_SECONDS)
    deadline = started + allowed
    families = [schedule for schedule in synchronous_schedules(p, m, costs) if schedule.placement in placements]
    plans.add_all(_known_orders(families, m, placements), math.inf if allowed >= SEARCH_SECONDS else deadline)
    higher = _under_higher_caps(request, shape, knowledge, costs, placements, deadline)
    plans.add_all(chain(_prompt_orders(families, costs), higher), deadline)
    seconds = time.perf_counter() - started
    if not plans.kept:
        with suppress(UnsupportedError):
            one_by_one = next(_last_resort(request, placements, m, knowledge, costs))
            logger.warning("memory cap of %s: %s", request.memory_cap, ONE_BY_ONE)
            return Choice(one_by_one, costs, search_seconds=seconds, notes=ONE_BY_ONE)
    best, found_by = plans.fastest()
    validate(best.schedule, costs, host_budget=knowledge.host_budget)
    # Offloaded activations take no memory, so the bounds are those without a cap.
    fastest = {}
    for plan, how in sorted(plans.kept, key=lambda kept: kept[0].makespan):
        placement = plan.schedule.placement
        if placement not in fastest:
            bound = lower_bound(placement, m, costs)
            fastest[placement] = Candidate(plan.schedule, plan.makespan, plan.peaks, bound, how)
    bound = min(candidate.lower_bound for candidate in fastest.values())
    result = SearchResult(tuple(fastest.values()), bound, seconds, costs)
    notes = f"{found_by}: {plan_text(best)}"
    return Choice(best.schedule, costs, search_seconds=seconds, notes=notes, search=result, offload=best)


def _under_higher_caps(
    request: Request,
    shape: Shape,
    knowledge: Knowledge,
    costs: Costs,
    placements: Sequence[Placement],
    deadline: float,
) -> Iterator[tuple[str, Schedule]]:
    """Yield name and schedule of the results of searches under 1, 2 and 4 times the request's cap.

    They take at most half of the time to ``deadline`` (``Plans.add_all``), and a search that fails is skipped. The
    caller offloads the memory that exceeds the request's cap.
    """
    search = _search(request, shape, knowledge, costs, placements, effort=0.3)
    for number, factor in enumerate(_CAP_FACTORS):
        left = (deadline - time.perf_counter()) / 2 / (len(_CAP_FACTORS) - number)
        if left <= 0:
            return
        try:
            with doing(f"orders under {factor:g} times the cap, search {number + 1} of {len(_CAP_FACTORS)}"):
                caps = request.caps(shape.num_devices)
                assert caps is not None, "without a cap nothing is planned within one"
                result = search(memory_cap=[cap * factor for cap in caps], seconds=left)
        except PipememError:
            continue
        for candidate in result.candidates:
            yield f"search under {factor:g} times the cap", candidate.schedule


def _search(
    request: Request, shape: Shape, knowledge: Knowledge, costs: Costs, placements: Sequence[Placement], effort: float
) -> Callable[..., SearchResult]:
    """Return ``search_schedule`` with all arguments set but ``memory_cap`` and ``seconds``. Nothing is searched yet."""
    return partial(
        search_schedule,
        num_devices=shape.num_devices,
        num_microbatches=shape.num_microbatches,
        costs=replace(costs, channel=None),  # the search does not use it, and cached results stay valid
        placements=placements,
        effort=request.options.get("effort", effort),
        seed=request.options.get("seed", 0),
        period=request.searches_period,
        slices=request.slice_counts,
        cache=knowledge.cache,
    )


def _candidate(schedule: Schedule, costs: Costs, caps: Sequence[float] | None, found_by: str) -> Candidate:
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule.placement, schedule.units, costs, caps)
    return Candidate(schedule, timeline.makespan, timeline.peaks, max(bound, timeline.ideal), found_by)


def candidate_placements(request: Request, shape: Shape, knowledge: Knowledge) -> tuple[Placement, ...]:
    """Return the placements among which a search chooses.

    If the model exists, that is its placement alone. Otherwise the options of the request and the number of chunks
    determine the placements. Raise an UnsupportedError if options contradict each other, and a CostsError if the costs
    are per stage and fit no placement.
    """
    if knowledge.placement is not None:
        return (knowledge.placement,)
    devices, options = shape.num_devices, request.options
    if "max_chunks" in options:
        return usual_placements(devices, options["max_chunks"], knowledge.costs, request.slice_counts)
    kind = options.get("placement")
    chunks = options.get("chunks") if shape.chunks is None else shape.chunks
    if kind is None and chunks is None:  # two chunks, unless costs per stage require others
        chunks = usual_placements(devices, MAX_CHUNKS, knowledge.costs, request.slice_counts)[0].num_chunks
    return fitting(searched_placements(devices, kind, chunks), knowledge.costs, request.slice_counts)


def _known_orders(
    families: Iterable[Schedule], num_microbatches: int, placements: Sequence[Placement]
) -> Iterator[tuple[str, Schedule]]:
    """Yield name and schedule of these families and of uniform repeating, if the schedule has one of the placements."""
    p, m = placements[0].num_devices, num_microbatches
    orders = [(schedule.name, schedule) for schedule in families]
    chunk_counts = {placement.num_chunks for placement in placements}
    orders += [(f"{UNIFORM}, {v} chunks", uniform_repeating(p, m, v)) for v in chunk_counts]
    orders.append((f"{UNIFORM} over a V", uniform_repeating(p, m, 2, "v")))
    return ((name, schedule) for name, schedule in orders if schedule.placement in placements)


def _prompt_orders(families: Iterable[Schedule], costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """Yield name and schedule of families over a V, with W moved so that at most 0, 1, ... or 4 wait on a device."""
    for schedule in families:
        if schedule.placement.name == "v":
            for most, prompt in enumerate(with_prompt_weights(schedule, costs)):
                yield f"{schedule.name}, at most {most} W waiting", prompt


def _num_attempts(request: Request, knowledge: Knowledge) -> int:
    """Return the most searches until a result keeps the cap.

    Several times if the result may grow afterwards (messages, vocabulary passes) and so break the cap, else once.
    """
    grows = request.barriers or (request.in_bytes and knowledge.counted_bytes is not None)
    return _ATTEMPTS if grows and request.memory_cap is not None else 1


def find_within_caps[T](
    caps: Sequence[float] | None,
    find: Callable[[Sequence[float] | None], tuple[T, Sequence[float]]],
    attempts: int,
    margin: float = 0.0,
) -> tuple[T, Sequence[float]]:
    """Call ``find`` with lower and lower caps until its result keeps the real caps, one per device.

    Return the last result, and the excess of every device over the real caps. ``find`` takes caps and returns such a
    pair. It does not count all of the memory, so its result may exceed the caps that it got. The next call gets caps
    that are lower by the excess plus ``margin``, in the unit of the caps. ``find`` is called at most ``attempts``
    times, and no more if a cap would fall to 0, or if it raises an UnsupportedError for the lower caps.
    """
    result, over = find(caps)
    for _ in range(attempts - 1):
        if not any(over):
            break
        assert caps is not None, "nothing exceeds no caps"
        caps = tuple(cap - more - margin if more else cap for cap, more in zip(caps, over, strict=True))
        if min(caps) <= 0:
            break
        try:
            result, over = find(caps)
        except UnsupportedError:  # no result is within the lower caps
            break
    return result, over


class Plans:
    """Plan recomputation and offload for one order after another, and keep the plans that keep the cap."""

    def __init__(self, request: Request, knowledge: Knowledge, costs: Costs) -> None:
        self._request, self._knowledge, self._costs = request, knowledge, costs
        self._attempts = _num_attempts(request, knowledge)
        self._seen_orders: set[tuple] = set()
        self.kept: list[tuple[OffloadPlan, str]] = []
        """Plans that keep the cap, each with the name of its order."""
        self._missed: list[tuple[float, OffloadPlan]] = []

    def add(self, name: str, order: Schedule, slow_down: bool = True) -> bool:
        """Plan recomputation and offload for an order, and return whether a plan keeps the cap.

        The first plan has the least recomputation that the request allows. Further plans have more, until one keeps the
        cap without making the order slower. With ``slow_down`` a plan may make the steady state slower if nothing else
        keeps the cap.
        """
        before = len(self.kept)
        within_cap = partial(self._within_cap, slow_down)
        for plan, over in recompute_plans(
            order, self._costs, self._request.recompute, within_cap, self._devices_over_cap
        ):
            if any(over):
                self._missed.append((max(over), plan))
                continue
            self.kept.append((with_early_recompute(plan, lambda tried: not any(self._excess_of(tried))), name))
            if plan.delay == 0:
                break
        return len(self.kept) > before

    def add_all(self, orders: Iterable[tuple[str, Schedule]], deadline: float) -> None:
        """Call ``add`` for every order that may beat the fastest plan so far, until the deadline.

        ``orders`` has names and schedules. ``deadline`` is a time of ``time.perf_counter``, or infinity. If no plan
        keeps the cap by then, go on until one does.
        """
        candidates: list[tuple[float, str, Schedule]] = []  # makespan, name and order
        for name, order in orders:
            order_key = (order.placement.devices, order.orders)
            if order_key not in self._seen_orders:
                self._seen_orders.add(order_key)
                candidates.append((simulate(order, self._costs).makespan, name, order))
        # Uniform repeating has the lowest peaks. Its times show which other orders are worth a try.
        candidates.sort(key=lambda candidate: (not candidate[1].startswith(UNIFORM), candidate[0]))
        for slow_down in (False, True):
            over = []
            for number, (makespan, name, order) in enumerate(candidates):
                tell(lambda: f"planning copies, {len(candidates) - number} orders left; {self._state(deadline)}")  # noqa: B023
                if self.kept and time.perf_counter() > deadline:
                    return
                # Planning never makes an order faster.
                if makespan < self._fastest and not self.add(name, order, slow_down):
                    over.append((makespan, name, order))
            candidates = over

    def fastest(self) -> tuple[OffloadPlan, str]:
        """Return the fastest plan that keeps the cap, and the name of its order."""
        if not (self.kept or self._missed):
            raise UnsupportedError(
                "cap-unreachable",
                "no schedule could be built for the given placements and costs; give other placements",
            )
        if not self.kept:
            raise self._refusal()
        return min(self.kept, key=lambda kept: (kept[0].makespan, len(kept[0].offloaded)))

    def _refusal(self) -> MemoryCapError:
        _, plan = min(self._missed, key=itemgetter(0))
        request = self._request
        least = MemoryCap(max(self._knowledge.device_peaks(plan.schedule, self._costs)), request.in_bytes)
        why = f"; these activations stay: {plan.binds}" if plan.binds else ""
        return MemoryCapError(
            "cap-unreachable",
            f"no plan of {request.schedule} with offload {request.offload} and recompute {request.recompute} keeps a memory "
            f"cap of {request.memory_cap}: the least found is {least}{why}; raise the cap, or let offload, recompute or the "
            "schedule be chosen (auto)",
            obstacles=tuple(sorted(plan.obstacles)),
        )

    def _state(self, deadline: float) -> str:
        if not self.kept:
            return "no plan keeps the cap so far"
        now = time.perf_counter()
        left = "" if deadline == math.inf else f", {max(0.0, deadline - now):.0f} s for these orders left at most"
        return f"makespan {self._fastest:.6g} so far{left}"

    @property
    def _fastest(self) -> float:
        return min((plan.makespan for plan, _ in self.kept), default=math.inf)

    def _excess_of(self, plan: OffloadPlan) -> Sequence[float]:
        return self._knowledge.excess(self._request, plan.schedule, self._costs)

    def _plan(self, order: Schedule, caps: Sequence[float] | None, slow_down: bool) -> OffloadPlan:
        budget = self._knowledge.host_budget
        return plan_offload(order, self._costs, self._request.offload, caps, budget, slow_down=slow_down)

    def _within_cap(self, slow_down: bool, order: Schedule) -> tuple[OffloadPlan, Sequence[float]]:
        def find(caps: Sequence[float] | None) -> tuple[OffloadPlan, Sequence[float]]:
            plan = self._plan(order, caps, slow_down)
            return plan, self._excess_of(plan)

        return find_within_caps(self._request.caps(order.num_devices), find, self._attempts, self._knowledge.message)

    def _devices_over_cap(self, order: Schedule) -> Collection[int]:
        return [device for device, more in enumerate(self._excess_of(self._plan(order, None, True))) if more]


def serial_schedule(
    placement: Placement, num_microbatches: int, name: str = "serial", full: Collection[int] = ()
) -> Schedule:
    """Return the schedule that runs one microbatch after another: a slow order, with the lowest memory.

    ``full`` has the stages with full backwards. For the lowest memory these are the stages of ``better_full``.
    Microbatches are assigned to replicas of the model in turn.
    """
    orders = []
    for stages in placement.stages:
        order: list[Action] = []
        for microbatch in range(num_microbatches):
            turn = [stage for stage in stages if placement.replica_of(stage) == microbatch % placement.replicas]
            order += [Action(Kind.F, stage, microbatch) for stage in turn]
            for stage in reversed(turn):
                kinds = (Kind.B,) if stage in full else (Kind.I, Kind.W)
                order += [Action(kind, stage, microbatch) for kind in kinds]
        orders.append(tuple(order))
    return Schedule(name, placement, Units.equal(num_microbatches), tuple(orders))


def choice_to_count_bytes(request: Request, num_microbatches: int, knowledge: Knowledge) -> Choice:
    """Return the choice for a step in which the run counts the bytes of every action: one microbatch after another.

    If the run has counted bytes before, the step recomputes every stage selectively, to count the bytes of that, too.
    If the request offloads, all activations are copied to the host and back.
    """
    placement, name = knowledge.placement, f"{request.schedule} (counting bytes)"
    assert placement is not None, "the model has been built"
    schedule = serial_schedule(placement, num_microbatches, name)
    if knowledge.counted_bytes is not None:
        schedule = with_recompute(schedule, dict.fromkeys(range(placement.num_stages), Kind.RS))
    if request.offload != OFF:
        schedule = _with_all_offloaded(schedule)
    return Choice(with_barriers(schedule, request.barriers, knowledge.costs), knowledge.costs, why=TO_COUNT_BYTES)


def _last_resort(
    request: Request, placements: Sequence[Placement], microbatches: int, knowledge: Knowledge, costs: Costs
) -> Iterator[Schedule]:
    """Yield for every placement the schedule of one microbatch after another, if it keeps the cap.

    All activations are offloaded unless the request's offload is off. Raise an UnsupportedError if no placement keeps
    the cap.
    """
    least: list[tuple[float, int, Schedule]] = []
    for placement in placements:
        serial = serial_schedule(placement, microbatches, request.schedule, better_full(placement, costs))
        serial = with_barriers(
            serial if request.offload == OFF else _with_all_offloaded(serial), request.barriers, costs
        )
        more = knowledge.excess(request, serial, costs)
        if not any(more):
            yield serial
        least.append((max(more), more.index(max(more)), serial))
    lacking, device, serial = min(least, key=itemgetter(0))
    if lacking:
        needed = MemoryCap(knowledge.device_peaks(serial, costs)[device], request.in_bytes)
        raise UnsupportedError(
            "cap-unreachable",
            unreachable(request.memory_cap, device, needed, "recompute or offload activations"),
        )


def _with_all_offloaded(schedule: Schedule) -> Schedule:
    """Return a serial schedule with all activations copied to the host right after F, and back before RS, or else I or B."""

    def away(order: Order) -> Order:
        actions: list[Action] = []
        recomputed = any(action.kind is Kind.RS for action in order)
        for action in order:
            if action.kind is Kind.RS or (not recomputed and action.kind in (Kind.I, Kind.B)):
                actions += [action._replace(kind=kind) for kind in (Kind.RELOAD, Kind.WAIT_RELOAD)]
            actions.append(action)
            if action.kind is Kind.F:
                actions += [action._replace(kind=kind) for kind in (Kind.OFFLOAD, Kind.WAIT_OFFLOAD)]
        return tuple(actions)

    return replace(schedule, orders=tuple(map(away, schedule.orders)))
