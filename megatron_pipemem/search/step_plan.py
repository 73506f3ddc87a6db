"""Plan one training step with unequal microbatches: the order of the microbatches, and of every device's actions.

A plan starts from a schedule (the *base*) and a few orders of the microbatches: from short to long, from long to short,
and with the longest ones in the middle. Each order is tried in the base and in greedy schedules. Then two methods
alternate. One varies the order of microbatches and keeps the order of actions. The other makes a new greedy schedule
for the order of microbatches.
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

from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.schedule.action import PLAIN, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import rare_collection
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search.order_variation import Order, Variation, random_move

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
    ``costs`` have the weights of the microbatches in arrival order. ``caps`` are in the unit of the costs' memory.
    """

    def __init__(self, base: Schedule, costs: Costs, caps: Sequence[float]) -> None:
        self._base, weights = base, costs.microbatch
        assert weights is not None
        placement = base.placement
        kinds = {(kind, stage) for order in base.orders for kind, stage, _ in order}
        self._split = [(Kind.I, stage) in kinds for stage in range(placement.num_stages)]
        self._trains = any(kind is not Kind.F for kind, _ in kinds)
        changes, nothing = costs.memory_changes(placement), (0.0,) * placement.num_stages
        unit = costs.memory_unit(placement)
        self._changes = {kind: [each * unit for each in changes.get(kind, nothing)] for kind in PLAIN}
        prices, microbatches = ActionPrices(base, costs), range(base.num_microbatches)
        self._seconds = {
            kind: [[prices.of(kind, stage, k) for k in microbatches] for stage in range(placement.num_stages)]
            for kind in PLAIN
        }
        self._tokens, self._caps = weights.tokens, [loosened(cap) for cap in caps]
        devices = placement.devices
        links = list(zip(devices, devices[1:], strict=False))
        self._there = [*(costs.link_seconds(a, b) for a, b in links), 0.0]
        self._back = [0.0, *(costs.link_seconds(b, a) for a, b in links)]
        takes, grows = self._changes[Kind.F], self._changes[Kind.I]
        more = [max(0.0, each) if is_split else 0.0 for each, is_split in zip(grows, self._split, strict=True)]
        self._spare = [each + also for each, also in zip(takes, more, strict=True)]
        self._whole = [
            sum(takes[each] for each in stages) + max(more[each] for each in stages) for stages in placement.stages
        ]

    def run(self, order: Sequence[int], ahead: Ahead = None) -> Dispatched | None:
        """Return the greedy schedule of this order of microbatches; ``None`` if the caps block a device.

        ``order`` lists indices of microbatches in the weights. ``ahead`` has the most forwards per device that may
        wait for their backward; with ``None`` only the caps limit them. The code is one function because searches spend
        most of their time in it.
        """
        stages_of, device_of, caps = self._base.placement.stages, self._base.placement.devices, self._caps
        last, m, trains, split = len(device_of) - 1, len(order), self._trains, self._split
        tokens = [self._tokens[each] for each in order]
        forward, inputs, later, full = ([[row[k] for k in order] for row in self._seconds[kind]] for kind in PLAIN)
        takes, keeps, frees, gives = (self._changes[kind] for kind in PLAIN)
        spare = self._spare
        # Per microbatch, the room for younger ones on a device if older ones were gone and all its own chunks must fit.
        slack = [[cap - each * whole for each in tokens] for cap, whole in zip(caps, self._whole, strict=True)]
        ready_f, ready_b = [[math.inf] * m for _ in device_of], [[math.inf] * m for _ in device_of]
        ready_f[0] = [0.0] * m
        done_f, done_b, done_w = ([0] * len(device_of) for _ in range(3))
        held, busy = [0.0] * len(stages_of), [0.0] * len(stages_of)
        ran: list[list[tuple[Kind, int, int]]] = [[] for _ in stages_of]
        left = sum(1 if not trains else 3 if each else 2 for each in split) * m
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
                room = caps[device] - held[device]
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
            held[device] += change * tokens[k]
            busy[device] = end
            ran[device].append((kind, chosen, k))
            left -= 1
            heappush(events, (end, device))
        return None if left else Dispatched(max(busy), ran)

    def schedule(self, found: Dispatched) -> Schedule:
        """Return the result of ``run`` as a ``Schedule``."""
        orders = tuple(tuple(starmap(Action, order)) for order in found.orders)
        return replace(self._base, orders=orders)


