"""Choose the pairs of a schedule: forwards that run together with a neighbouring backward (``Schedule.pairs``).

In a mixture of experts, tokens travel between ranks in every forward and backward. The two actions of a pair run layer
by layer in turn, so that one computes while the tokens of the other travel.

For the order of a family, the choice is made in a simulated run. A device that is about to start an action looks at the
next one of its order. If the inputs of both have arrived, or arrive soon enough, the two become a pair. The run knows
only actions that started before, so a pair never waits for its own result, and devices never wait in a circle.

``choose.pairs`` moves the actions of such orders, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import NEVER, Dependencies
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate

ASSUMED_SHARE = 0.4
"""The share of F and I in which the tokens of experts travel, for costs that do not have it. It is 30 to 50 % in large
models with many experts on several nodes."""

_CODES = {Kind.F: 0, Kind.I: 1, Kind.B: 1}
_PATIENCE = (1.0, 0.5, 0.0)
"""The longest time for which an action waits for the other one of its pair, as shares of the seconds that the pair saves. All
of them are tried."""
_WAYS = tuple((patience, swaps) for patience in _PATIENCE for swaps in (True, False))
"""The ways in which pairs are chosen: a patience, and whether a forward may change places with the backward before it. The
first way allows all pairs that the others allow."""
_TIE = 1e-9
"""The share of two passes' seconds within which times are equal, so that a pair does not depend on their rounding."""
_LONGEST_PERIOD = 32
"""The most blocks after which the choice of pairs may repeat."""
ROUNDING = 1e-11
"""The share of a time by which two sums of some thousand seconds may differ."""


def may_pair(schedule: Schedule) -> bool:
    """Return whether the actions of a schedule may run in pairs.

    They may not with parts of microbatches, recomputation, offload, vocabulary passes or asynchronous updates.
    """
    others = schedule.recomputed, schedule.offloads, schedule.vocabulary_barriers, schedule.updates
    return schedule.units.are_whole and not any(others)


def with_pairs(schedule: Schedule, costs: Costs, keeps_cap: Callable[[Schedule], bool] = lambda _: True) -> Timeline:
    """Return the simulated step of the fastest version of a schedule: without pairs, or with those of one of six ways.

    Versions with pairs for which ``keeps_cap`` is false are left out: in a pair the forward comes first, and a forward
    that changes places with the backward before it raises the device's peak.
    """
    paired = (run.schedule for run in Pairings(schedule, costs).runs())
    versions = [schedule, *filter(keeps_cap, dict.fromkeys(paired))]
    return fastest([simulate(version, costs) for version in versions], lambda timeline: timeline.makespan)


def fastest[T](versions: Sequence[T], seconds: Callable[[T], float]) -> T:
    """Return the first of the versions that take the fewest seconds, up to rounding."""
    least = min(map(seconds, versions))
    return next(version for version in versions if seconds(version) <= least * (1 + ROUNDING))


class Blocks(NamedTuple):
    """A part of the orders of all devices that runs several times, with further microbatches, before the rest follows."""

    begins: Sequence[int]  # per device, the position of its first action
    sizes: Sequence[int]  # per device, its number of actions
    units: int  # its units of every stage
    depth: int  # the number of blocks before a block for whose results it waits
    further: int  # the number of times that it runs again

    @classmethod
    def none(cls, num_devices: int) -> Blocks:
        """Return the blocks of a step in which nothing runs again."""
        return cls((0,) * num_devices, (0,) * num_devices, 0, 0, 0)


class PairedRun(NamedTuple):
    """A simulated run in which pairs were chosen."""

    schedule: Schedule
    """With the pairs. Of blocks that run again it has those that were simulated, with the microbatches of the first."""
    seconds: float
    hidden: tuple[float, ...]  # per device, the seconds of its actions that exchanges hide
    patience: float  # the least that allows these pairs
    swaps: bool  # whether a forward changed places with the backward before it


