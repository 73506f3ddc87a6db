"""Plan one training step with unequal microbatches: the order of the microbatches, and of every device's actions.

A plan starts from a schedule (the *base*) and a few orders of the microbatches: from short to long, from long to short,
and with the longest ones in the middle. Each order is tried in the base and in greedy schedules. Then two methods
alternate. One varies the order of microbatches and keeps the order of actions: the times of many variations are arrays,
so that one walk over the actions simulates them all. The other makes a new greedy schedule for the best variation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, product, starmap
from random import Random
from typing import NamedTuple

import numpy as np

from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.schedule.action import PLAIN, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.display import rare_collection
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.validator import validate

Order = tuple[int, ...]
"""For every position in the step, the index of its microbatch in arrival order."""
Ahead = Sequence[int] | None


class Dispatched(NamedTuple):
    """A greedy schedule: its makespan in seconds, and per device its actions in order.

    An action is ``(kind, stage, position)``, with the position of the microbatch in the planned order.
    """

    makespan: float
    orders: list[list[tuple[Kind, int, int]]]


class Dispatcher:
    """Make greedy schedules of one step for any order of its microbatches.

    A free device runs a ready backward or else a ready forward, that of the oldest microbatch first, and a W if neither
    may run. A forward starts only if the cap has room for it, and for the forwards on later chunks of every
    microbatch that the device has begun.

    ``base`` has only ``PLAIN`` actions and one replica. Greedy schedules have I and W on the stages where it has.
    ``costs`` have the factors of the microbatches in arrival order. ``caps`` are in the unit of the costs' memory.
    """

    def __init__(self, base: Schedule, costs: Costs, caps: Sequence[float]) -> None:
        self._base, weights = base, costs.microbatch
        assert weights is not None
        placement = base.placement
        kinds = {(kind, stage) for order in base.orders for kind, stage, _ in order}
        self._split = [(Kind.I, stage) in kinds for stage in range(placement.num_stages)]
        self._has_backwards = any(kind is not Kind.F for kind, _ in kinds)
        changes, nothing = costs.memory_changes(placement), (0.0,) * placement.num_stages
        unit = costs.memory_unit(placement)
        self._changes = {kind: [change * unit for change in changes.get(kind, nothing)] for kind in PLAIN}
        prices, microbatches = ActionPrices(base, costs), range(base.num_microbatches)
        self._seconds: dict[Kind, list[list[float]]] = {}
        for kind in PLAIN:
            stages = range(placement.num_stages)
            self._seconds[kind] = [[prices.of(kind, stage, k) for k in microbatches] for stage in stages]
        self._tokens, self._caps = weights.tokens, [loosened(cap) for cap in caps]
        devices = placement.devices
        links = list(zip(devices, devices[1:], strict=False))
        self._there = [*(costs.link_seconds(a, b) for a, b in links), 0.0]
        self._back = [0.0, *(costs.link_seconds(b, a) for a, b in links)]
        takes, grows = self._changes[Kind.F], self._changes[Kind.I]
        more = [max(0.0, growth) if is_split else 0.0 for growth, is_split in zip(grows, self._split, strict=True)]
        self._spare = [forward + growth for forward, growth in zip(takes, more, strict=True)]
        self._of_device: list[float] = []
        for chunks in placement.stages:
            self._of_device.append(sum(takes[s] for s in chunks) + max(more[s] for s in chunks))

    def run(self, order: Sequence[int], ahead: Ahead = None) -> Dispatched | None:
        """Return the greedy schedule of this order of microbatches; ``None`` if the caps block a device.

        ``order`` lists indices of microbatches in the weights. ``ahead`` has the most forwards per device that may
        wait for their backward; with ``None`` only the caps limit them. The code is one function because searches spend
        most of their time in it.
        """
        stages_of, device_of, caps = self._base.placement.stages, self._base.placement.devices, self._caps
        last, m, trains, split = len(device_of) - 1, len(order), self._has_backwards, self._split
        tokens = [self._tokens[k] for k in order]
        forward, inputs, later, full = ([[row[k] for k in order] for row in self._seconds[kind]] for kind in PLAIN)
        takes, keeps, frees, gives = (self._changes[kind] for kind in PLAIN)
        spare = self._spare
        # Per microbatch, the room for younger ones on a device if older ones were gone and all its own chunks must fit.
        slack = [
            [cap - weight * chunks for weight in tokens] for cap, chunks in zip(caps, self._of_device, strict=True)
        ]
        ready_f, ready_b = [[math.inf] * m for _ in device_of], [[math.inf] * m for _ in device_of]
        ready_f[0] = [0.0] * m
        done_f, done_b, done_w = ([0] * len(device_of) for _ in range(3))
        memory, busy = [0.0] * len(stages_of), [0.0] * len(stages_of)
        ran: list[list[tuple[Kind, int, int]]] = [[] for _ in stages_of]
        passes_of_stage = [3 if is_split else 2 for is_split in split] if trains else [1] * len(split)
        left = sum(passes_of_stage) * m
        events = [(0.0, device) for device in range(len(stages_of))]
        while events:
            now, device = heappop(events)
            if busy[device] > now:
                continue
            stages, kind, chosen, best = stages_of[device], Kind.F, -1, math.inf
            for stage in stages:
                k = done_b[stage]
                if k < m and k < best and ready_b[stage][k] <= now:
                    chosen, best = stage, k
            if chosen >= 0:
                kind = Kind.I if split[chosen] else Kind.B
            elif ahead is None or sum(done_f[s] - done_b[s] for s in stages) < ahead[device]:
                room = caps[device] - memory[device]
                for stage in stages:
                    k = done_f[stage]
                    if k < m and ready_f[stage][k] <= now and k < best:
                        if tokens[k] * spare[stage] > room:
                            continue
                        older = slack[device][done_f[stages[-1]] : k]
                        if older and tokens[k] * takes[stage] > min(older):
                            continue
                        chosen, best = stage, k
            if chosen < 0:
                for stage in stages:
                    if done_w[stage] < done_b[stage] and split[stage] and done_w[stage] < best:
                        chosen, best, kind = stage, done_w[stage], Kind.W
                if chosen < 0:
                    continue
            if kind is Kind.F:
                k = done_f[chosen]
                done_f[chosen] = k + 1
                end, change, after = now + forward[chosen][k], takes[chosen], chosen + 1
                for before in range(done_f[stages[-1]], k):
                    slack[device][before] -= change * tokens[k]
                if chosen == last:
                    ready_b[chosen][k] = end if trains else math.inf
                else:
                    ready_f[after][k] = end + self._there[chosen] * tokens[k]
                    heappush(events, (ready_f[after][k], device_of[after]))
            elif kind is Kind.W:
                k = done_w[chosen]
                done_w[chosen] = k + 1
                end, change = now + later[chosen][k], frees[chosen]
            else:
                k = done_b[chosen]
                done_b[chosen] = k + 1
                is_split = kind is Kind.I
                end = now + (inputs if is_split else full)[chosen][k]
                change = (keeps if is_split else gives)[chosen]
                if chosen:
                    ready_b[chosen - 1][k] = end + self._back[chosen] * tokens[k]
                    heappush(events, (ready_b[chosen - 1][k], device_of[chosen - 1]))
            memory[device] += change * tokens[k]
            busy[device] = end
            ran[device].append((kind, chosen, k))
            left -= 1
            heappush(events, (end, device))
        return None if left else Dispatched(max(busy), ran)

    def schedule(self, dispatched: Dispatched) -> Schedule:
        """Return the result of ``run`` as a ``Schedule``."""
        orders = tuple(tuple(starmap(Action, order)) for order in dispatched.orders)
        return replace(self._base, orders=orders)


class ManyOrders:
    """Simulate a schedule for many orders of its microbatches at once.

    The schedule must not offload: the order in which copies use their channel depends on times. ``costs`` have the
    factors of the microbatches in arrival order. ``caps`` are in the unit of the costs' memory.
    """

    def __init__(self, schedule: Schedule, costs: Costs, caps: Sequence[float]) -> None:
        assert costs.microbatch is not None and not schedule.offloads
        graph = Dependencies.of_schedule(schedule)
        prices, units, microbatches = ActionPrices(schedule, costs), schedule.units, range(schedule.num_microbatches)
        self._lanes, rows = len(graph.lanes), dict[tuple[Kind, int, int], int]()
        self._steps = []
        """For every action: its node, lane and waits, its row in ``_seconds``, and its position in the step."""
        for node, lane, waits, _ in graph.graph.steps(graph.walk.nodes):
            kind, stage, unit = graph.actions[node]
            row = rows.setdefault((kind, stage, units.part(unit)), len(rows))
            self._steps.append((node, lane, waits, row, units.microbatch(unit)))
        self._positions = [units.microbatch(action.microbatch) for action in graph.actions]
        self._seconds = np.array(
            [[prices.of_node(kind, stage, units.of(k)[part]) for k in microbatches] for kind, stage, part in rows]
        )
        self._lags = np.array([[prices.of_message(link, units.of(k)[0]) for k in microbatches] for link in graph.links])
        self._tokens = np.array(costs.microbatch.tokens)
        self._changes = list(_memory_changes(schedule, costs, caps))

    def try_all(self, orders: Sequence[Order]) -> tuple[np.ndarray, np.ndarray]:
        """Return the makespan of every order, and its largest excess of a device over its cap.

        The makespan is in seconds, without the sums of gradients over replicas. The excess is a share of the cap, and
        at most 0 if all devices keep theirs.
        """
        chosen = np.array(orders).T  # [positions, orders]
        seconds = self._seconds[:, chosen]
        lags = self._lags[:, chosen] if self._lags.any() else None
        free = [np.zeros(len(orders))] * self._lanes
        ends: dict[int, np.ndarray] = {}
        for node, lane, waits, row, position in self._steps:
            start = free[lane]
            for needed, link in waits:
                arrival = ends[needed] if lags is None else ends[needed] + lags[link, self._positions[needed]]
                start = np.maximum(start, arrival)
            ends[node] = free[lane] = start + seconds[row, position]
        excess = np.full(len(orders), -np.inf)
        tokens = self._tokens[chosen]
        for changes, positions, cap in self._changes:
            memory = np.cumsum(changes * tokens[positions], axis=0).max(axis=0)
            np.maximum(excess, (memory - cap) / (cap or 1.0), out=excess)
        return np.max(free, axis=0), excess


def _memory_changes(
    schedule: Schedule, costs: Costs, caps: Sequence[float]
) -> Iterator[tuple[np.ndarray, list[int], float]]:
    """Yield, per device, the changes of memory by its actions as a column, their positions in the step, and its cap."""
    placement, units = schedule.placement, schedule.units
    by_kind = costs.memory_changes(placement, schedule.recomputed, units)
    unit = costs.memory_unit(placement, units)
    for order, cap in zip(schedule.orders, caps, strict=True):
        actions = [action for action in order if action.kind in by_kind]
        if actions:
            changes = [[by_kind[kind][units.place(stage, number)] * unit] for kind, stage, number in actions]
            yield np.array(changes), [units.microbatch(action.microbatch) for action in actions], cap


class _OneByOne:
    """``ManyOrders`` for schedules that offload: the simulator runs one order after another."""

    def __init__(self, schedule: Schedule, costs: Costs, caps: Sequence[float]) -> None:
        self._schedule, self._costs, self._caps = schedule, costs, caps

    def try_all(self, orders: Sequence[Order]) -> tuple[np.ndarray, np.ndarray]:
        weights, makespans, excesses = self._costs.microbatch, [], []
        assert weights is not None
        for order in orders:
            costs = replace(self._costs, microbatch=weights.reordered(order))
            memory = zip(peaks(self._schedule, costs), self._caps, strict=True)
            excesses.append(max((peak - cap) / (cap or 1.0) for peak, cap in memory))
            makespans.append(simulate(self._schedule, costs).makespan)
        return np.array(makespans), np.array(excesses)


SECONDS = 0.05
_SEED = 0
# Variations per round. The time of a round depends on the number of actions, and hardly on that of variations.
_AT_ONCE = 96
# Variations per round of a schedule that offloads: the time of a round is the sum of their times.
_OFFLOADING = 4
# The value of an order grows by this factor times its excess over the cap, so variations may pass through such orders.
_PENALTY = 3.0
# Rounds of variations, and new schedules for randomly moved orders, without progress, after which a search ends.
_ROUNDS, _KICKS = 6, 60
_CLIMB = 200
# Multiples of the time to simulate the base: to prove and simulate the result, and to begin with variations.
_TO_FINISH, _TO_START = 2.5, 2.5


@dataclass(frozen=True)
class StepPlan:
    """The plan of one training step with unequal microbatches."""

    order: Order  # for every position, the index of its microbatch in arrival order
    schedule: Schedule  # with the placement of the base; microbatches are numbered by position
    makespan: float  # seconds, simulated
    arrival_makespan: float  # seconds of the base with its microbatches in arrival order
    bound: float  # seconds that no order of these microbatches and their actions can beat with this placement and cap


@rare_collection()
def plan_step(base: Schedule, costs: Costs, cap: MemoryCap | None = None, seconds: float = SECONDS) -> StepPlan:
    """Search for an order of a step's microbatches, and for a schedule, that make the step as short as possible.

    If the base in arrival order keeps the cap, the plan is not slower than it. If the base has only F, I, W and B
    on one replica of the model, its actions get a new order, too. Otherwise (recomputation, offload, vocabulary
    parallelism, replicas, parts of microbatches) only the microbatches get a new order. The result is validated.

    ``cap`` is in the unit of the costs' memory. By default, it is the peaks of the base in arrival order. The search
    ends after ``seconds`` of processor time, but a first plan may take longer for many devices and microbatches. Two
    searches that end before this time give the same plan. Raise an UnsupportedError for an asynchronous schedule, and
    a MemoryCapError if no tried order keeps the cap.
    """
    started = time.thread_time()
    if base.updates is not None:
        raise UnsupportedError(
            "conflicting-features",
            f"{base.name} updates weights between the microbatches of a step, so their order is part of training; plan the "
            "steps of a synchronous schedule",
        )
    if cap is not None and cap.in_bytes != (costs.memory is not None):
        units = ("activation units", "bytes")
        raise UnsupportedError(
            "unit-mismatch",
            f"the memory cap is in {units[cap.in_bytes]}, and the memory of the costs in {units[not cap.in_bytes]}; "
            "give both in the same unit",
        )
    weights = costs.microbatch or MicrobatchFactors((1.0,) * base.num_microbatches)
    search = _Search(base, replace(costs, microbatch=weights), weights, cap, started + seconds)
    return search.run()


class _Candidate(NamedTuple):
    """An order of microbatches, a schedule for it within the caps, and the makespan in seconds."""

    makespan: float
    order: Order
    schedule: Schedule


class _Variation:
    """The search for the best order of microbatches for one schedule, whose actions stay in their order.

    Attributes:
        order: the order with the smallest ``value``. It may exceed the caps.
        value: the makespan of ``order`` in seconds, times a factor above 1 if it exceeds the caps.
        fitting: the fastest order within the caps; ``None`` if there is none.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, caps: Sequence[float], starts: Sequence[Order], random: Random
    ) -> None:
        self.schedule, self._random = schedule, random
        self._orders = (_OneByOne if schedule.offloads else ManyOrders)(schedule, costs, caps)
        self._at_once = _OFFLOADING if schedule.offloads else _AT_ONCE
        self.order, self.value = starts[0], math.inf
        self.fitting: _Candidate | None = None
        self._try(starts)

    def round(self) -> bool:
        """Try random moves in the best order, and return whether the best value has become smaller."""
        before = self.value
        self._try([random_move(self.order, self._random) for _ in range(self._at_once)])
        return self.value < before

    def _try(self, orders: Sequence[Order]) -> None:
        makespans, excess = self._orders.try_all(orders)
        fits = excess <= loosened(1.0) - 1
        values = np.where(fits, makespans, makespans * (1 + _PENALTY * excess))
        best = len(orders) - 1 - int(values[::-1].argmin())  # of equal values the last, so that variations go on
        if values[best] <= self.value:
            self.order, self.value = orders[best], float(values[best])
        fastest = int(np.where(fits, makespans, math.inf).argmin())
        if fits[fastest] and (self.fitting is None or makespans[fastest] < self.fitting.makespan):
            self.fitting = _Candidate(float(makespans[fastest]), orders[fastest], self.schedule)


