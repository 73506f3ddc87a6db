"""Plan one step whose microbatches are not alike: in which order they run, and every device's actions.

Plans start from a few orders of the microbatches, ascending, descending and rising to a peak, in the base schedule and in
greedy ones. Then an order is varied within the actions it has, many variations at once, and actions are made anew for it, in
turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import NamedTuple

from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.bounds import lower_bound
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.core.microbatches import MicrobatchWeights
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import peaks, simulate
from megatron_pipemem.schedule.core.validator import validate
from megatron_pipemem.schedule.search.many_orders import ManyOrders
from megatron_pipemem.schedule.search.step_dispatch import PLAIN, Dispatcher, Rule

SECONDS = 0.05
_SEED = 0
# Variations tried at once: a try takes as long as there are actions one after another, and hardly longer for more orders.
_AT_ONCE = 96
_STEPS_FURTHER = 6
# A try by the simulator takes as long as that of all the others.
_SIMULATED = 4
# An order that exceeds its cap by a share is worse by so many times this share: variations may pass through it.
_PENALTY = 3.0
# Rounds of variations, and then of new actions, without progress, after which a search ends by itself.
_ROUNDS, _KICKS = 6, 60
# Times what simulating the base takes, to prove and to simulate the result.
_TO_FINISH = 3.0

Order = tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """Say how to run a step.

    Args:
        order: the microbatch, by its place in arrival, that every position runs.
        schedule: of the placement of the base; it numbers microbatches by position.
        makespan: seconds, simulated.
        arrival_makespan: seconds of the base with its microbatches in arrival order.
        bound: seconds that no order of these microbatches and of their actions undercuts in this placement and cap.
    """

    order: Order
    schedule: Schedule
    makespan: float
    arrival_makespan: float
    bound: float


def plan_step(base: Schedule, costs: Costs, cap: MemoryCap | None = None, seconds: float = SECONDS) -> StepPlan:
    """Return an order of a step's microbatches, and a schedule for it, that is faster than the base in arrival order.

    It is never slower where the base in arrival order keeps the cap. The actions of every device are ordered anew where the
    base is a plain one: forwards and backwards, split on the stages on which the base splits them, on one replica of the
    model. Otherwise (recomputation, transfers to the host, vocabulary parallelism, replicas, sequence pieces) only the
    microbatches change places. What is returned has been validated.

    Args:
        base: a schedule that is flushed at the end of the step.
        costs: what its actions take and hold; ``microbatch`` in arrival order.
        cap: the most every device may hold, in the unit of the costs' memory; ``None``: what the base holds on that device
            in arrival order.
        seconds: after which the search ends. A first plan may take longer where p and m are large. Two searches that time
            does not end give the same plan.

    Raises:
        UnsupportedError: the base updates weights within the step, or the cap is in another unit than the costs, or a
            microbatch alone exceeds it.
        MemoryCapError: no plan that was tried keeps the cap.
        CostsError: the costs do not fit the base.
    """
    started = time.perf_counter()
    if base.updates is not None:
        raise UnsupportedError(
            f"{base.name} updates weights between the microbatches of a step, so that their order is part of training; plan "
            "the steps of a synchronous schedule"
        )
    if cap is not None and cap.in_bytes != (costs.memory is not None):
        units = ("activation units", "bytes")
        raise UnsupportedError(
            f"the cap is in {units[cap.in_bytes]} and the memory of the costs in {units[not cap.in_bytes]}; give both in one"
        )
    weights = costs.microbatch or MicrobatchWeights((1.0,) * base.num_microbatches)
    search = _Search(base, replace(costs, microbatch=weights), cap, started + seconds)
    return search.run()


class _Found(NamedTuple):
    """Hold an order of microbatches, a schedule for it, and its makespan, or more where it exceeds the caps."""

    value: float
    order: Order
    schedule: Schedule


class _Search:
    """Look for plans until a moment of ``time.perf_counter``, which leaves time to prove the result."""

    def __init__(self, base: Schedule, costs: Costs, cap: MemoryCap | None, deadline: float) -> None:
        self._base, self._costs, self._weights = base, costs, costs.microbatch
        begun = time.perf_counter()
        self._arrival_makespan, held = simulate(base, costs).makespan, peaks(base, costs)
        self._deadline = deadline - _TO_FINISH * (time.perf_counter() - begun)
        self._caps = held if cap is None else cap.of(base.num_devices)
        self._random = Random(_SEED)
        self._best: _Found | None = None
        if all(now <= loosened(most) for now, most in zip(held, self._caps, strict=True)):
            self._best = _Found(self._arrival_makespan, tuple(range(base.num_microbatches)), base)
        kinds = {action.kind for order in base.orders for action in order}
        self._is_plain = kinds <= PLAIN and base.placement.replicas == base.pieces == 1
        self._arrival = self._best

    def run(self) -> StepPlan:
        """Search, prove the best plan, and return it."""
        bound = self._bound()
        starts = list(_starts(self._work()))
        if self._is_plain:
            self._reorder_actions(starts)
        elif self._best is None or self._has_time():
            self._vary(self._base, starts)
        if self._best is None:
            raise MemoryCapError(
                f"no order of the microbatches of {self._base.name} that was tried keeps the memory cap; raise the cap, or "
                "split the largest microbatch"
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
        seconds = self._costs.seconds(self._base.placement)
        kinds = [(sum(seconds[kind]), self._weights.seconds_of(kind)) for kind in (Kind.F, Kind.I, Kind.W)]
        return [sum(price * weights[k] for price, weights in kinds) for k in range(len(self._weights))]

    def _has_time(self) -> bool:
        return time.perf_counter() < self._deadline

    def _take(self, found: _Found) -> None:
        if self._best is None or found.value < self._best.value:
            self._best = found

    def _reorder_actions(self, starts: Sequence[Order]) -> None:
        """Search orders of microbatches and of actions in turn: one is varied, then the other made anew for it."""
        dispatcher = Dispatcher(self._base, self._costs, self._caps)
        rules = list(_rules(self._base))
        found = self._dispatched(dispatcher, product(rules, starts))
        if self._has_time():
            found.append(self._vary(self._base, starts))
        stale = 0
        while found and stale < _KICKS and self._has_time():
            before = math.inf if self._best is None else self._best.value
            current = min(found, key=lambda each: each.value)
            varied = self._vary(current.schedule, [current.order])
            found = [varied, *self._dispatched(dispatcher, product(rules, [varied.order]))]
            if self._best is not None and self._best.value < before:
                stale = 0
                continue
            stale += 1
            kicked = list((self._best or varied).order)
            for _ in range(1 + stale % _STEPS_FURTHER):
                kicked = self._move()(kicked)
            found = self._dispatched(dispatcher, product(rules, [tuple(kicked)]))

    def _dispatched(self, dispatcher: Dispatcher, tries: Iterator[tuple[Rule, Order]]) -> list[_Found]:
        """Return schedules made greedily: at least until one is there, and then while there is time."""
        all_found = []
        for rule, order in tries:
            if self._best is not None and not self._has_time():
                break
            found = dispatcher.run(order, rule)
            if found is not None:
                all_found.append(_Found(found.makespan, order, dispatcher.schedule(found)))
                self._take(all_found[-1])
        return all_found

    def _vary(self, schedule: Schedule, starts: Sequence[Order]) -> _Found:
        """Vary the order of the microbatches of a schedule, from the best of some starts, and return the best order found.

        Every round tries single moves, and first several of those moves one after another that the round before gained by.
        """
        evaluate, at_once = self._evaluator(schedule)
        moves: list[Callable[[list[int]], list[int]]] = []
        tries, current, value, stale = list(starts), starts[0], math.inf, 0
        while True:
            values = evaluate(tries)
            at = min(range(len(tries)), key=values.__getitem__)
            stale = stale + 1 if values[at] >= value else 0
            gains = (
                sorted((each, move) for move, each in enumerate(values[-len(moves) :]) if each < value) if moves else []
            )
            if values[at] <= value:
                current, value = tries[at], values[at]
            if stale == _ROUNDS or not self._has_time():
                break
            further, tries = list(current), []
            for _, move in gains[1:_STEPS_FURTHER]:
                further = moves[move](further)
                tries.append(tuple(further))
            moves = [self._move() for _ in range(at_once)]
            tries += [tuple(move(list(current))) for move in moves]
        found = _Found(value, current, schedule)
        costs = replace(self._costs, microbatch=self._weights.reordered(current))
        if all(held <= loosened(cap) for held, cap in zip(peaks(schedule, costs), self._caps, strict=True)):
            self._take(found)
        return found

    def _evaluator(self, schedule: Schedule) -> tuple[Callable[[Sequence[Order]], list[float]], int]:
        """Return what tells the values of several orders of microbatches, and how many it takes at once."""
        if schedule.offloads:
            return lambda orders: [self._value(schedule, order) for order in orders], _SIMULATED
        many = ManyOrders(schedule, self._costs, self._caps)

        def values(orders: Sequence[Order]) -> list[float]:
            makespans, excess = many.try_all(orders)
            return [_valued(*each) for each in zip(makespans.tolist(), excess.tolist(), strict=True)]

        return values, _AT_ONCE

    def _value(self, schedule: Schedule, order: Order) -> float:
        costs = replace(self._costs, microbatch=self._weights.reordered(order))
        shares = zip(peaks(schedule, costs), self._caps, strict=True)
        return _valued(simulate(schedule, costs).makespan, max(held / cap - 1 if cap else 0.0 for held, cap in shares))

    def _move(self) -> Callable[[list[int]], list[int]]:
        """Return what lets two microbatches change places, or moves one elsewhere."""
        m = len(self._weights)
        first, second, swaps = self._random.randrange(m), self._random.randrange(m), self._random.random() < 0.5

        def moved(order: list[int]) -> list[int]:
            order = list(order)
            if swaps:
                order[first], order[second] = order[second], order[first]
            else:
                order.insert(second, order.pop(first))
            return order

        return moved


def _valued(makespan: float, excess: float) -> float:
    return makespan * (1 + _PENALTY * excess) if excess > loosened(1.0) - 1 else makespan


def _starts(work: Sequence[float]) -> Iterator[Order]:
    """Yield orders of microbatches to start from, given the work of each.

    Rising to a peak and falling again, the pipeline fills and runs dry with short ones, and neighbours are alike. Several peaks
    keep the largest apart, which hold the most.
    """
    arrival = range(len(work))
    rising = sorted(arrival, key=work.__getitem__)
    for peaks_of in (1, 2, 3):
        hands = [rising[first::peaks_of] for first in range(peaks_of)]
        yield tuple(each for hand in hands for each in (*hand[::2], *hand[1::2][::-1]))
    yield tuple(rising)
    yield tuple(rising[::-1])
    yield tuple(arrival)


def _rules(base: Schedule) -> Iterator[Rule]:
    """Yield the rules by which actions are ordered: as many forwards ahead as the cap admits, and as many as in the base."""
    ahead = []
    for order in base.orders:
        now = most = 0
        for action in order:
            now += (action.kind is Kind.F) - (action.kind in (Kind.I, Kind.B))
            most = max(most, now)
        ahead.append(most)
    chunks = base.placement.num_chunks
    yield Rule()
    if chunks > 1:
        yield Rule(depth=base.num_devices)
    yield Rule(depth=base.num_devices / 2 if chunks > 1 else 0.0, ahead=tuple(ahead))