SECONDS = 0.05
_SEED = 0
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
    parallelism, replicas, slices) only the microbatches get a new order. The result is validated.

    ``cap`` is in the unit of the costs' memory. By default, it is the peaks of the base in arrival order. The search
    ends after ``seconds``, but a first plan may take longer for many devices and microbatches. Two searches that end
    before this time give the same plan. Raise an UnsupportedError for an asynchronous schedule, and a MemoryCapError
    if no tried order keeps the cap.
    """
    started = time.perf_counter()
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
    weights = costs.microbatch or MicrobatchWeights((1.0,) * base.num_microbatches)
    search = _Search(base, replace(costs, microbatch=weights), weights, cap, started + seconds)
    return search.run()


class _Found(NamedTuple):
    """An order of microbatches, a schedule for it within the caps, and the makespan in seconds (``value``)."""

    value: float
    order: Order
    schedule: Schedule


class _Search:
    """The search for a plan. It ends before ``deadline`` (by ``time.perf_counter``), with time left for the proof."""

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
        """Return the seconds of every microbatch, summed over all devices."""
        seconds = self._costs.seconds(self._base.placement, self._base.slices)
        kinds = [(sum(seconds[kind]), self._weights.seconds_of(kind)) for kind in (Kind.F, Kind.I, Kind.W)]
        return [sum(price * weights[k] for price, weights in kinds) for k in range(len(self._weights))]

    def _has_time(self, steps: float = 0.0) -> bool:
        """Return whether there is time left to simulate the base ``steps`` times."""
        return time.perf_counter() + steps * self._pace < self._deadline

    def _take(self, found: _Found) -> None:
        if self._best is None or found.value < self._best.value:
            self._best = found

    def _reorder_actions(self, starts: Sequence[Order]) -> None:
        """Improve the best greedy schedule and the base in turn, by varying the order of their microbatches.

        ``starts`` are the orders to begin with. The best result is kept, and nothing is returned. For every improved
        order of microbatches new greedy schedules are made.
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
        """Return the fastest of the greedy schedules for these limits and orders, which are tried while there is time.

        The schedule is also kept if it is the best so far. Return ``None`` if the caps block all. If nothing better
        than the arrival order is known yet, go on without a time limit until one keeps the caps.
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
        """Return ``begin``, improved by random swaps and moves of microbatches that keep or shorten the makespan.

        Every tried order gets a greedy schedule, with one of ``limits`` in turn. ``begin`` itself is not changed.
        ``None`` stays ``None``.
        """
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
        """Run rounds until they stop helping or time is up. Keep the fastest order within the caps.

        Return whether ``value`` has become smaller.
        """
        before, stale = variation.value, 0
        while stale < _ROUNDS and self._has_time():
            stale = 0 if variation.round() else stale + 1
        makespan, order = variation.fitting
        if makespan < math.inf:
            self._take(_Found(makespan, order, variation.schedule))
        return variation.value < before


def _starts(work: Sequence[float]) -> Iterator[Order]:
    """Yield orders of microbatches to start from, the most promising first, given the seconds of each (``work``).

    In the first orders work rises to a peak and then falls. So the step begins and ends with short microbatches, and
    neighbours are similar. If the peak comes later, devices hold fewer large microbatches at once.
    """
    rising = sorted(range(len(work)), key=work.__getitem__)
    for share in (4, 2, 10):
        falling = rising[1::share]
        kept = set(falling)
        yield (*(each for each in rising if each not in kept), *reversed(falling))
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