def random_move(order: Order, random: Random) -> Order:
    """Return the order after a random move, which swaps two microbatches or puts one in another position."""
    first, second, swaps = random.randrange(len(order)), random.randrange(len(order)), random.random() < 0.5
    moved = list(order)
    if swaps:
        moved[first], moved[second] = moved[second], moved[first]
    else:
        moved.insert(second, moved.pop(first))
    return tuple(moved)


class _Search:
    """The search for a plan. It ends before ``deadline`` (by ``time.thread_time``), with time left for the proof."""

    def __init__(
        self, base: Schedule, costs: Costs, weights: MicrobatchFactors, cap: MemoryCap | None, deadline: float
    ) -> None:
        self._base, self._costs, self._weights = base, costs, weights
        started = time.thread_time()
        self._in_arrival = simulate(base, costs)
        self._simulation_seconds = time.thread_time() - started
        self._deadline = deadline - _TO_FINISH * self._simulation_seconds
        in_arrival_order = self._in_arrival.peaks
        self._caps = in_arrival_order if cap is None else cap.of(base.num_devices)
        self._random = Random(_SEED)
        self._best: _Candidate | None = None
        self._by_arrival = tuple(range(base.num_microbatches))
        if all(peak <= loosened(most) for peak, most in zip(in_arrival_order, self._caps, strict=True)):
            self._best = _Candidate(self._in_arrival.makespan, self._by_arrival, base)
        kinds = {action.kind for order in base.orders for action in order}
        self._is_plain = kinds <= set(PLAIN) and base.placement.replicas == base.units.parts == 1
        self._arrival = self._best

    def run(self) -> StepPlan:
        """Search for the best plan, prove it, and return it; raise a MemoryCapError if no tried order keeps the cap."""
        bound = self._bound()
        starts = list(_starts(self._work()))
        if self._is_plain:
            self._reorder_actions(starts)
        elif self._best is None or self._has_time():
            self._vary(self._variation(self._base, [*starts, self._by_arrival]))
        if self._best is None:
            raise MemoryCapError(
                "cap-unreachable",
                f"no tried order of the microbatches of {self._base.name} keeps the memory cap; raise the cap, or make "
                "the largest microbatch smaller",
            )
        plan = self._proved(self._best, bound)
        if self._arrival is not None and plan.makespan > plan.arrival_makespan:
            return self._proved(self._arrival, bound)  # variations leave out sums over replicas, which took longer
        return plan

    def _proved(self, candidate: _Candidate, bound: float) -> StepPlan:
        costs = replace(self._costs, microbatch=self._weights.reordered(candidate.order))
        validate(candidate.schedule, costs, self._caps)
        makespan = simulate(candidate.schedule, costs).makespan
        return StepPlan(candidate.order, candidate.schedule, makespan, self._in_arrival.makespan, bound)

    def _bound(self) -> float:
        base = self._base
        if self._is_plain and any(action.kind is not Kind.F for action in base.orders[0]):
            size, splits = base.num_microbatches, base.splits_backward
            return lower_bound(base.placement, size, self._costs, self._caps, splits=splits)
        return self._in_arrival.ideal

    def _work(self) -> list[float]:
        """Return the seconds of every microbatch, summed over all devices."""
        seconds = self._costs.seconds(self._base.placement, self._base.units)
        kinds = [(sum(seconds[kind]), self._weights.seconds_of(kind)) for kind in (Kind.F, Kind.I, Kind.W)]
        return [sum(price * weights[k] for price, weights in kinds) for k in range(len(self._weights))]

    def _has_time(self, steps: float = 0.0) -> bool:
        """Return whether there is time left to simulate the base ``steps`` times."""
        return time.thread_time() + steps * self._simulation_seconds < self._deadline

    def _keep_if_faster(self, candidate: _Candidate) -> None:
        if self._best is None or candidate.makespan < self._best.makespan:
            self._best = candidate

    def _reorder_actions(self, starts: Sequence[Order]) -> None:
        """Improve the best greedy schedule and the base in turn, by varying the order of their microbatches.

        The best result is kept, and nothing is returned. For every improved order of microbatches new greedy schedules
        are made.
        """
        dispatcher, limits = Dispatcher(self._base, self._costs, self._caps), list(_limits(self._base))
        greedy = self._dispatched(dispatcher, product(limits, starts))
        of_greedy = of_base = None
        kicks = 0
        while kicks < _KICKS and self._has_time(_TO_START):
            if greedy is not None and (of_greedy is None or greedy.schedule is not of_greedy.schedule):
                of_greedy = self._variation(greedy.schedule, [greedy.order])
            gained = of_greedy is not None and self._vary(of_greedy)
            if of_base is None and self._has_time(_TO_START):
                of_base = self._variation(self._base, [*starts, self._by_arrival])
            gained = (of_base is not None and self._vary(of_base)) or gained
            varied = [variation.order for variation in (of_greedy, of_base) if variation is not None]
            following = self._dispatched(dispatcher, product(limits, varied))
            if following is not None and (of_greedy is None or following.makespan < of_greedy.value):
                greedy = following
            elif not gained:
                kicks += 1
                greedy = self._climbed(dispatcher, limits, following or greedy)

    def _dispatched(self, dispatcher: Dispatcher, tries: Iterable[tuple[Ahead, Order]]) -> _Candidate | None:
        """Return the fastest of the greedy schedules for these limits and orders, which are tried while there is time.

        The schedule is also kept if it is the best so far. Return ``None`` if the caps block all. If nothing better
        than the arrival order is known yet, go on without a time limit until one keeps the caps.
        """
        fastest: tuple[Dispatched, Order] | None = None
        for ahead, order in tries:
            if (fastest is not None or self._best is not self._arrival) and not self._has_time():
                break
            dispatched = dispatcher.run(order, ahead)
            if dispatched is not None and (fastest is None or dispatched.makespan < fastest[0].makespan):
                fastest = dispatched, order
        return None if fastest is None else self._greedy(dispatcher, *fastest)

    def _climbed(self, dispatcher: Dispatcher, limits: Sequence[Ahead], begin: _Candidate | None) -> _Candidate | None:
        """Return ``begin``, improved by random swaps and moves of microbatches that keep or shorten the makespan.

        Every tried order gets a greedy schedule, with one of ``limits`` in turn. ``begin`` itself is not changed.
        ``None`` stays ``None``.
        """
        if begin is None:
            return None
        best, makespan, order = None, begin.makespan, begin.order
        for number in range(_CLIMB):
            if not self._has_time():
                break
            moved = random_move(order, self._random)
            dispatched = dispatcher.run(moved, limits[number % len(limits)])
            if dispatched is not None and dispatched.makespan <= makespan:
                best, makespan, order = dispatched, dispatched.makespan, moved
        return begin if best is None else self._greedy(dispatcher, best, order)

    def _greedy(self, dispatcher: Dispatcher, dispatched: Dispatched, order: Order) -> _Candidate:
        """Return a greedy schedule as a candidate, and keep it if it is the best so far."""
        candidate = _Candidate(dispatched.makespan, order, dispatcher.schedule(dispatched))
        self._keep_if_faster(candidate)
        return candidate

    def _variation(self, schedule: Schedule, starts: Sequence[Order]) -> _Variation:
        return _Variation(schedule, self._costs, self._caps, starts, self._random)

    def _vary(self, variation: _Variation) -> bool:
        """Run rounds until they stop helping or time is up; return whether ``value`` has become smaller."""
        before, stale = variation.value, 0
        while stale < _ROUNDS and self._has_time():
            stale = 0 if variation.round() else stale + 1
        if variation.fitting is not None:
            self._keep_if_faster(variation.fitting)
        return variation.value < before


def _starts(work: Sequence[float]) -> Iterator[Order]:
    """Yield orders of microbatches to start from, the most promising first, given the seconds of each (``work``).

    In the first orders work rises to a peak and then falls. So the step begins and ends with short microbatches, and
    neighbours are similar. If the peak comes later, devices hold fewer large microbatches at once.
    """
    rising = sorted(range(len(work)), key=work.__getitem__)
    for share in (4, 2, 10):
        falling = rising[1::share]
        before_peak = [k for at, k in enumerate(rising) if at % share != 1]
        yield (*before_peak, *reversed(falling))
    yield tuple(rising)
    yield tuple(reversed(rising))


def _limits(base: Schedule) -> Iterator[Ahead]:
    """Yield limits for ``ahead`` of ``Dispatcher.run``: ``None``, and for a base with one stage per device its own.

    These are, for each device, the most forwards of the base that wait for their backward.
    """
    yield None
    if base.placement.num_chunks == 1:
        ahead = []
        for order in base.orders:
            waiting = accumulate((a.kind is Kind.F) - (a.kind in (Kind.I, Kind.B)) for a in order)
            ahead.append(max(waiting, default=0))
        yield ahead
