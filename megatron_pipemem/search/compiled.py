"""Justification compiled by numba, where it is installed, with the results of ``improve.justify`` to the tick.

It takes about a twentieth of the time, so a search that polishes its orders tries twenty times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from megatron_pipemem.search import improve
from megatron_pipemem.search.improve import Timetable
from megatron_pipemem.search.problem import Orders, PassTable, Problem

Array = np.ndarray[Any, np.dtype[Any]]


class _Passes(NamedTuple):
    """A ``PassTable`` as arrays of whole numbers."""

    device: Array  # [passes]
    before: Array  # [passes]; -1 is the last entry of ``ends``, the time 0
    ticks: Array  # [passes]
    change: Array  # [passes]
    first_wait: Array  # [passes + 1], the place of a pass's first wait in the next two
    needs: Array  # [waits]
    lags: Array  # [waits]
    caps: Array  # [devices]
    shortest: Array  # [devices]

    @classmethod
    def of(cls, passes: PassTable) -> _Passes:
        price = np.array(passes.price)
        waits = [wait for own in passes.waits for wait in own]
        counts = [0, *(len(own) for own in passes.waits)]
        return cls(
            np.array(passes.device),
            np.array(passes.before),
            np.array(passes.ticks)[price],
            np.array(passes.change)[price],
            np.cumsum(counts),
            np.array([need for need, _ in waits], dtype=np.int64),
            np.array([passes.lags[link] for _, link in waits], dtype=np.int64),
            np.array(passes.caps),
            np.array(passes.shortest),
        )


def earlier(passes: _Passes, starts: Array, frozen: Array) -> tuple[Array, int]:
    """Place all passes in the order of ``starts``, as ``improve.earlier`` does.

    ``frozen`` is true for the passes that move into no gap. Return the new starts and the makespan.
    """
    device_of, before, ticks, change, first_wait, needs, lags, caps, shortest = passes
    count, devices = len(starts), len(caps)
    sizes = np.zeros(devices, dtype=np.int64)
    for pass_ in range(count):
        sizes[device_of[pass_]] += 1
    width = sizes.max() + 2
    # Per device: the memory after every placed pass, and the idle gaps in which its shortest pass fits.
    levels = np.zeros((devices, width), dtype=np.int64)
    heads, tails, places = levels.copy(), levels.copy(), levels.copy()
    placed, gaps, row_ends = np.zeros_like(sizes), np.zeros_like(sizes), np.zeros_like(sizes)
    ends = np.zeros(count + 1, dtype=np.int64)
    for pass_ in np.argsort(starts, kind="mergesort"):
        ready, d, length, delta = ends[before[pass_]], device_of[pass_], ticks[pass_], change[pass_]
        for at in range(first_wait[pass_], first_wait[pass_ + 1]):
            ready = max(ready, ends[needs[at]] + lags[at])
        level, head, tail, place = levels[d], heads[d], tails[d], places[d]
        size, open_gaps = placed[d], gaps[d]
        chosen = open_gaps if frozen[pass_] else np.searchsorted(tail[:open_gaps], ready + length)
        first = 0
        if chosen < open_gaps and delta > 0:
            allowed, reached, least = caps[d] - delta, size, place[chosen]
            while reached and reached >= least and level[reached - 1] <= allowed:
                reached -= 1
            first = reached + 1 if reached or allowed < 0 else 0
        while chosen < open_gaps and not (max(ready, head[chosen]) + length <= tail[chosen] and place[chosen] >= first):
            chosen += 1
        placed[d] += 1
        if chosen == open_gaps:
            begin = row_ends[d]
            if ready > begin:
                if ready - begin >= shortest[d]:
                    head[open_gaps], tail[open_gaps], place[open_gaps] = begin, ready, size
                    gaps[d] += 1
                begin = ready
            level[size] = (level[size - 1] if size else 0) + delta
            row_ends[d] = ends[pass_] = begin + length
            continue
        begin, at = max(ready, head[chosen]), place[chosen]
        for index in range(size, at, -1):
            level[index] = level[index - 1] + delta
        level[at] = (level[at - 1] if at else 0) + delta
        ends[pass_] = end = begin + length
        old_head, old_tail = head[chosen], tail[chosen]
        keeps_left, keeps_right = begin - old_head >= shortest[d], old_tail - end >= shortest[d]
        pieces = int(keeps_left) + int(keeps_right)
        if pieces == 0:
            for index in range(chosen, open_gaps - 1):
                head[index], tail[index], place[index] = head[index + 1], tail[index + 1], place[index + 1]
        elif pieces == 2:
            for index in range(open_gaps, chosen, -1):
                head[index], tail[index], place[index] = head[index - 1], tail[index - 1], place[index - 1]
        gaps[d] = open_gaps + pieces - 1
        if keeps_left:
            head[chosen], tail[chosen], place[chosen] = old_head, begin, at
        if keeps_right:
            last = chosen + pieces - 1
            head[last], tail[last], place[last] = end, old_tail, at + 1
        for index in range(chosen + pieces, gaps[d]):
            place[index] += 1
    moved = ends[:-1] - ticks
    start = moved.min()
    return moved - start, int(row_ends.max() - start)


def after_needs(passes: _Passes, starts: Array, least: Array) -> Array:
    """Return the least numbers that are not below ``least``, and larger than those of the passes that must come before.

    ``starts`` has the starts of all passes in a valid timetable.
    """
    result = np.full(len(starts) + 1, -1)  # the last entry stands for the pass before the first of a class
    for pass_ in np.argsort(starts, kind="mergesort"):
        value = max(least[pass_], result[passes.before[pass_]] + 1)
        for at in range(passes.first_wait[pass_], passes.first_wait[pass_ + 1]):
            value = max(value, result[passes.needs[at]] + 1)
        result[pass_] = value
    return result[:-1]


def as_machine_code[Function: Callable[..., Any]](function: Function) -> Function:
    """Return the function compiled by numba at its first call; the function itself without numba."""
    try:
        from numba import njit
    except ImportError:
        return function
    compiled: Any
    try:
        compiled = njit(cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written
        compiled = njit(function)
    return compiled


@cache
def kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return ``earlier`` and ``after_needs`` as machine code; ``None`` without numba."""
    compiled = as_machine_code(earlier), as_machine_code(after_needs)
    return None if compiled[0] is earlier else compiled


