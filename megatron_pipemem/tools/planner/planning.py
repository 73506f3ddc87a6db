"""The planner: a best-first search for the fastest ways to run a model on a cluster within its memory.

A cut is a choice of tensor, pipeline, data and other parallelism. Every cut first enters a queue with a cheap lower
bound of its step time: all its work, divided evenly. The cut with the lowest bound is then priced stage by stage. It
enters the queue again with the proved bound of its placement within the memory left for activations. After that its
schedules enter the queue with their simulated times. An entry that leaves the queue with a simulated time is the next
best plan, because no waiting entry can be faster. There are two exceptions. A variant of an order is assumed to be no
faster than the order alone, which is tested and not proved. Offload that takes long to plan is put aside until the
queue is empty. At the end, searches for better orders start from cuts whose bound leaves a possible gain.

Asynchronous schedules are priced only if the limits name them. They train differently, so they never compete with the
others. A step takes the makespan of a window of microbatches, because the training loop joins all ranks at its end. So
there are still bubbles. Without that barrier it takes the period of windows, and the gradients of a second batch take
memory. A rank holds several versions of its parameters, and the whole optimizer, which cannot be sharded. A family that
updates after every microbatch pays for reduction and optimizer each time, with nothing to hide them.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.refusals import TIED, flag_values
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.display import doing, rare_collection, tell
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.options import AUTO, STOCK
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families, family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.stream import check_batch, consecutive_steps, family_window, steady, updates_per_batch
from megatron_pipemem.schedule.units import WHOLE, Units
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.early_wgrad import moves_weights
from megatron_pipemem.tools.planner.parameter_bytes import DISTRIBUTED, parameter_bytes
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown, all_reduce
from megatron_pipemem.tools.planner.replay import (
    MOST_ACTIONS,
    Order,
    OrderPrice,
    Replay,
    extended,
    measured,
    replay_key,
    shortest,
)
from megatron_pipemem.tools.planner.slices import LEAST_SLICED_GAIN
from megatron_pipemem.tools.planner.space import Limits, cuts, hides_messages, is_stocks, orders
from megatron_pipemem.tools.planner.step import PlannedStep, least_seconds, least_static, price
from megatron_pipemem.tools.planner.variants import IN_PAIRS, PLAIN, Variant, build_order, run_step, variants
from megatron_pipemem.tools.planner.ways import Answer, CandidateGroup, Entry, FamilyCandidate, Way

_SHARED = (DISTRIBUTED, "overlap-param-gather")
_PER_MICROBATCH = ("overlap-grad-reduce",)


Priced = tuple[FamilyCandidate, float, tuple[float, ...]]
"""A parallelism with a family, whose static bytes include all parameter versions; seconds of a step in the middle of the
run; bytes of activations per device."""


def asynchronous(
    run: Run, limits: Limits, slowdown: MeasuredSlowdown | None, rejected: Counter[str]
) -> Iterator[Priced]:
    """Yield the priced asynchronous families that the limits name and that can run with the run's parallelism.

    ``slowdown`` has the ratios of measured to predicted seconds. ``rejected`` counts the families that cannot run, by
    reason. Flags that these families do not support, such as a sharded optimizer, are removed from the run.
    """
    named = limits.allowed.get("schedule", ())
    p = run.parallelism.pp
    for candidate in families():
        if not candidate.asynchronous or candidate.name not in named or p == 1 or not limits.admits(chunks=1):
            continue
        per_batch = updates_per_batch(candidate.name)
        dropped = _SHARED if per_batch else (*_SHARED, *_PER_MICROBATCH)
        clipping = {} if per_batch else {"clip-grad": 0}
        flags = clipping | {name: value for name, value in run.flags.items() if name not in dropped}
        own = replace(run, flags=flags, schedule=replace(run.schedule, name=candidate.name))
        try:
            request = Request(candidate.name, overlap_steps=run.schedule.overlap_steps)
            assumed = {"rerun-mode": "disabled"}  # as ``pipemem launch`` passes it
            check_gates(GateQuestion(request, flag_values(assumed | flags | {run.precision: True})))
            check_asynchronous(own, candidate.name)
        except UnsupportedError as error:
            rejected[f"{candidate.name}: {error}"] += 1
            continue
        step, order_price = asynchronous_price(own, price(own, Placement.linear(p), slowdown=slowdown))
        group = CandidateGroup(own, step, (), None, order_price.seconds + step.outside_seconds, 0.0)
        yield FamilyCandidate(group, Order(candidate.name)), order_price.seconds, order_price.peak_bytes


def asynchronous_price(run: Run, step: PlannedStep) -> tuple[PlannedStep, OrderPrice]:
    """Return a step of a run with an asynchronous schedule, with the bytes of all parameter versions, and its price.

    ``step`` is the step with one version. The price is that of a step in the middle of the run.
    """
    name, p, m = run.schedule.name, run.parallelism.pp, run.parallelism.microbatches
    batch = min(m, 2 * p)

    middle = family_window(name, p, batch, steady(p, batch))
    timeline = middle.simulate(step.costs)
    seconds = timeline.makespan
    if run.delays_updates:
        one = build_schedule(name, num_devices=p, num_microbatches=batch, update_every=batch)
        seconds = consecutive_steps(one, step.costs).period
    # In the middle of a step the busiest device never waits.
    makespan = seconds + (m - batch) * max(timeline.work) / batch
    more = tuple(
        (versions - 1) * nbytes for versions, nbytes in zip(middle.versions_held, step.weight_bytes, strict=True)
    )
    static = tuple(map(sum, zip(step.static_bytes, more, strict=True)))
    if not updates_per_batch(name):
        execution, cluster = run.execution, run.cluster
        replicas = run.parallelism.dp * run.parallelism.cp
        link = cluster.link(replicas, execution.tp)
        gradients = max(step.weight_bytes) / execution.element * parameter_bytes(run.precision, run.flags).gradient
        step = replace(
            step,
            optimizer_seconds=m * step.optimizer_seconds,
            reduction_seconds=m * all_reduce(gradients, replicas, link),
        )
    return replace(step, static_bytes=static), OrderPrice(makespan, timeline.peaks)


logger = logging.getLogger(__name__)

TOO_MUCH_STATIC = "parameters, gradients and optimizer alone exceed the memory of a device"
TOO_MUCH_KEPT = (
    "one microbatch's activations exceed the memory that parameters, gradients and optimizer leave on a device"
)
TOO_HIGH = "the schedule's activations exceed the memory that parameters, gradients and optimizer leave on a device"
LITTLE = f"slices make the step less than {LEAST_SLICED_GAIN:.0%} shorter than the best plan without them"
SLOWER = "slower than the listed plans, by a lower bound or by simulated time"
WAITS = "two replicas of the model need a barrier between steps, and the run has overlap_steps"
NO_PAIRS = "no pair of a forward and a backward makes the step of the schedule shorter"
UNSEEN = "not looked at before the interrupt"
UNTRIED = "offload that takes long to plan was not tried, and could be faster; narrow the choice by --only"
_LARGEST_SEARCH = 60_000  # most passes of a step for which a search is tried
_SEARCHES = 3
_EFFORT = 20_000  # passes times chunks for which copies are planned while other ways are left
_ROUNDING = 1e-12  # of the sum of some thousand times, at most
_WORTH_SEARCHING = 0.005  # least possible gain of a better order, as a share of the time


class PlanningInterrupted(KeyboardInterrupt):
    """An interrupt while plans were searched for. ``answer`` has the plans that were found before it, at least one."""

    def __init__(self, answer: Answer):
        super().__init__()
        self.answer = answer


def plan(
    run: Run,
    memory: float | None = None,
    limits: Limits | None = None,
    top: int = 10,
    search_seconds: float = 5.0,
    slowdown: MeasuredSlowdown | None = None,
    refusal: Callable[[Run], PipememError | None] = lambda run: None,
) -> Answer:
    """Return the ``top`` fastest ways to run a model on the run's cluster; none if no plan is possible.

    ``memory`` is that of a device in bytes, by default the cluster's limit. ``search_seconds`` is the time limit for
    each of at most three searches of an order; 0 for no search. ``slowdown`` has the ratios of measured to predicted
    seconds. ``refusal`` returns the error by which a start refuses a run's flags for its schedule; it is asked once for
    runs with the same flags and schedule. An interrupt is raised as ``PlanningInterrupted`` if a plan was found before it.
    """
    started = time.perf_counter()
    memory = run.cluster.memory_bytes if memory is None else memory
    limits = limits or Limits()
    limits.check(run)
    searched: list[Way] = []
    with rare_collection():
        planner = _Planner(run, memory, limits, slowdown, refusal)
        try:
            plans = planner.best(top)
            if search_seconds > 0 and limits.admits(schedule=AUTO):
                for way in planner.search(plans, search_seconds):
                    searched.append(way)  # one by one, so that an interrupt keeps those before it
        except KeyboardInterrupt:
            plans = planner.so_far(top)
            if not plans:
                raise
            raise PlanningInterrupted(_answer(planner, plans + searched, top, started, UNSEEN)) from None
    return _answer(planner, plans + searched, top, started, SLOWER)


def _answer(planner: _Planner, plans: list[Way], top: int, started: float, in_queue: str) -> Answer:
    """Return the answer with the ``top`` fastest plans. ``in_queue`` is the reason to reject the rest of the queue."""
    plans = sorted(plans, key=lambda way: way.seconds)[:top]
    rejected = planner.rejected + Counter({in_queue: _count(planner.queue), UNTRIED: _count(planner.aside)})
    return Answer(tuple(plans), rejected, rejected.total() + len(plans), time.perf_counter() - started)


class _Planner:
    """The queue of a search, its entries put aside, and the number of rejected choices by reason."""

    def __init__(
        self,
        run: Run,
        memory: float,
        limits: Limits,
        slowdown: MeasuredSlowdown | None,
        refusal: Callable[[Run], PipememError | None],
    ) -> None:
        self._slowdown, self._refusal = slowdown, refusal
        self._refusals: dict[object, PipememError | None] = {}
        self._memory, self.limits = memory, limits
        self.rejected: Counter[str] = Counter()
        self._groups: list[CandidateGroup] = []
        self._serial = itertools.count()
        self._proposes_slices = "slices" not in limits.allowed and not run.schedule.slices
        self.queue: list[Entry] = []
        self.aside: list[Entry] = []
        self._looked_at = 0
        self.plans: list[Way] = []  # the fastest first
        self.sliced: list[Way] = []  # plans with slices, until the fastest plan without slices is known
        self._effort: float = _EFFORT
        self._times: dict[object, OrderPrice] = {}
        for cut in cuts(run, limits, self.rejected):
            if least_static(cut) > memory:
                self.rejected[TOO_MUCH_STATIC] += 1
            else:
                self._put(least_seconds(cut, slowdown), cut)

    def best(self, count: int) -> list[Way]:
        """Return the next ``count`` plans, the fastest first; fewer if no entry is left.

        Plans with slices that were not requested are kept if they are enough faster than the fastest plan without slices.
        """
        plans, sliced = self.plans, self.sliced
        while (self.queue or self.aside) and len(plans) < count:
            if not self.queue:
                self.queue, self.aside, self._effort = self.aside, [], float("inf")
            bound, serial, entry = heapq.heappop(self.queue)
            proposed = self._proposes_slices and not _run_of(entry).units.are_whole
            if proposed and (plans or len(sliced) == count):
                self.rejected[SLOWER] += _count([(bound, serial, entry)])
                continue
            if isinstance(entry, Way):
                if proposed:
                    sliced.append(entry)
                else:
                    if not plans:
                        plans += self._worth_slicing(sliced, entry.seconds)
                    plans.append(entry)
                continue
            self._looked_at += 1
            tell(partial(_standing, len(plans), count, self._looked_at))
            if isinstance(entry, CandidateGroup | FamilyCandidate) and not self._affords(entry):
                heapq.heappush(self.aside, (bound, next(self._serial), entry))
            elif isinstance(entry, CandidateGroup):
                self._run_orders(entry)
            elif isinstance(entry, FamilyCandidate):
                self._vary(entry)
            else:
                self._price(entry)
        if not plans:
            plans += sliced
        self.rejected[SLOWER] += len(plans[count:])
        return plans[:count]

    def so_far(self, count: int) -> list[Way]:
        """Return the ``count`` fastest plans that are priced, after an interrupt. Others may be faster."""
        waiting = [entry for *_, entry in self.queue if isinstance(entry, Way)]
        self.queue = [item for item in self.queue if not isinstance(item[-1], Way)]
        plans = sorted([*(self.plans or self.sliced), *waiting], key=lambda way: way.seconds)
        self.rejected[SLOWER] += len(plans[count:])
        return plans[:count]

    def _worth_slicing(self, sliced: list[Way], seconds: float) -> list[Way]:
        """Return the plans with slices that are enough faster than the fastest plan without them, which takes ``seconds``."""
        worth = [way for way in sliced if way.seconds < seconds * (1 - LEAST_SLICED_GAIN)]
        self.rejected[LITTLE] += len(sliced) - len(worth)
        return worth

    def search(self, plans: list[Way], seconds: float) -> Iterator[Way]:
        """Yield plans with searched orders, for the groups with the lowest bounds that leave a gain over ``plans``.

        There are at most three searches, and each ends after ``seconds`` seconds. One that finds no order is skipped.
        """
        slowest = plans[-1].seconds if plans else float("inf")
        reached: dict[int, float] = {}
        for way in plans:
            reached[id(way.step)] = min(way.seconds, reached.get(id(way.step), float("inf")))
        hopeful = [
            group
            for group in sorted(self._groups, key=lambda group: group.bound)
            if group.variant in (None, IN_PAIRS)
            and not is_stocks(group.run)
            and group.step.placement.replicas == 1
            and self._refusal_of(group.run, AUTO, group.variant) is None
            and group.bound < min(slowest, reached.get(id(group.step), slowest)) * (1 - _WORTH_SEARCHING)
            and 3 * len(group.run.units) * group.step.placement.num_stages <= _LARGEST_SEARCH
        ]
        for number, group in enumerate(hopeful[:_SEARCHES], start=1):
            p, m = group.run.parallelism.pp, group.run.parallelism.microbatches
            try:
                of_all = f"search {number} of {min(len(hopeful), _SEARCHES)}"
                with doing(f"searching an order for p = {p}, m = {m}, {of_all}"):
                    options = {
                        "seconds": seconds,
                        "period": group.run.schedule.overlap_steps,
                        "slices": group.run.units.parts,
                    }
                    request = Request.for_search(MemoryCap(group.step.room(self._memory), True), options)
                    request = replace(request, pairs=group.run.pairs)
                    knowledge = Knowledge(group.step.costs, placement=group.step.placement)
                    choice = choose(request, Shape(p, None, m), knowledge)
            except PipememError as error:
                logger.info("no order found: %s", error)
                continue
            if (made := self._plan_of_schedule(FamilyCandidate(group, Order(AUTO)), choice.schedule)) is not None:
                yield made

    def _put(self, seconds: float, entry: Run | CandidateGroup | FamilyCandidate | Way) -> None:
        """Put an entry into the queue, by its time or lower bound in seconds.

        A bound sums the same seconds in another order, and rounding may make it greater than the time. So it is lowered
        slightly.
        """
        if not isinstance(entry, Way):
            seconds *= 1 - _ROUNDING
        heapq.heappush(self.queue, (seconds, next(self._serial), entry))

    def _price(self, run: Run) -> None:
        varies = not (run.schedule.overlap_steps or not run.units.are_whole or hides_messages(run))
        for placement, candidates in orders(run, self.limits, self.rejected).items():
            if run.schedule.overlap_steps and placement.replicas > 1:
                self.rejected[WAITS] += len(candidates)
                continue
            if run.pairs:
                if self.limits.admits(variant=IN_PAIRS.name):
                    self._bound(run, placement, candidates, IN_PAIRS)
                continue
            if self.limits.admits(variant=PLAIN):
                self._bound(run, placement, candidates, None)
            for variant in variants() if varies and placement.replicas == 1 and run.parallelism.pp > 1 else ():
                is_whole = run.model.tower is not None and variant.cuts_vocabulary
                if self.limits.admits(variant=variant.name) and not is_whole:
                    self._bound(run, placement, candidates, variant)
        for base, makespan, peaks in asynchronous(run, self.limits, self._slowdown, self.rejected) if varies else ():
            self._wait(self._plan(base, None, OrderPrice(makespan, peaks)))

    def _refusal_of(self, run: Run, schedule: str, variant: Variant | None) -> PipememError | None:
        """Return the error by which a start refuses the flags of a run for a schedule with a variant, from a cache."""
        if run.parallelism.pp == 1 or is_stocks(run):
            return None
        cut, choice = run.parallelism, run.schedule
        are_several = tuple(size > 1 for size in (cut.micro_batch, cut.tp, cut.cp, cut.ep, cut.dp))
        key = schedule, variant and variant.name, choice.recompute, choice.slices, repr(run.flags), are_several
        if key not in self._refusals:
            named = replace(choice, name=schedule)
            self._refusals[key] = self._refusal(replace(run, schedule=variant.choice(named) if variant else named))
        return self._refusals[key]

    def _step(self, run: Run, placement: Placement, variant: Variant | None) -> PlannedStep:
        """Predict the step of a run on a placement with a variant."""
        own = run if variant is None else replace(run, schedule=variant.choice(run.schedule))
        return run_step(own, placement, slowdown=self._slowdown)

    def _bound(self, run: Run, placement: Placement, candidates: list[Order], variant: Variant | None) -> None:
        """Queue the orders of a placement with a variant that a start accepts, by a lower bound of their seconds."""
        refusals = [self._refusal_of(run, order.name, variant) for order in candidates]
        self.rejected.update(str(error) for error in refusals if error is not None)
        candidates = [order for order, error in zip(candidates, refusals, strict=True) if error is None]
        if not candidates:
            return
        step = self._step(run, placement, variant)
        room = step.room(self._memory)
        if min(room) <= 0:
            self.rejected[TOO_MUCH_STATIC] += len(candidates)
            return
        m, units, pairs = run.parallelism.microbatches, run.units, variant is IN_PAIRS
        if step.placement.replicas > 1:  # the orders decide how replicas share the microbatches
            free = m * sum(step.work_seconds) * (1 - pairs * step.exchange_share) / step.placement.num_devices
        elif run.schedule.overlap_steps:  # the other bounds hold for steps that end together
            free = m * _busiest(step)
        else:
            free = lower_bound(step.placement, units, step.costs, pairs=pairs)
            free = max(free, m * _busiest(step, units))
        bound = free
        if variant is not None and variant.frees_memory:
            if any(step.saved_bytes[stage] > room[device] for stage, device in enumerate(step.placement.devices)):
                self.rejected[TOO_MUCH_KEPT] += len(candidates)
                return
        elif step.placement.replicas == 1:
            try:
                bound = max(free, lower_bound(step.placement, units, step.costs, room, pairs=pairs))
                if run.schedule.overlap_steps:
                    bound = free
            except PipememError:
                self.rejected[TOO_MUCH_KEPT] += len(candidates)
                return
        group = CandidateGroup(run, step, tuple(candidates), variant, bound + step.outside_seconds, bound - free)
        self._groups.append(group)
        self._put(group.bound, group)

    def _run_orders(self, group: CandidateGroup) -> None:
        for order in group.orders:
            try:
                if group.variant is None:
                    self._wait(self._run_order(group, order))
                else:
                    self._consider(group, group.variant, order)
            except PipememError:
                self.rejected[f"{order.name} has no schedule for the number of pipeline ranks or microbatches"] += 1

    def _wait(self, made: Way | None) -> None:
        if made is None:
            self.rejected[TOO_HIGH] += 1
        else:
            self._put(made.seconds, made)

    def _run_order(self, group: CandidateGroup, order: Order) -> Way | None:
        """Return the plan of an order; ``None`` if it does not fit into the memory."""
        cut, units = group.run.parallelism, group.run.units
        if units.are_whole and "costs" not in family(order.name).options:
            return self._plan(
                FamilyCandidate(group, order), None, self._measured(group, order, moves_weights(group.run))
            )

        way = self._plan_of_variant(FamilyCandidate(group, order), cut.microbatches)
        if way is None or units.are_whole:
            return way
        return replace(way, passes=None)  # its name and the number of slices are enough

    def _measured(self, group: CandidateGroup, order: Order, moves_weights: bool) -> OrderPrice:
        """Return the time and peaks of an order without a variant, from a cache. W may move with ``moves_weights``.

        Offload and both algorithms of vocabulary parallelism start from the same order.
        """
        cut, costs = group.run.parallelism, group.step.costs
        if costs.have_exchanges:
            costs = costs.of_computing(group.step.placement)
        key = (order, cut.pp, cut.microbatches, moves_weights, replay_key(costs))
        if key not in self._times:
            passes = (order.name, cut.pp, cut.microbatches, order.chunks, costs)
            self._times[key] = measured(*passes, group.run.schedule.overlap_steps, moves_weights)
        return self._times[key]

    def _consider(self, group: CandidateGroup, variant: Variant, order: Order) -> None:
        """Queue the variant of an order, with the time of the order alone as a lower bound.

        Reject it if it is to free memory and the order fits without it, or if it frees none and the order does not fit.
        """
        seconds = self._measured(group, order, False).seconds
        peaks = self._measured(group, order, moves_weights(group.run) and not variant.cuts_vocabulary).peak_bytes
        if variant.frees_memory and self._fits(group, peaks):
            self.rejected[f"{variant.name} is not needed, because the schedule fits into memory without it"] += 1
        elif not variant.frees_memory and not self._fits(group, peaks):
            self.rejected[TOO_HIGH] += 1
        else:
            self._put(max(group.bound, seconds + group.step.outside_seconds), FamilyCandidate(group, order))

    def _affords(self, entry: CandidateGroup | FamilyCandidate) -> bool:
        """Return whether to try an entry now, or later because its offload takes long to plan.

        Planning takes longest with many chunks. Trying an order now lowers the effort that is left.
        """
        group = entry.group if isinstance(entry, FamilyCandidate) else entry
        if (
            group.variant is None
            or not group.variant.frees_memory
            or (isinstance(entry, FamilyCandidate) and entry.simulates_all)
        ):
            return True
        placement = group.step.placement
        effort = 3 * _short(group.run) * placement.num_stages * placement.num_chunks
        if effort > self._effort:
            return False
        if isinstance(entry, FamilyCandidate):
            self._effort -= effort
        return True

    def _vary(self, base: FamilyCandidate) -> None:
        """Simulate the variant of an order, and queue its plan or count its rejection.

        With few microbatches, queue the order again with a lower bound: each further microbatch of the run adds the
        busiest device's work to the time.
        """
        most = base.group.run.parallelism.microbatches
        microbatches = most if base.simulates_all else _short(base.group.run)
        group, order, variant = base.group, base.order, base.group.variant
        assert variant is not None
        try:
            way = self._plan_of_variant(base, microbatches)
        except PipememError as error:
            self.rejected[f"{variant.name} cannot be combined with {order.name}: {error}"] += 1
            return
        if way is not None and variant is IN_PAIRS and way.passes is not None and not way.passes.pairs:
            self.rejected[NO_PAIRS] += 1
            return
        if way is not None and microbatches < most:
            makespan = way.makespan + (most - microbatches) * _busiest(group.step)
            self._put(makespan + group.step.outside_seconds, replace(base, simulates_all=True))
        else:
            self._wait(way)

    def _plan_of_variant(self, base: FamilyCandidate, microbatches: int) -> Way | None:
        """Return a plan for an order with its variant; ``None`` if it does not fit into the memory.

        A long step is predicted from shorter ones, and its plan has no list of actions.
        """
        run, step = base.group.run, base.group.step
        build = partial(build_order, run, base.order, step, step.room(self._memory), base.group.variant)
        if 3 * microbatches * run.units.parts * step.placement.num_stages <= MOST_ACTIONS:
            return self._plan_of_schedule(base, build(microbatches))
        overlaps = run.schedule.overlap_steps

        def replay(count: int) -> Replay:
            return Replay(build(count))

        price = extended(replay, step.costs, run.parallelism.pp, microbatches, overlaps)
        return self._plan(base, None, price)

    def _plan_of_schedule(self, base: FamilyCandidate, schedule: Schedule) -> Way | None:
        """Return a plan for a schedule that no family's name describes; ``None`` if it does not fit into the memory."""
        costs, overlaps = base.group.step.costs, base.group.run.schedule.overlap_steps
        return self._plan(base, schedule, Replay(schedule).timing(costs, overlaps).price)

    def _plan(self, base: FamilyCandidate, schedule: Schedule | None, price: OrderPrice) -> Way | None:
        """Return a plan with this time and these peaks; ``None`` if it does not fit into the memory.

        ``schedule`` is ``None`` if a family's name describes the order, or if the order is too long to list.
        """
        group, step = base.group, base.group.step
        if not self._fits(group, price.peak_bytes):
            return None
        name = PLAIN if group.variant is None else group.variant.name
        more = {"variant": name, "passes": schedule, "memory_seconds": group.memory_seconds}
        return Way.of(_configured(base), base.order, step, price, **more)

    def _fits(self, group: CandidateGroup, peaks: Sequence[float]) -> bool:
        return max(group.step.held(peaks)) <= self._memory


