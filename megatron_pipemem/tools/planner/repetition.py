"""Compute the makespan of a long step exactly, from a short step whose middle repeats.

The orders of a family have a beginning, a block that repeats, and an end. Further microbatches add blocks:

    1F1B, p = 2, device 0:   F0 F1 B0 | F2 B1 | F3 B2 | ... B5      (beginning | block | block | end)

So the long step runs the same waits as a short one, its block again and again. Once the ends of a block are those of an
earlier block plus one delay, all further blocks repeat this delay. Until then every block is simulated, so that the
result is exact for stages that reach their rhythm late, or whose rhythm takes several blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import eq, ne

from megatron_pipemem.features.pairs.orders import ROUNDING, Blocks
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Step, Times
from megatron_pipemem.schedule.schedule import Schedule

_Row = tuple[Kind, int, int]  # an action


@dataclass(frozen=True)
class _Lane:
    """The nodes of a device. Those from ``cut`` on, ``size`` of them, are the block. Nodes before ``first`` never repeat."""

    first: int
    cut: int
    size: int


@dataclass(frozen=True, eq=False)
class Repetition:
    """A step whose middle repeats: its actions before, in and after the block, in the order of the waits."""

    schedule: Schedule
    dependencies: Dependencies
    microbatches: int  # of a block
    before: Sequence[Step]
    block: Sequence[Step]
    after: Sequence[Step]
    lanes: Sequence[_Lane]
    depth: int  # the number of blocks before a block for whose results the block, or an action after it, waits

    @staticmethod
    def may_be_of(schedule: Schedule) -> bool:
        """Return whether nothing but waits ties blocks together, as copies, vocabulary passes and sums over replicas do."""
        return not (
            schedule.offloads or schedule.vocabulary_barriers or schedule.pairs or schedule.placement.replicas > 1
        )

    @classmethod
    def of(cls, shorter: Schedule, longer: Schedule, waits: Callable[[], Dependencies]) -> Repetition | None:
        """Return the repetition of the longer one of two steps. ``waits`` returns its dependencies, which take long.

        It is ``None`` unless the longer step is the shorter one with further blocks, and ``may_be_of``.
        """
        periodic = _periodic_regions(shorter, longer) if cls.may_be_of(longer) else None
        if periodic is None:
            return None
        dependencies = waits()
        if error := dependencies.stuck():
            raise error
        units, regions = periodic
        lanes = _cut(regions, dependencies)
        depth = _depth(lanes, dependencies)
        if depth is None or any(lane.cut - depth * lane.size < lane.first for lane in lanes):
            return None
        part_of = bytearray()  # per node: 0 before the block, 1 in it, 2 after it
        for nodes, lane in zip(dependencies.lanes, lanes, strict=True):
            sizes = lane.cut, lane.size, len(nodes) - lane.cut - lane.size
            part_of += b"".join(bytes([part]) * size for part, size in enumerate(sizes))
        of_steps = [part_of[step[0]] for step in dependencies.steps]
        before, block, after = (list(compress(dependencies.steps, map(part.__eq__, of_steps))) for part in range(3))
        return cls(longer, dependencies, units // longer.units.parts, before, block, after, lanes, depth)

    def blocks(self, microbatches: int) -> Blocks:
        """Return the block, with the number of times that it runs again in a step with ``microbatches`` microbatches."""
        return Blocks(
            [lane.cut for lane in self.lanes],
            [lane.size for lane in self.lanes],
            self.microbatches * self.schedule.units.parts,
            self.depth,
            self._repeats(microbatches),
        )

    def _repeats(self, microbatches: int) -> int:
        repeats, remainder = divmod(microbatches - self.schedule.num_microbatches, self.microbatches)
        assert remainder == 0 <= repeats
        return repeats

    def makespan(self, costs: Costs, microbatches: int) -> float:
        """Return the seconds of a step with ``microbatches`` microbatches: those of ``schedule`` and of whole blocks."""
        graph, seconds, lags = ActionPrices(self.schedule, costs).of_graph(self.dependencies)
        before, block, after = self.before, self.block, self.after
        if graph is not self.dependencies.graph:  # the parts of microbatches differ
            before, block, after = (list(graph.steps(step[0] for step in steps)) for steps in (before, block, after))
        times = Times(graph, seconds, lags, 0.0)
        times.run(before)
        skipped = self._run_blocks(times, block, 1 + self._repeats(microbatches))
        times.run(after)
        used = [nodes for nodes in self.dependencies.lanes if nodes]
        return max(times.ends[nodes[-1]] for nodes in used) - min(times.starts[nodes[0]] for nodes in used) + skipped

    def _run_blocks(self, times: Times[float], block: Sequence[Step], count: int) -> float:
        """Run the block ``count`` times; return the seconds of the runs that are left out because they repeat."""
        nodes, history = [step[0] for step in block], []
        anchor = 0  # the run with which later ones are compared; it moves to every power of two
        for latest in range(count):
            if latest:
                self._move_blocks(times.ends)
            times.run(block)
            history.append([times.ends[node] for node in nodes])
            if latest > anchor >= self.depth - 1 and (delay := self._delay(history, anchor, latest)) is not None:
                periods, more = divmod(count - 1 - latest, latest - anchor)
                for _ in range(more):
                    self._move_blocks(times.ends)
                    times.run(block)
                return periods * delay
            if latest & (latest - 1) == 0:
                anchor = latest
        return 0.0

    def _move_blocks(self, ends: list[float]) -> None:
        """Move the ends of the block, and of the blocks before it, to the places one block earlier."""
        for nodes, lane in zip(self.dependencies.lanes, self.lanes, strict=True):
            first = nodes.start + lane.cut - self.depth * lane.size
            stop = first + self.depth * lane.size
            ends[first:stop] = ends[first + lane.size : stop + lane.size]

    def _delay(self, history: Sequence[Sequence[float]], earlier: int, later: int) -> float | None:
        """Return the seconds by which block number ``later`` runs after block number ``earlier``.

        Return ``None`` unless ``depth`` blocks, up to these two, differ by the same delay. ``history`` has the ends of the
        actions of every block, in seconds.
        """
        delay = history[later][0] - history[earlier][0]
        rounding = ROUNDING * history[later][0]
        for back in range(self.depth):
            pairs = zip(history[earlier - back], history[later - back], strict=True)
            if not all(abs(end - start - delay) <= rounding for start, end in pairs):
                return None
        return delay


def _periodic_regions(shorter: Schedule, longer: Schedule) -> tuple[int, list[tuple[range, int]]] | None:
    """Return the units of the smallest block, and per device the positions in the longer order in which blocks repeat.

    A device's positions come with the number of its actions in a block. The result is ``None`` if the longer orders are
    not the shorter ones with further blocks.
    """
    more = len(longer.units) - len(shorter.units)
    regions = []
    for few, many in zip(shorter.orders, longer.orders, strict=True):
        size = len(many) - len(few)
        head = _num_equal(few, many, len(few))
        tail = _num_equal(_later(reversed(few), more), reversed(many), len(few))
        if head + tail < len(few):
            return None
        regions.append((range(len(few) - tail, head + size), size))
    step = longer.units.parts
    for units in range(step, more + 1, step):
        sizes = [size * units // more for _, size in regions]
        if all(size * units % more == 0 for _, size in regions) and all(
            _is_periodic([order[at] for at in region], size, units)
            for order, (region, _), size in zip(longer.orders, regions, sizes, strict=True)
        ):
            return units, [(region, size) for (region, _), size in zip(regions, sizes, strict=True)]
    return None


def _later(rows: Iterable[_Row], units: int) -> Iterator[_Row]:
    return ((kind, stage, unit + units) for kind, stage, unit in rows)


def _num_equal(few: Iterable[_Row], many: Iterable[_Row], most: int) -> int:
    """Return the number of equal rows at the beginning of both; ``most``, the rows of ``few``, if none differ."""
    return next(compress(count(), map(ne, few, many)), most)


def _is_periodic(rows: Sequence[_Row], size: int, units: int) -> bool:
    """Return whether every row, ``size`` rows later, is the same one of a microbatch that is ``units`` units later."""
    if size == 0:
        return not rows
    return len(rows) >= 2 * size and all(map(eq, _later(rows, units), rows[size:]))


def _cut(regions: Sequence[tuple[range, int]], dependencies: Dependencies) -> list[_Lane]:
    """Return the lanes with the latest block that every device has in its region, and that waits for nothing after it.

    If all actions take equally long, those that start before a certain time wait only for one another.
    """
    graph = dependencies.graph
    times = Times(graph, [1] * (len(dependencies.kinds) + 1), [0] * len(dependencies.links), 0)
    times.run(dependencies.steps)
    starts = [times.starts[nodes.start : nodes.stop] for nodes in dependencies.lanes]
    limit = min(begins[region.stop - size] for begins, (region, size) in zip(starts, regions, strict=True) if size)
    return [
        _Lane(region.start, bisect_left(begins, limit), size)
        for begins, (region, size) in zip(starts, regions, strict=True)
    ]


def _depth(lanes: Sequence[_Lane], dependencies: Dependencies) -> int | None:
    """Return the number of blocks before a block for whose results it, or an action after it, waits; at least 1.

    It is ``None`` if the block waits for an action after it, or for others than the block before it does.
    """
    lane_of, waits = dependencies.graph.lane_of, dependencies.graph.waits
    depth = 1
    for nodes, lane in zip(dependencies.lanes, lanes, strict=True):
        for node in range(nodes.start + lane.cut, nodes.stop):
            is_in_block = node < nodes.start + lane.cut + lane.size
            for needed, _ in waits[node]:
                owner = lanes[lane_of[needed]]
                position = needed - dependencies.lanes[lane_of[needed]].start
                if position < owner.cut:
                    if not owner.size:
                        return None
                    depth = max(depth, -(-(owner.cut - position) // owner.size))
                elif is_in_block and position >= owner.cut + owner.size:
                    return None
            if is_in_block:
                before = [(needed + lanes[lane_of[needed]].size, link) for needed, link in waits[node - lane.size]]
                if before != list(waits[node]):
                    return None
    return depth