class Pairings:
    """Chooses the pairs of a schedule in all ways. With ``blocks``, the step has a part that runs again."""

    def __init__(self, schedule: Schedule, costs: Costs, blocks: Blocks | None = None) -> None:
        self.schedule, self.blocks = schedule, blocks or Blocks.none(schedule.num_devices)
        dependencies = Dependencies.of_schedule(schedule)
        self._prices = ActionPrices(schedule, costs, in_pairs=True)
        graph, seconds, lags = self._prices.of_graph(dependencies)
        lane_of, lanes = graph.lane_of, dependencies.lanes
        self.actions, self.lanes = dependencies.actions, dependencies.lanes
        self.needs = [
            [(lane_of[node], node - lanes[lane_of[node]].start, lags[link]) for node, link in waits if node != NEVER]
            for waits in graph.waits
        ]
        """Per node, the device and position of every action that it waits for, and the seconds of the message."""
        self.seconds = [seconds[price] for price in graph.prices]
        self.stops = [lane.stop for lane in lanes]
        self.codes = [_CODES.get(action.kind, 2) for action in self.actions]
        """Per node, 0 for a forward, 1 for a backward, 2 for any other. Those of a pair add up to 1."""
        unhidden = [self._prices.of(*action) for action in self.actions]
        self.hidden = [alone - seconds for alone, seconds in zip(unhidden, self.seconds, strict=True)]
        """Per node, the seconds of its W that its exchanges hide if it runs alone."""
        self._price_of, self._together = graph.prices, dict[tuple[int, int], float]()

    def runs(self) -> list[PairedRun]:
        """Return the runs of all ways with any pairs. A way that makes the pairs of an earlier way is left out."""
        runs: dict[tuple[float, bool], PairedRun] = {}
        for patience, swaps in _WAYS:
            looser = (run for way, run in runs.items() if way[0] >= patience and way[1] >= swaps)
            if not any(run.patience <= patience and run.swaps <= swaps for run in looser):
                runs[patience, swaps] = _PairingRun(self, patience, swaps).result()
        return [run for run in runs.values() if run.schedule.pairs]

    def together(self, forward: int, backward: int) -> float:
        """Return the seconds of two nodes in a pair."""
        key = self._price_of[forward], self._price_of[backward]
        if key not in self._together:
            first, second = self.actions[forward], self.actions[backward]
            self._together[key] = self._prices.of(*first) + self._prices.second_of_pair(first, second)
        return self._together[key]


class _Moment(NamedTuple):
    """The state of a run at the end of a block. All later starts follow from it."""

    block: int
    positions: list[int]  # per device, relative to the block
    ends: list[float]  # of the actions for which others may wait
    hidden: list[float]  # per device, as in ``PairedRun``

    def delay_after(self, earlier: _Moment) -> float | None:
        """Return the seconds by which this state is later than another; ``None`` if they differ in more than time."""
        if self.positions != earlier.positions:
            return None
        delay, rounding = self.ends[0] - earlier.ends[0], ROUNDING * self.ends[0]
        pairs = zip(earlier.ends, self.ends, strict=True)
        return delay if all(abs(after - before - delay) <= rounding for before, after in pairs) else None