def _standing(plans: int, count: int, looked_at: int) -> str:
    return f"{looked_at:,} combinations looked at, {plans} of {count} plans found"


def _short(run: Run) -> int:
    """Return the number of microbatches of the shortest step by which the run's step can be predicted."""
    return shortest(run.parallelism.pp, run.parallelism.microbatches)


def _busiest(step: PlannedStep, units: Units = WHOLE) -> float:
    """Return the seconds that the busiest device computes per microbatch, including vocabulary passes.

    For orders with pairs, the exchanges of experts' tokens are left out.

    The step is priced for the parts that ``units`` has.
    """
    costs = step.costs.of_computing(step.placement) if step.costs.have_exchanges else step.costs
    prices, vocabulary = costs.seconds(step.placement, units), costs.vocabulary
    cut = {} if vocabulary is None else vocabulary.seconds(step.placement.num_devices)
    n = units.parts
    return max(
        sum(sum(prices[k][s * n : (s + 1) * n]) for k in (Kind.F, Kind.I, Kind.W) for s in stages)
        + sum(seconds[device] for kind, seconds in cut.items() if kind is not Kind.LOSS)
        for device, stages in enumerate(step.placement.stages)
    )


def _run_of(entry: Run | CandidateGroup | FamilyCandidate | Way) -> Run:
    return entry if isinstance(entry, Run) else entry.group.run if isinstance(entry, FamilyCandidate) else entry.run


