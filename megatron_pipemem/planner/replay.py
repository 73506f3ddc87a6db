"""Price long steps by what repeats in them, and one order under many costs.

A planner prices the same order again and again: other tensor parallelism, other microbatches, the same sequence of passes. What
every pass waits for is worked out once; a replay is then one sweep over the passes and agrees with ``simulate``.

The middle of a long step repeats. A device that starts at times ``x`` with the microbatches in flight ends its part of them at
``A(x)``, where adding a constant to all of ``x`` adds it to ``A(x)``. So if all of the devices' passes end later by the same
time in a step that is longer by some microbatches, they do so again for as many microbatches more: the price of a step of any
length follows from two short ones. If passes end later by different times, the step has not come to its rhythm, and twice as
many microbatches are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import isclose, lcm
from typing import NamedTuple

from megatron_pipemem.schedule.action import PLAIN
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Times
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.stream import stream, until_they_repeat

_SHORT = 3  # microbatches per device of the shortest step that may have come to its rhythm
_LONGEST_RHYTHM = 8  # microbatches per device
_SHORT_REPLAYS, _LONG_REPLAYS = 256, 4  # that are kept
MOST_ACTIONS = 300_000
"""Of a step that is built; a longer one is priced by shorter ones."""


class OrderPrice(NamedTuple):
    """Say what a step takes."""

    seconds: float  # of the step; from step to step if no barrier stands between steps
    peaks: tuple[float, ...]  # of every device, the most that it holds


class Timing(NamedTuple):
    """Say how a step of a schedule goes."""

    schedule: Schedule
    price: OrderPrice
    ends: Sequence[Sequence[float]]  # per device, when every action of its order ends

    @classmethod
    def simulated(cls, schedule: Schedule, costs: Costs, overlaps: bool = False) -> Timing:
        """Return the timing of any schedule."""
        timeline = simulate(schedule, costs)
        seconds = stream(schedule, costs, steps=1).period if overlaps else timeline.makespan
        return cls(
            schedule, OrderPrice(seconds, timeline.peaks), [[end for _, end in spans] for spans in timeline.spans]
        )


def priced(run: Callable[[int], Timing], num_devices: int, num_microbatches: int) -> OrderPrice:
    """Return the price of a step of any length.

    A step of up to some eight microbatches per device, or whose middle never comes to a rhythm, is run as a whole; one that
    is too long for that is extended from the longest that was run.
    """
    rhythm, count = _rhythm(num_devices), shortest(num_devices, num_microbatches)
    while 2 * (count + rhythm) < num_microbatches:
        shorter, longer = run(count), run(count + rhythm)
        actions = sum(map(len, longer.schedule.orders))
        if _repeats(shorter, longer) or 2 * actions > MOST_ACTIONS:
            return _extended(shorter, longer, num_microbatches)
        count = _congruent(2 * count, num_microbatches, rhythm)
    return run(num_microbatches).price


def shortest(num_devices: int, num_microbatches: int) -> int:
    """Return the microbatches of the shortest step that tells of a long one."""
    rhythm = _rhythm(num_devices)
    short = _congruent(_SHORT * num_devices, num_microbatches, rhythm)
    return short if 2 * (short + rhythm) < num_microbatches else num_microbatches


def _congruent(least: int, number: int, modulus: int) -> int:
    """Return the least number from ``least`` on that differs from ``number`` by a multiple of ``modulus``."""
    return least + (number - least) % modulus


def _extended(shorter: Timing, longer: Timing, num_microbatches: int) -> OrderPrice:
    """Return the price of a step that goes on like the longer one. Peaks stay, unless all microbatches are held at once."""
    (before, held_before), (after, held_after) = shorter.price, longer.price
    few, many = shorter.schedule.num_microbatches, longer.schedule.num_microbatches
    seconds = after + (num_microbatches - many) / (many - few) * (after - before)
    held = (
        b * num_microbatches / many if isclose(b * few, a * many) else b
        for a, b in zip(held_before, held_after, strict=True)
    )
    return OrderPrice(seconds, tuple(held))


def _rhythm(num_devices: int) -> int:
    """Return a number of microbatches in which the groups of all families are whole: groups of ``p``, or of half as many."""
    whole = lcm(num_devices, -(-num_devices // 2))
    return whole if whole <= _LONGEST_RHYTHM * num_devices else num_devices


def _repeats(shorter: Timing, longer: Timing) -> bool:
    """Return whether the second halves of two steps have the same passes, and the longer ends all of them later by the same."""
    later, rounding = longer.price.seconds - shorter.price.seconds, 1e-9 * longer.price.seconds
    if longer.price.peaks != shorter.price.peaks:
        return False
    for a, b, ends, later_ends in zip(
        shorter.schedule.orders, longer.schedule.orders, shorter.ends, longer.ends, strict=True
    ):
        pairs = zip(reversed(a), reversed(b), reversed(ends), reversed(later_ends), strict=False)
        for mine, other, end, later_end in islice(pairs, len(a) // 2):
            if mine[:2] != other[:2] or not isclose(later_end - end, later, rel_tol=0.0, abs_tol=rounding):
                return False
    return True


class Replay:
    """A schedule of F, I, W and B of whole microbatches, ready to be priced."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._found = found = Dependencies.of_schedule(schedule)
        if error := found.stuck():
            raise error
        self._steps = list(found.graph.steps(found.walk.nodes))

    def makespan(self, costs: Costs) -> float:
        """Return the makespan in seconds."""
        return max(self._run(costs)(self._idle).free)

    def period(self, costs: Costs) -> float:
        """Return the seconds from step to step without a barrier between steps."""
        return self._repeated(costs)[0]

    def timing(self, costs: Costs, overlaps: bool = False) -> Timing:
        """Return the timing of a step. If no barrier stands between steps (``overlaps``), the seconds are from step to
        step.
        """
        seconds, begins = self._repeated(costs) if overlaps else (None, self._idle)
        times = self._run(costs)([begin - min(begins) for begin in begins])
        lanes = self._found.lanes[: self.schedule.num_devices]
        ends = [times.ends[nodes.start : nodes.stop] for nodes in lanes]
        price = OrderPrice(max(times.free) if seconds is None else seconds, self.peaks(costs))
        return Timing(self.schedule, price, ends)

    @property
    def _idle(self) -> tuple[float, ...]:
        return (0.0,) * self.schedule.num_devices

    def _repeated(self, costs: Costs) -> tuple[float, tuple[float, ...]]:
        """Return the seconds from step to step without a barrier, and when the devices begin a step once steps repeat."""
        run, devices = self._run(costs), self.schedule.num_devices
        period, ends = until_they_repeat(self.schedule.name, lambda _, begins: run(begins).free[:devices], self._idle)
        return period, ends[-1]

    def _run(self, costs: Costs) -> Callable[[Sequence[float]], Times]:
        """Return a function that runs a step, from when the devices begin it."""
        costs.require_alike("a replay")
        found, seconds = self._found, costs.seconds(self.schedule.placement)
        prices = [seconds[kind][stage] for kind, stage in found.kinds]
        lags = [costs.link_seconds(*link) for link in found.links]

        def run(begins: Sequence[float]) -> Times:
            times = Times(found.graph, prices, lags, 0.0)
            times.free[: len(begins)] = begins
            times.run(self._steps)
            return times

        return run

    def peaks(self, costs: Costs) -> tuple[float, ...]:
        """Return the most that every device holds."""
        return peaks(self.schedule, costs)