class Justifier:
    """Justifies timetables of one problem that are given by the starts of their passes, an array of ticks."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._passes, self._reversed = _Passes.of(problem.passes), _Passes.of(problem.reversed)
        self._kernels = kernels()
        self.is_compiled = self._kernels is not None

    def twice(self, starts: Array, frozen: Array) -> tuple[Array, int]:
        """Return starts and makespan of a timetable that is justified with ``frozen`` passes, and then without."""
        nothing = np.zeros_like(frozen)
        for fixed in (frozen, nothing):
            late, _ = self._earlier(is_reversed=True, starts=self._mirrored(starts), frozen=fixed)
            starts, makespan = self._earlier(is_reversed=False, starts=self._mirrored(late), frozen=fixed)
        return starts, makespan

    def disturbed(self, starts: Array, rng: np.random.Generator) -> Array | None:
        """Return the starts of a timetable with some passes moved; ``None`` if a device then exceeds its cap.

        Between 2 and 32 % of the passes move, by at most a few times a device's shortest pass.
        """
        share, reach = 0.02 + 0.3 * rng.random() ** 2, max(self._problem.passes.shortest) * rng.uniform(0.5, 3.5)
        moves = rng.uniform(-reach, reach, len(starts)).astype(np.int64)
        moved = starts + np.where(rng.random(len(starts)) < share, moves, 0)
        order = after_needs if self._kernels is None else self._kernels[1]
        nothing = np.zeros(len(starts), dtype=bool)
        result, _ = self._earlier(is_reversed=False, starts=order(self._passes, starts, moved), frozen=nothing)
        return result if self._problem.fits(self._orders(result)) else None

    def timetable(self, starts: Array) -> Timetable:
        return Timetable(self._orders(starts), starts.tolist(), int((starts + self._passes.ticks).max()))

    def _mirrored(self, starts: Array) -> Array:
        """Return the starts that the passes have if time runs backwards."""
        ends = starts + self._passes.ticks
        return ends.max() - ends

    def _earlier(self, *, is_reversed: bool, starts: Array, frozen: Array) -> tuple[Array, int]:
        if self._kernels is not None:
            return self._kernels[0](self._reversed if is_reversed else self._passes, starts, frozen)
        passes = self._problem.reversed if is_reversed else self._problem.passes
        table = improve.earlier(passes, starts.tolist(), set(np.flatnonzero(frozen).tolist()))
        return np.array(table.starts), table.makespan

    def _orders(self, starts: Array) -> Orders:
        orders: Orders = [[] for _ in range(self._problem.num_devices)]
        for pass_ in np.argsort(starts, kind="stable").tolist():
            orders[self._problem.passes.device[pass_]].append(pass_)
        return orders
