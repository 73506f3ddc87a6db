"""Plan one step whose microbatches are not alike: in which order they run, and every device's actions.

Plans start from a few orders of the microbatches, ascending, descending and rising to a peak, in the base schedule and in
greedy ones. Then an order is varied within the actions it has, many variations at once, and actions are made anew for it, in
turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from random import Random
from typing import NamedTuple

from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.schedule.action import PLAIN, Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import rare_collection
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search.order_variation import Order, Variation, random_move
from megatron_pipemem.search.step_dispatch import Ahead, Dispatcher

SECONDS = 0.05
_SEED = 0
# Rounds of variations, and new schedules for orders moved at random, without progress, after which a search ends by itself.
_ROUNDS, _KICKS = 6, 60
_CLIMB = 200
# Times what simulating the base takes: to prove and to simulate the result, and to begin with variations.
_TO_FINISH, _TO_START = 2.5, 2.5


@dataclass(frozen=True)
class StepPlan:
    """Say how to run a step."""

    order: Order  # the microbatch, by its place in arrival, that every position runs
    schedule: Schedule  # of the placement of the base; it numbers microbatches by position
    makespan: float  # seconds, simulated
    arrival_makespan: float  # seconds of the base with its microbatches in arrival order
    bound: float  # seconds that no order of these microbatches and of their actions undercuts in this placement and cap


@rare_collection()
def plan_step(base: Schedule, costs: Costs, cap: MemoryCap | None = None, seconds: float = SECONDS) -> StepPlan:
    """Return an order of a step's microbatches, and a schedule for it, that is faster than the base in arrival order.

    It is never slower where the base in arrival order keeps the cap. The actions of every device are ordered anew where the
    base is a plain one: forwards and backwards, split on the stages on which the base splits them, on one replica of the
    model. Otherwise (recomputation, transfers to the host, vocabulary parallelism, replicas, sequence slices) only the
    microbatches change places. What is returned has been validated.

    ``cap``: the most every device may hold, in the unit of the costs' memory; ``None`` for what the base holds on that
    device in arrival order. ``seconds``: after which the search ends; a first plan may take longer where p and m are large.
    Two searches that time does not end give the same plan.
    """
    started = time.perf_counter()
    if base.updates is not None:
        raise UnsupportedError(
            "conflicting-features",
            f"{base.name} updates weights between the microbatches of a step, so that their order is part of training; plan "
            "the steps of a synchronous schedule",
        )
    if cap is not None and cap.in_bytes != (costs.memory is not None):
        units = ("activation units", "bytes")
        raise UnsupportedError(
            "unit-mismatch",
            f"the cap is in {units[cap.in_bytes]} and the memory of the costs in {units[not cap.in_bytes]}; give both in one",
        )
    weights = costs.microbatch or MicrobatchWeights((1.0,) * base.num_microbatches)
    search = _Search(base, replace(costs, microbatch=weights), weights, cap, started + seconds)
    return search.run()


class _Found(NamedTuple):
    """Hold an order of microbatches, a schedule for it, and its makespan, or more where it exceeds the caps."""

    value: float
    order: Order
    schedule: Schedule


class _Search:
    """Look for plans until a moment of ``time.perf_counter``, which leaves time to prove the result."""

    def __init__(
        self, base: Schedule, costs: Costs, weights: MicrobatchWeights, cap: MemoryCap | None, deadline: float
    ) -> None:
        self._base, self._costs, self._weights = base, costs, weights
        begun = time.perf_counter()
        in_arrival = simulate(base, costs)
        self._arrival_makespan, held = in_arrival.makespan, in_arrival.peaks
        self._pace = time.perf_counter() - begun
        self._deadline = deadline - _TO_FINISH * self._pace
        self._caps = held if cap is None else cap.of(base.num_devices)
        self._random = Random(_SEED)
        self._best: _Found | None = None
        self._by_arrival = tuple(range(base.num_microbatches))
        if all(now <= loosened(most) for now, most in zip(held, self._caps, strict=True)):
            self._best = _Found(self._arrival_makespan, self._by_arrival, base)
        kinds = {action.kind for order in base.orders for action in order}
        self._is_plain = kinds <= set(PLAIN) and base.placement.replicas == base.slices == 1
        self._arrival = self._best

    def run(self) -> StepPlan:
        """Search, prove the best plan, and return it."""
        bound = self._bound()
        starts = list(_starts(self._work()))
        if self._is_plain:
            self._reorder_actions(starts)
        elif self._best is None or self._has_time():
            self._vary(self._variation(self._base, [*starts, self._by_arrival]))
        if self._best is None:
            raise MemoryCapError(
                "cap-unreachable",
                f"no order of the microbatches of {self._base.name} that was tried keeps the memory cap; raise the cap, or "
                "split the largest microbatch",
            )
        plan = self._proved(self._best, bound)
        if self._arrival is not None and plan.makespan > plan.arrival_makespan:
            return self._proved(self._arrival, bound)  # sums over replicas, which variations leave out, took longer
        return plan

    def _proved(self, found: _Found, bound: float) -> StepPlan:
        costs = replace(self._costs, microbatch=self._weights.reordered(found.order))
        validate(found.schedule, costs, self._caps)
        makespan = simulate(found.schedule, costs).makespan
        return StepPlan(found.order, found.schedule, makespan, self._arrival_makespan, bound)

    def _bound(self) -> float:
        base = self._base
        if self._is_plain and self._trains:
            size, splits = base.num_microbatches, base.splits_backward
            return lower_bound(base.placement, size, self._costs, self._caps, splits=splits)
        return simulate(base, self._costs).ideal

    @property
    def _trains(self) -> bool:
        return any(action.kind is not Kind.F for action in self._base.orders[0])

    def _work(self) -> list[float]:
        """Return the seconds of every microbatch on all devices together."""
        seconds = self._costs.seconds(self._base.placement, self._base.slices)
        kinds = [(sum(seconds[kind]), self._weights.seconds_of(kind)) for kind in (Kind.F, Kind.I, Kind.W)]
        return [sum(price * weights[k] for price, weights in kinds) for k in range(len(self._weights))]

    def _has_time(self, steps: float = 0.0) -> bool:
        """Return whether there is time for what takes so many times as long as simulating the base."""
        return time.perf_counter() + steps * self._pace < self._deadline

    def _take(self, found: _Found) -> None:
        if self._best is None or found.value < self._best.value:
            self._best = found

    def _reorder_actions(self, starts: Sequence[Order]) -> None:
        """Vary the order in the best schedule made greedily, and in the base, in turn; and make schedules anew for what comes
        of it.
        """
        dispatcher, limits = Dispatcher(self._base, self._costs, self._caps), list(_limits(self._base))
        made = self._dispatched(dispatcher, product(limits, starts))
        in_made = in_base = None
        kicks = 0
        while kicks < _KICKS and self._has_time(_TO_START):
            if made is not None and (in_made is None or made.schedule is not in_made.schedule):
                in_made = self._variation(made.schedule, [made.order])
            gained = in_made is not None and self._vary(in_made)
            if in_base is None and self._has_time(_TO_START):
                in_base = self._variation(self._base, [*starts, self._by_arrival])
            gained = (in_base is not None and self._vary(in_base)) or gained
            varied = [each for each in (in_made, in_base) if each is not None]
            anew = self._dispatched(dispatcher, product(limits, [each.order for each in varied]))
            if anew is not None and (in_made is None or anew.value < in_made.value):
                made = anew
            elif not gained:
                kicks += 1
                made = self._climbed(dispatcher, limits, anew or made)

    def _dispatched(self, dispatcher: Dispatcher, tries: Iterable[tuple[Ahead, Order]]) -> _Found | None:
        """Return the fastest of schedules made greedily: of those there is time for, and of one that keeps the caps in any case
        where nothing better than arrival order is known.
        """
        fastest, of = None, None
        for ahead, order in tries:
            if (fastest is not None or self._best is not self._arrival) and not self._has_time():
                break
            found = dispatcher.run(order, ahead)
            if found is not None and (fastest is None or found.makespan < fastest.makespan):
                fastest, of = found, order
        if fastest is None or of is None:
            return None
        result = _Found(fastest.makespan, of, dispatcher.schedule(fastest))
        self._take(result)
        return result

    def _climbed(self, dispatcher: Dispatcher, limits: Sequence[Ahead], begin: _Found | None) -> _Found | None:
        """Move single microbatches, and keep what makes greedy schedules faster."""
        if begin is None:
            return None
        best, value, order = None, begin.value, begin.order
        for number in range(_CLIMB):
            if not self._has_time():
                break
            tried = random_move(len(order), self._random)(order)
            found = dispatcher.run(tried, limits[number % len(limits)])
            if found is not None and found.makespan <= value:
                best, value, order = found, found.makespan, tried
        if best is None:
            return begin
        result = _Found(value, order, dispatcher.schedule(best))
        self._take(result)
        return result

    def _variation(self, schedule: Schedule, starts: Sequence[Order]) -> Variation:
        return Variation(schedule, self._costs, self._caps, starts, self._random)

    def _vary(self, variation: Variation) -> bool:
        """Vary an order until nothing is gained any more, and keep the best; return whether anything was gained."""
        before, stale = variation.value, 0
        while stale < _ROUNDS and self._has_time():
            stale = 0 if variation.round() else stale + 1
        makespan, order = variation.fitting
        if makespan < math.inf:
            self._take(_Found(makespan, order, variation.schedule))
        return variation.value < before


def _starts(work: Sequence[float]) -> Iterator[Order]:
    """Yield orders of microbatches to start from, given the work of each, the most promising first.

    Rising to a peak and falling again, the pipeline fills and runs dry with short ones, and neighbours are alike. The later the
    peak, the fewer large ones are on their way at once.
    """
    rising = sorted(range(len(work)), key=work.__getitem__)
    for share in (4, 2, 10):
        falling = rising[1::share]
        kept = set(falling)
        yield (*(each for each in rising if each not in kept), *reversed(falling))
    yield tuple(rising)
    yield tuple(reversed(rising))


def _limits(base: Schedule) -> Iterator[Ahead]:
    """Yield how many forwards every device may run ahead: as many as the cap admits, and in a base of one stage per device also
    at most as many as there.
    """
    yield None
    if base.placement.num_chunks == 1:
        ahead = []
        for order in base.orders:
            waiting = accumulate((a.kind is Kind.F) - (a.kind in (Kind.I, Kind.B)) for a in order)
            ahead.append(max(waiting, default=0))
        yield ahead
