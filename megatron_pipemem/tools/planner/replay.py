"""Predict the time of long steps from their repeating part, and of one order under many costs.

A planner needs the time of the same order again and again, for other tensor parallelism or microbatch sizes. So the
dependencies of its passes are computed once.

The middle of a long step repeats. If all devices reach it later by the same time, they also leave it later by that
time. So a short step is compared with one of a few more microbatches. If these delay the last passes of all devices by
the same time ``d``, then equally many further microbatches add ``d`` again. The time of a step of any length follows.
If the delays differ, the step does not repeat yet, and twice as many microbatches are tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import islice
from math import isclose, lcm
from operator import eq
from typing import NamedTuple

from megatron_pipemem.schedule.action import KIND_AND_STAGE, PLAIN, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Times
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulated
from megatron_pipemem.schedule.stream import consecutive_steps
from megatron_pipemem.tools.planner.repetition import Repetition

_SHORT = 3  # microbatches per device of the shortest step that may have a rhythm
_LONGEST_RHYTHM = 8  # microbatches per device
_SHORT_REPLAYS, _LONG_REPLAYS = 256, 8  # sizes of the caches
MOST_ACTIONS = 300_000
"""The most actions of a step that is built as a whole. Longer steps are predicted from shorter ones."""


@dataclass(frozen=True)
class Order:
    """A family of schedules with its number of chunks."""

    name: str  # of the family
    chunks: int | None = None  # stages per device; ``None`` if the family has a fixed number


class OrderPrice(NamedTuple):
    """The predicted seconds and peak memory of a step."""

    seconds: float  # of the step; the period if no barrier stands between steps
    peak_bytes: tuple[float, ...]  # peak memory of every device
    hidden_seconds: tuple[
        float, ...
    ] = ()  # seconds by which the pairs of every device shorten its work; empty without pairs
    host_bytes: tuple[float, ...] = ()  # peak memory of activations on every device's host; empty without offload


class Timing(NamedTuple):
    """A simulated step, and its seconds."""

    timeline: Timeline
    seconds: float  # the makespan, or the period if no barrier stands between steps

    @property
    def price(self) -> OrderPrice:
        schedule, costs = self.timeline.schedule, self.timeline.costs
        hidden = _hidden(self.timeline) if schedule.pairs else ()
        host = tuple(peaks(schedule, costs, host=True)) if schedule.offloads else ()
        return OrderPrice(self.seconds, self.timeline.peaks, hidden, host)


def _hidden(timeline: Timeline) -> tuple[float, ...]:
    """Return the seconds of the actions of every device that exchanges hide."""
    prices = ActionPrices(timeline.schedule, timeline.costs)
    apart = (sum(prices.of(*action) for action in order) for order in timeline.schedule.orders)
    return tuple(whole - work for whole, work in zip(apart, timeline.work, strict=True))


def extended(
    built: Callable[[int], Replay], costs: Costs, num_devices: int, num_microbatches: int, overlaps: bool = False
) -> OrderPrice:
    """Return the time and peaks of a step of any length, from short steps if the step is long.

    ``built`` returns the replay of a step with a given number of microbatches. A step with few microbatches per device is
    simulated as a whole. A longer one is extended from two shorter steps once these differ by blocks that repeat
    (``Repetition``) or once their times repeat, or once the next step would have too many actions.
    """
    built = cache(built)
    for count, more in _counts(num_devices, num_microbatches):
        if not overlaps and (repetition := _repetition(built, num_devices, count, more)) is not None:
            return OrderPrice(repetition.makespan(costs, num_microbatches), peaks(repetition.schedule, costs))
        replays = built(count), built(count + more)
        ends_alike = _end_alike(*(replay.schedule for replay in replays))
        is_last = 2 * sum(map(len, replays[1].schedule.orders)) > MOST_ACTIONS
        if not (ends_alike or is_last):
            continue
        shorter, longer = (replay.timing(costs, overlaps) for replay in replays)
        if is_last or _repeats(shorter, longer):
            return _extended(shorter, longer, num_microbatches)
    return built(num_microbatches).timing(costs, overlaps).price


def repeating(
    built: Callable[[int], Replay], num_devices: int, num_microbatches: int
) -> tuple[Schedule, Repetition | None]:
    """Return a short step with blocks that repeat in the step of ``num_microbatches``; that step, and ``None``, if none has.

    ``built`` is as in ``extended``.
    """
    built = cache(built)
    for count, more in _counts(num_devices, num_microbatches):
        if (repetition := _repetition(built, num_devices, count, more)) is not None:
            return repetition.schedule, repetition
    return built(num_microbatches).schedule, None


def _repetition(built: Callable[[int], Replay], num_devices: int, count: int, more: int) -> Repetition | None:
    """Return the repetition of a step with about ``count`` microbatches and one with ``more`` of them, if they have one.

    The order of ``hanayo`` is another one for at most three microbatches per device.
    """
    schedule = built(count).schedule
    if not Repetition.may_be_of(schedule):
        return None
    is_wave = schedule.placement.name == "wave"
    for few in (count + more,) if is_wave else (count - more, count):
        if few >= 2 * num_devices:
            repetition = built(few + more).repetition_after(built(few))
            if repetition is not None:
                return repetition
    return None


def _counts(num_devices: int, num_microbatches: int) -> Iterator[tuple[int, int]]:
    """Yield the microbatches of short steps that a long step may extend, and how many more the next short step has."""
    rhythm, count = _rhythm(num_devices), shortest(num_devices, num_microbatches)
    if count < num_microbatches:
        yield count, rhythm
    while 4 * ((count := _congruent(2 * count, num_microbatches, rhythm)) + rhythm) < num_microbatches:
        yield count, rhythm


def shortest(num_devices: int, num_microbatches: int) -> int:
    """Return the number of microbatches of the shortest step from which a step of this length can be extended.

    If this step is too short for that, return its own number.
    """
    rhythm = _rhythm(num_devices)
    short = _congruent(_SHORT * num_devices, num_microbatches, rhythm)
    return short if 2 * (short + rhythm) < num_microbatches else num_microbatches


def _congruent(least: int, number: int, modulus: int) -> int:
    """Return the smallest number that is at least ``least`` and equals ``number`` modulo ``modulus``."""
    return least + (number - least) % modulus


def _extended(shorter: Timing, longer: Timing, num_microbatches: int) -> OrderPrice:
    """Return the time and peaks of a step with more microbatches, from the difference between two steps.

    Peaks are those of the longer step. If a device holds all microbatches at once, its peak grows with their number.
    """
    before, after = shorter.price, longer.price
    few, many = (timing.timeline.schedule.num_microbatches for timing in (shorter, longer))
    more = (num_microbatches - many) / (many - few)

    def later(a: float, b: float) -> float:
        return b + more * (b - a)

    def peak(a: float, b: float) -> float:
        return b * num_microbatches / many if isclose(b * few, a * many) else b

    return OrderPrice(
        later(before.seconds, after.seconds),
        tuple(map(peak, before.peak_bytes, after.peak_bytes)),
        tuple(map(later, before.hidden_seconds, after.hidden_seconds)),
        tuple(map(peak, before.host_bytes, after.host_bytes)),
    )


def _rhythm(num_devices: int) -> int:
    """Return the number of microbatches after which the orders of families are expected to repeat.

    Families have groups of p or p/2 microbatches. If their common multiple is too large, the result is p.
    """
    whole = lcm(num_devices, -(-num_devices // 2))
    return whole if whole <= _LONGEST_RHYTHM * num_devices else num_devices


def _end_alike(shorter: Schedule, longer: Schedule) -> bool:
    """Return whether all devices have the same passes in the second halves of both."""
    for few, many in zip(shorter.orders, longer.orders, strict=True):
        second_half = islice(reversed(few), len(few) // 2)
        if not all(map(eq, map(KIND_AND_STAGE, second_half), map(KIND_AND_STAGE, reversed(many)))):
            return False
    return True


def _repeats(shorter: Timing, longer: Timing) -> bool:
    """Return whether both steps, which end alike, have equal peaks, and in their second halves equal delays."""
    later, rounding = longer.seconds - shorter.seconds, 1e-9 * longer.seconds
    one, two = shorter.timeline, longer.timeline
    if one.peaks != two.peaks:
        return False
    for spans, later_spans in zip(one.spans, two.spans, strict=True):
        pairs = zip(reversed(spans), reversed(later_spans), strict=False)
        for (_, end), (_, later_end) in islice(pairs, len(spans) // 2):
            if not isclose(later_end - end, later, rel_tol=0.0, abs_tol=rounding):
                return False
    return True


class LongestChain(NamedTuple):
    """The passes of a step that wait for one another from its beginning to its end."""

    passes: Mapping[tuple[Kind, int], int]  # how many of each kind on each stage
    lags: float  # seconds of the messages between them


class Replay:
    """Simulates one schedule under many costs. Its dependencies are computed once."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._repetitions: dict[Replay, Repetition | None] = {}

    @cached_property
    def _dependencies(self) -> Dependencies:
        return Dependencies.of_schedule(self.schedule)

    def repetition_after(self, shorter: Replay) -> Repetition | None:
        """Return the blocks by which the schedule is longer than another one of its family, from a cache if it is there."""
        if shorter not in self._repetitions:
            self._repetitions[shorter] = Repetition.of(shorter.schedule, self.schedule, lambda: self._dependencies)
        return self._repetitions[shorter]

    def timeline(self, costs: Costs, begins: Sequence[float] = ()) -> Timeline:
        return simulated(self.schedule, costs, self._dependencies, begins)

    def with_earlier_weights(self, costs: Costs) -> Replay:
        """Return the replay of the schedule whose W run as early as the bytes of ``costs`` need; itself if none moves."""
        moved = with_earlier_weights(self.schedule, costs)
        return self if moved is self.schedule else Replay(moved)

    def timing(self, costs: Costs, overlaps: bool = False) -> Timing:
        """Return the times of a step; with ``overlaps``, the seconds are the period of steps without a barrier."""
        if not overlaps:
            timeline = self.timeline(costs)
            return Timing(timeline, timeline.makespan)
        steps = consecutive_steps(self.schedule, costs, steps=1)
        first = min(steps.ends[-1])
        return Timing(self.timeline(costs, [end - first for end in steps.ends[-1]]), steps.period)

    def longest_chain(self, costs: Costs) -> tuple[float, LongestChain]:
        """Return the makespan of the step, and a chain that takes as long.

        The schedule must have no copies, vocabulary passes or pairs, and all of its microbatches the same length.
        """
        waits = self._dependencies
        graph, seconds, lags = ActionPrices(self.schedule, costs).of_graph(waits)
        times = Times(graph, seconds, lags, 0.0)
        times.run(waits.steps)
        starts, ends = times.starts, times.ends
        node = max(range(len(ends)), key=ends.__getitem__)
        makespan, passes, total = ends[node], Counter([graph.prices[node]]), 0.0
        while start := starts[node]:
            lane = graph.lanes[graph.lane_of[node]]
            if node > lane[0] and ends[node - 1] == start:
                node, lag = node - 1, 0.0
            else:
                node, lag = next((n, lags[link]) for n, link in graph.waits[node] if ends[n] + lags[link] == start)
            passes[graph.prices[node]] += 1
            total += lag
        return makespan, LongestChain({waits.kinds[price]: count for price, count in passes.items()}, total)