def replay(name: str, num_devices: int, num_microbatches: int, chunks: int | None) -> Replay:
    """Return a replay of a family's schedule."""
    kept = _short_replay if num_microbatches <= 3 * _SHORT * num_devices else _long_replay
    return kept(name, num_devices, num_microbatches, chunks)


def _replay(name: str, num_devices: int, num_microbatches: int, chunks: int | None) -> Replay:
    return Replay(family_schedule(name, num_devices, num_microbatches, chunks))


_short_replay, _long_replay = (lru_cache(size)(_replay) for size in (_SHORT_REPLAYS, _LONG_REPLAYS))


def family_schedule(
    name: str, p: int, m: int, chunks: int | None, costs: Costs | None = None, slices: int = 1
) -> Schedule:
    """Return a family's schedule."""
    options = {} if chunks is None else {"chunks": chunks}
    if slices > 1:
        options["slices"] = slices
    return build_schedule(name, num_devices=p, num_microbatches=m, costs=costs, **options)


def same_passes(costs: Costs) -> tuple[object, ...]:
    """Return what a replay depends on: it is equal for costs that differ in transfers or in the vocabulary's passes
    only.
    """
    links = tuple(sorted(costs.p2p.items())) if isinstance(costs.p2p, Mapping) else costs.p2p
    kept = None if costs.memory is None else tuple(costs.memory.get(kind) for kind in PLAIN)
    return costs.forward, costs.backward_input, costs.backward_weight, links, kept


def measured(
    name: str, num_devices: int, num_microbatches: int, chunks: int | None, costs: Costs, overlaps: bool = False
) -> OrderPrice:
    """Return the price of a family's step. If no barrier stands between steps (``overlaps``), the seconds are from step to
    step.
    """

    def run(count: int) -> Timing:
        return replay(name, num_devices, count, chunks).timing(costs, overlaps)

    return priced(run, num_devices, num_microbatches)
