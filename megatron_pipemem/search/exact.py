"""Solve tiny problems exactly, by a best-first search over beginnings of a step.

A beginning is the set of passes that have started, with their times. The search extends it by the pass that starts
next. A beginning is described by the number of started passes per class, the times at which devices are free, and the
arrival times of results that are not used yet. If two beginnings have the same passes, and one is no earlier in any of
these times, that one is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from megatron_pipemem.search.improve import Timetable, as_soon_as_possible
from megatron_pipemem.search.problem import INPUT, WEIGHT, Orders, Problem


class Solved(NamedTuple):
    """The result of a finished search."""

    table: Timetable | None  # the shortest timetable; ``None`` if none is below the given length
    states: int  # number of stored beginnings


def solve(problem: Problem, shorter_than: int, most_states: int) -> Solved | None:
    """Find the shortest timetable of the problem with less than ``shorter_than`` ticks, or prove that there is none.

    Return ``None`` if more than ``most_states`` beginnings would be stored. Their number multiplies with every pass,
    and each takes about a tenth of a millisecond on two devices.
    """
    steps = _Steps(problem)
    queue = [(0, 0, 0, steps.start)]
    kept: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    number = 0
    while queue:
        *_, step = heappop(queue)
        if step.counts == steps.sizes:
            return Solved(as_soon_as_possible(problem, steps.orders(step)), number)
        if number and step.times not in kept[step.counts]:
            continue  # a later beginning dominates it
        for longer in steps.grown(step):
            bound = steps.bound(longer)
            if bound >= shorter_than:
                continue
            rivals = kept.setdefault(longer.counts, [])
            if any(_is_no_later(rival, longer.times) for rival in rivals):
                continue
            number += 1
            if number > most_states:
                return None
            rivals[:] = [rival for rival in rivals if not _is_no_later(longer.times, rival)]
            rivals.append(longer.times)
            # Of equal bounds, the beginning with more passes is nearer to its end.
            heappush(queue, (bound, -sum(longer.counts), number, longer))
    return Solved(None, number)


def _is_no_later(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


class _Beginning(NamedTuple):
    """The beginning of a step: the passes that have started. All times are in ticks. See ``_Steps`` for pools."""

    counts: tuple[int, ...]  # per pool, the number of started passes
    free: tuple[int, ...]
    """Per device, the time at which it is free, or the latest start of any pass if that is later. Other passes start
    no sooner."""
    arrivals: tuple[tuple[int, ...], ...]
    """Per pool of F or I, the known arrival times of the inputs of its next passes, raised like ``free``."""
    pool: int = -1  # pool of the last pass
    before: _Beginning | None = None  # the beginning without the last pass

    @property
    def times(self) -> tuple[int, ...]:
        """Return the times by which beginnings with the same passes are compared."""
        return (*self.free, *(time for arrivals in self.arrivals for time in arrivals))


class _Steps:
    """Extend beginnings by a pass, and compute lower bounds of the whole step.

    Passes are grouped in pools. The first pools are the F of every stage in model order, then the I in reverse. So a
    pass of each waits for that of the previous pool. All W of a device with equal time and memory are one pool, and
    run in the order of their I.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        m, way = problem.units.num_microbatches, problem.way
        weights: dict[tuple[int, int, int], list[int]] = {}
        for c in range(WEIGHT, len(problem.device), 3):
            weights.setdefault((problem.device[c], problem.ticks[c], problem.change[c]), []).append(c)
        self._pools = [*([c] for c in way), *weights.values()]
        self._length = len(way)
        first = [pool[0] for pool in self._pools]
        self._device = [problem.device[c] for c in first]
        self._ticks = [problem.ticks[c] for c in first]
        self._change = [problem.change[c] for c in first]
        self._lags = [max((lag for _, lag in problem.waits[c]), default=0) for c in way]
        # Per pool of W, the pools of its I.
        self._sources = [[way.index(c - 1) for c in pool if c % 3 == WEIGHT] for pool in self._pools]
        self._of_device = [[i for i, d in enumerate(self._device) if d == e] for e in range(problem.num_devices)]
        self._forwards = [[i for i in pools if i < self._length // 2] for pools in self._of_device]
        self._inputs = [[i for i in pools if self._length // 2 <= i < self._length] for pools in self._of_device]
        self._tails = [[self._tail(i, m - k) for k in range(m)] for i in range(self._length)]
        self.sizes = tuple(m * len(pool) for pool in self._pools)
        self.start = _Beginning((0,) * len(first), (0,) * problem.num_devices, ((0,) * m, *((),) * (self._length - 1)))

    def _tail(self, pool: int, microbatches: int) -> int:
        """Return the least ticks from the start of a pool's next pass to the end of the step.

        ``microbatches`` have not run this pool's pass yet. A device cannot begin their later passes before the first of
        these microbatches reaches it. After the device has run all of them, the last microbatch still has to reach its
        end.
        """
        begins = list(accumulate((t + lag for t, lag in zip(self._ticks, self._lags[1:], strict=False)), initial=0))
        weight = self._problem.ticks
        end = begins[self._length - 1] + self._ticks[self._length - 1] + weight[WEIGHT]
        longest = end - begins[pool]
        for pools in self._of_device:
            left = [i for i in pools if pool <= i < self._length]
            if not left:
                continue
            head, work, all_work = begins[left[0]] - begins[pool], 0, 0
            for i in left:
                work += self._ticks[i]
                longest = max(longest, head + microbatches * work + end - begins[i] - self._ticks[i])
                c = self._pools[i][0]
                all_work += self._ticks[i] + (weight[c + 1] if c % 3 == INPUT else 0)
            longest = max(longest, head + microbatches * all_work)
        return longest

    def grown(self, step: _Beginning) -> Iterator[_Beginning]:
        """Yield the extended beginning for every pool whose next pass may be the next to start.

        The inputs of the pass must be there or on their way, and its device's cap must have room for it.
        """
        counts = step.counts
        candidates = []
        horizon = None
        for pools, free, cap in zip(self._of_device, step.free, self._problem.caps, strict=True):
            memory = sum(counts[i] * self._change[i] for i in pools)
            most = memory + sum((self.sizes[i] - counts[i]) * self._change[i] for i in pools if self._change[i] > 0)
            for i in pools:
                if i < self._length:
                    if not step.arrivals[i]:
                        continue
                    start = max(free, step.arrivals[i][0])
                else:
                    if counts[i] == sum(counts[source] for source in self._sources[i]):
                        continue
                    start = free
                if memory + max(0, self._change[i]) > cap:
                    continue
                candidates.append((start, i))
                end = start + self._ticks[i]
                # A pass that ends before others begin, and takes no memory from them, can go first.
                if (self._change[i] <= 0 or most <= cap) and (horizon is None or end < horizon):
                    horizon = end
        for start, i in candidates:
            if horizon is None or start < horizon:
                yield self._with(step, start, i)

    def _with(self, step: _Beginning, start: int, pool: int) -> _Beginning:
        end = start + self._ticks[pool]
        counts, free = list(step.counts), [max(start, time) for time in step.free]
        counts[pool] += 1
        free[self._device[pool]] = end
        arrivals = [tuple([max(start, time) for time in times]) for times in step.arrivals]
        if pool < self._length:
            arrivals[pool] = arrivals[pool][1:]
        if pool + 1 < self._length:
            arrivals[pool + 1] += (end + self._lags[pool + 1],)
        return _Beginning(tuple(counts), tuple(free), tuple(arrivals), pool, step)

    def bound(self, step: _Beginning) -> int:
        """Return the ticks that a step with this beginning takes at least."""
        m, counts, earliest = self._problem.units.num_microbatches, step.counts, [0] * self._length
        longest = 0
        for i in range(self._length):
            if counts[i] == m:
                continue
            # Without an arrival, the pool before this one has as many passes left.
            arrival = step.arrivals[i][0] if step.arrivals[i] else earliest[i - 1] + self._ticks[i - 1] + self._lags[i]
            earliest[i] = max(arrival, step.free[self._device[i]])
            longest = max(longest, earliest[i] + self._tails[i][counts[i]])
        for device, (pools, free) in enumerate(zip(self._of_device, step.free, strict=True)):
            left = sum((self.sizes[i] - counts[i]) * self._ticks[i] for i in pools)
            until = min((earliest[i] for i in self._inputs[device] if counts[i] < m), default=free)
            longest = max(longest, free + left + max(0, until - free - self._before_inputs(step, device)))
        return longest

    def _before_inputs(self, step: _Beginning, device: int) -> int:
        """Return the most ticks that a device can compute before its next I: ready W, and forwards within the cap."""
        counts = step.counts
        room = self._problem.caps[device] - sum(counts[i] * self._change[i] for i in self._of_device[device])
        time = 0
        for i in self._of_device[device]:
            if i >= self._length:
                ready = sum(counts[source] for source in self._sources[i]) - counts[i]
                room -= ready * min(0, self._change[i])
                time += ready * self._ticks[i]
        forwards = self._forwards[device]
        least = min(self._change[i] for i in forwards)
        fitting = room // least if least > 0 else len(forwards) * self._problem.units.num_microbatches
        for i in sorted(forwards, key=lambda i: -self._ticks[i]):
            some = min(fitting, self._problem.units.num_microbatches - counts[i])
            fitting -= some
            time += some * self._ticks[i]
        return time

    def orders(self, step: _Beginning) -> Orders:
        """Return every device's passes in order, given a beginning that has all passes of the step."""
        m = self._problem.units.num_microbatches
        pools = []
        while step.before is not None:
            pools.append(step.pool)
            step = step.before
        orders: Orders = [[] for _ in self._of_device]
        counts = [0] * len(self._pools)
        ready: list[list[int]] = [[] for _ in self._pools]
        for i in reversed(pools):
            if i < self._length:
                pass_ = self._pools[i][0] * m + counts[i]
                for pool, sources in enumerate(self._sources):
                    if i in sources:
                        ready[pool].append(pass_ + m)
            else:
                pass_ = ready[i][counts[i]]
            counts[i] += 1
            orders[self._device[i]].append(pass_)
        return orders