class _PairingRun:
    """A run that makes a pair wherever both actions can start together and end sooner than apart.

    ``patience`` is the longest wait for the second action, as a share of the seconds that the pair saves. ``swaps``
    allows pairs of a backward and the forward after it, which then stand in the other order. Once the times of blocks
    repeat, so do their pairs, and these blocks are left out.
    """

    def __init__(self, pairings: Pairings, patience: float, swaps: bool) -> None:
        self._pairings, self._patience, self._swaps = pairings, patience, swaps
        count = len(pairings.lanes)
        self._further = pairings.blocks.further
        self._begins, self._sizes = pairings.blocks.begins, pairings.blocks.sizes
        rows = zip(pairings.lanes, self._begins, self._sizes, strict=True)
        self._block_stops = [lane.start + begin + size for lane, begin, size in rows]
        self._following = [(lane.start, 0) for lane in pairings.lanes]  # nodes, and how often their blocks ran before
        self._ends: list[list[float]] = [[] for _ in range(count)]  # of the actions that have run
        self._nodes: list[list[int]] = [[] for _ in range(count)]  # in the order in which they run
        self._waiting: list[dict[int, list[int]]] = [{} for _ in range(count)]  # devices, by the position they wait for
        self._forwards: list[int] = []  # the nodes of the pairs' forwards
        self._hidden = [0.0] * count
        self._needed_patience, self._has_swaps = 0.0, False
        self._moments: deque[_Moment] = deque(maxlen=_LONGEST_PERIOD)
        self._pacer = next((lane for lane, size in enumerate(self._sizes) if size), -1)
        self._block = 1  # the next block after which the state is compared, when the pacer ends it
        self._skipped, self._skipped_hidden = 0.0, [0.0] * count

    def result(self) -> PairedRun:
        """Run all actions."""
        begin = self._run_actions()
        actions, end = self._pairings.actions, max(ends[-1] for ends in self._ends if ends)
        orders = tuple(tuple(actions[node] for node in nodes) for nodes in self._nodes)
        pairs = frozenset(actions[node] for node in self._forwards)
        return PairedRun(
            replace(self._pairings.schedule, orders=orders, pairs=pairs),
            end - begin + self._skipped,
            tuple(map(sum, zip(self._hidden, self._skipped_hidden, strict=True))),
            self._needed_patience,
            self._has_swaps,
        )

    def _run_actions(self) -> float:
        """Run all actions; return the time at which the first one starts, in seconds.

        Comparisons of schedules spend most of their time here.
        """
        pairings, all_ends, all_nodes, sizes = self._pairings, self._ends, self._nodes, self._sizes
        needs, seconds, codes, stops = pairings.needs, pairings.seconds, pairings.codes, pairings.stops
        hidden, all_hidden = pairings.hidden, self._hidden
        following, waiting, block_stops, swaps = self._following, self._waiting, self._block_stops, self._swaps
        runnable: list[tuple[float, int]] = []
        begin, pacer = inf, self._pacer

        def queue(lane: int) -> None:
            node, block = following[lane]
            if node == stops[lane]:
                return
            own = all_ends[lane]
            start = own[-1] if own else 0.0
            for owner, position, lag in needs[node]:
                if block:
                    position += block * sizes[owner]
                ends = all_ends[owner]
                if position >= len(ends):
                    waiting[owner].setdefault(position, []).append(lane)
                    return
                arrival = ends[position] + lag
                if arrival > start:
                    start = arrival
            heappush(runnable, (start, lane))

        for lane in range(len(stops)):
            queue(lane)
        further = self._further
        while runnable:
            start, lane = heappop(runnable)
            if start < begin:
                begin = start
            first, block = following[lane]
            second, later = first + 1, block
            if second == block_stops[lane] and block < further:
                second, later = second - sizes[lane], block + 1
            following[lane] = second, later
            ends = all_ends[lane]
            position = len(ends)
            pair = None
            if second != stops[lane] and codes[first] + codes[second] == 1 and (swaps or codes[second]):
                together = start
                for owner, place, lag in needs[second]:
                    if later:
                        place += later * sizes[owner]
                    others = all_ends[owner]
                    if place >= len(others):
                        break
                    arrival = others[place] + lag
                    if arrival > together:
                        together = arrival
                else:
                    pair = self._pair(lane, start, together, (first, second), later - block)
            if pair is None:
                all_hidden[lane] += hidden[first]
                ends.append(start + seconds[first])
                all_nodes[lane].append(first)
            else:
                nodes, end = pair
                all_hidden[lane] += hidden[first] + hidden[second]
                ends += [end, end]
                all_nodes[lane] += nodes
                second += 1
                if second == block_stops[lane] and later < further:
                    second, later = second - sizes[lane], later + 1
                following[lane] = second, later
            if waiting[lane]:
                for at in range(position, len(ends)):
                    for other in waiting[lane].pop(at, ()):
                        queue(other)
            queue(lane)
            if lane == pacer and len(ends) >= self._begins[lane] + self._block * sizes[lane]:
                self._skip_blocks()
                further = self._further
        return begin

    def _pair(
        self, lane: int, start: float, together: float, both: tuple[int, int], blocks_later: int
    ) -> tuple[tuple[int, int], float] | None:
        """Return the pair of two nodes that can start together, the forward first, and its end; ``None`` if they run apart.

        The second node, of ``blocks_later`` blocks later, has its inputs at the time ``together``.
        """
        (first, second), pairings = both, self._pairings
        swaps = pairings.codes[second] == 0
        forward, backward = (second, first) if swaps else both
        of_first, of_second = pairings.seconds[first], pairings.seconds[second]
        of_both = pairings.together(forward, backward)
        saved, wait = of_first + of_second - of_both, together - start
        rounding = _TIE * (of_first + of_second)
        if wait > self._patience * saved + rounding:
            return None
        apart = max(start + of_first, together) + of_second
        if together + of_both >= apart - rounding:
            return None
        a, b = pairings.actions[first], pairings.actions[second]
        if a[1] == b[1] and a[2] == b[2] + blocks_later * pairings.blocks.units:
            return None
        self._forwards.append(forward)
        self._hidden[lane] += saved
        self._has_swaps |= swaps
        if wait > self._needed_patience * saved + rounding:
            self._needed_patience = min(share for share in _PATIENCE if wait <= share * saved + rounding)
        return (forward, backward), together + of_both

    def _skip_blocks(self) -> None:
        """Leave out blocks that repeat, if the state equals that of some blocks ago except for one delay."""
        rows = list(zip(self._ends, self._begins, self._sizes, strict=True))
        block, self._block = self._block, self._block + 1
        ended = min((len(ends) - begin) // size for ends, begin, size in rows if size)
        if ended < 1:
            return
        oldest = ended - self._pairings.blocks.depth
        now = _Moment(
            block,
            [len(ends) - begin - block * size for ends, begin, size in rows],
            [end for ends, begin, size in rows for end in ends[begin + oldest * size :]],
            list(self._hidden),
        )
        for earlier in reversed(self._moments):
            delay = now.delay_after(earlier)
            if delay is None:
                continue
            begun = max((len(ends) - begin) // size for ends, begin, size in rows if size) + 2
            period = block - earlier.block
            times = max(0, self._further - begun) // period
            hidden = zip(earlier.hidden, now.hidden, strict=True)
            self._skipped = times * delay
            self._skipped_hidden = [times * (after - before) for before, after in hidden]
            self._further -= times * period
            self._block = self._further + 2  # never reached, so no state is compared again
            return
        self._moments.append(now)