def replay(name: str, num_devices: int, num_microbatches: int, chunks: int | None) -> Replay:
    """Return the replay of a family's schedule, from a cache if it is there."""
    kept = _short_replay if num_microbatches <= 3 * _SHORT * num_devices else _long_replay
    return kept(name, num_devices, num_microbatches, chunks)


def _replay(name: str, num_devices: int, num_microbatches: int, chunks: int | None) -> Replay:
    return Replay(family_schedule(name, num_devices, num_microbatches, chunks))


_short_replay, _long_replay = (lru_cache(size)(_replay) for size in (_SHORT_REPLAYS, _LONG_REPLAYS))


def family_schedule(
    name: str, p: int, m: int, chunks: int | None, costs: Costs | None = None, parts: int = 1
) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, costs=costs, **family_options(chunks, parts))


def family_options(chunks: int | None, parts: int = 1) -> dict[str, int]:
    """Return the options of a family for these numbers of chunks and parts; none for its only number of chunks."""
    return ({} if chunks is None else {"chunks": chunks}) | ({} if parts == 1 else {"slices": parts})


def replay_key(costs: Costs) -> tuple[object, ...]:
    """Return the costs that a replay depends on: all but those of offload and vocabulary passes."""
    links = tuple(sorted(costs.p2p.items())) if isinstance(costs.p2p, Mapping) else costs.p2p
    kept = None if costs.memory is None else tuple(costs.memory.get(kind) for kind in PLAIN)
    return costs.forward, costs.backward_input, costs.backward_weight, links, kept


def measured(
    name: str,
    num_devices: int,
    num_microbatches: int,
    chunks: int | None,
    costs: Costs,
    overlaps: bool = False,
    moves_weights: bool = False,
) -> OrderPrice:
    """Return the predicted time and peaks of a family's step; with ``overlaps``, the period without a barrier.

    With ``moves_weights``, W run as early as the bytes of ``costs`` need (``schedule.earlier_weights``).
    """

    def built(count: int) -> Replay:
        published = replay(name, num_devices, count, chunks)
        return published.with_earlier_weights(costs) if moves_weights else published

    return extended(built, costs, num_devices, num_microbatches, overlaps)