def _count(entries: Sequence[Entry]) -> int:
    return sum(len(entry.orders) if isinstance(entry, CandidateGroup) else 1 for _, _, entry in entries)


def _configured(base: FamilyCandidate) -> Run:
    """Return the run with this order's schedule, and with a layout if its stages differ from Megatron's default cut.

    A hybrid model in a pipeline always gets its pattern, cut into the stages. Without a pipeline, or with messages
    hidden within layers, the schedule is Megatron's own.
    """
    group, order = base.group, base.order
    # Without a pipeline Megatron takes its own step, which our schedules do not replace.
    choice = replace(group.run.schedule, name=order.name)
    if group.run.parallelism.pp == 1 or is_stocks(group.run):
        choice = replace(choice, name=STOCK, overlap_steps=False)
    if group.variant is not None:
        choice = group.variant.choice(choice)
    cut = replace(group.run.parallelism, chunks=order.chunks)
    return run_layout.with_cut(replace(group.run, parallelism=cut, schedule=choice), group.step.layers)


def check_asynchronous(run: Run, name: str) -> None:
    """Raise an UnsupportedError if the asynchronous schedule ``name`` cannot train a run's model or batch."""
    check_batch(name, run.parallelism.pp, run.parallelism.microbatches)
    if run.model.tied and not updates_per_batch(name):
        raise UnsupportedError("tied-embedding", TIED)
