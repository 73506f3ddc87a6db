"""Derive from a ``Timeline`` the parts that all pictures share: boxes, memory, messages, colours and texts.

A measured run is a ``Timeline`` too, with the times of its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, pairwise
from math import isclose
from typing import NamedTuple

from megatron_pipemem.schedule.action import COMPUTE, KIND_AND_STAGE, VOCABULARY, Action, Kind
from megatron_pipemem.schedule.action_prices import held_after, unit_factors
from megatron_pipemem.schedule.baseline import share_of_1f1b
from megatron_pipemem.schedule.dependencies import NEVER, Dependencies
from megatron_pipemem.schedule.simulator import Timeline

IDLE = "#f1f3f4"
UNIT = "1F1B's first device holds 1"
"""The unit of peaks if no bytes are known."""
UNIT_OF_FACTORS = "p microbatches of factor 1 hold 1"
"""The same unit if microbatches differ in length. 1F1B may then hold more."""
_UNITS = "activation units ({}; equal stages, inputs kept for W not counted)"
UNITS = _UNITS.format(UNIT)
_PALEST = 0.58
"""The share of white in the colour of the last chunk, if there are many."""


class Box(NamedTuple):
    """An action as it is drawn. Times count from the first start in the timeline.

    ``chunk`` is the index of the action's stage on its device, and ``held`` the device's memory after the action.
    Actions on memory take no time and only change ``held``.
    """

    action: Action
    device: int
    chunk: int
    start: float
    end: float
    held: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Columns(NamedTuple):
    """The boxes of one device, with a list for each of their properties (see ``Box``)."""

    actions: Sequence[Action]
    starts: Sequence[float]
    ends: Sequence[float]
    held: Sequence[float]


class HostTransfer(NamedTuple):
    """A copy of activations between a device and the host. Times count from the first start in the timeline."""

    action: Action
    device: int
    start: float
    end: float


class DrawnMessage(NamedTuple):
    """A dependency between devices: ``consumer`` needs the result of ``producer``."""

    producer: Box
    consumer: Box


class Bubble(NamedTuple):
    """Idle time of a device before ``consumer``, which is None at the end of the timeline.

    ``producer`` is the action on another device that ``consumer`` waits for last, or None if it waits for no other
    device.
    """

    device: int
    start: float
    end: float
    consumer: Box | None
    producer: Box | None


def common_end(timelines: Sequence[Timeline]) -> float:
    """Return the end of the time axis that compared timelines share, in seconds: the makespan of the longest one.

    Timelines more than twice as long as the median do not count.
    """
    ends = sorted(timeline.makespan for timeline in timelines)
    return max(end for end in ends if end <= 2 * ends[(len(ends) - 1) // 2])


def bytes_text(held: float) -> str:
    """Return a number of bytes as text in GiB or MiB."""
    return f"{held / 2**30:.3g} GiB" if held >= 2**30 else f"{held / 2**20:.3g} MiB"


def held_steps(row: tuple[Box, ...]) -> list[tuple[float, float]]:
    """Return ``(time, held)`` for each change of a device's memory, in order of time. ``held`` is the level after it.

    The list begins with ``(0.0, 0.0)``.

    ``row`` has the boxes of the device. Memory is taken at the start of an action, and freed at its end. If one action
    frees memory and the next takes it at the same time, the level between them is left out.
    """
    steps = [(0.0, 0.0)]
    for box in row:
        before = steps[-1][1]
        if box.held > before:
            if len(steps) > 1 and steps[-1][0] == box.start and steps[-2][1] > before:
                steps.pop()
            if steps[-1][1] != box.held:
                steps.append((box.start, box.held))
        elif box.held < before:
            steps.append((box.end, box.held))
    return steps


def colour(kind: Kind, chunk: int = 0, num_chunks: int = 1) -> str:
    """Return a colour as ``#rrggbb``. Each kind of action has its hue, and later chunks are paler.

    ``chunk`` counts from 0, and ``num_chunks`` is the number of chunks per device.
    """
    pale = _PALEST * chunk / (num_chunks - 1) * min(1.0, (num_chunks + 1) / 4) if num_chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * pale):02x}" for part in kind.spec.colour)


def outline(kind: Kind, chunk: int) -> str:
    """Return the colour of the edge of a later chunk's action: that of its kind. It is empty for the first chunk."""
    return colour(kind) if chunk else ""


def ink(background: str) -> str:
    """Return black or white: the colour of text that is easier to read on ``background``."""
    red, green, blue = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#000000" if 0.30 * red + 0.59 * green + 0.11 * blue > 0.52 else "#ffffff"


@dataclass(frozen=True)
class DrawnRun:
    """A timeline with the boxes, messages and texts that its pictures need."""

    timeline: Timeline

    @property
    def num_chunks(self) -> int:
        return self.timeline.schedule.placement.num_chunks

    @property
    def time_unit(self) -> str:
        """The unit of times: seconds, or the time of F of a device's whole share if the costs have no other."""
        is_timed = self.timeline.measured.bubble_rate is not None
        schedule = self.timeline.schedule
        placement = schedule.placement
        costs = self.timeline.costs
        forwards = sum(costs.seconds(placement, schedule.units)[Kind.F]) - costs.head_forward
        is_unit = isclose(forwards / placement.replicas, placement.num_devices)
        return "F of a device = 1" if is_unit and not is_timed else "seconds"

    @property
    def in_units(self) -> bool:
        """Whether memory is in activation units. Otherwise it is in bytes."""
        return self.timeline.costs.memory is None and self.timeline.measured.held is None

    @property
    def memory_unit(self) -> str:
        """The size of an activation unit."""
        return UNIT if self.timeline.costs.microbatch is None else UNIT_OF_FACTORS

    @property
    def memory_units(self) -> str:
        """The name of activation units, with their size."""
        return _UNITS.format(self.memory_unit)

    @property
    def copy_text(self) -> str:
        """The time of copies to the host and back, to be printed after their name; empty if it is no ratio."""
        channel = self.timeline.costs.channel
        ratio = None if channel is None else channel.ratio
        return "" if ratio is None else f"; there and back take {ratio:.4g} times F, I and W (--offload-ratio)"

    @cached_property
    def origin(self) -> float:
        """The time at which the first action starts."""
        return min((spans[0][0] for spans in self.timeline.spans if spans), default=0.0)

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        """The actions of each device that have a box, in order.

        Vocabulary actions without duration have no box. Their change in memory appears in the next box.
        """
        schedule, origin = self.timeline.schedule, self.origin
        columns = []
        for order, spans, levels in zip(schedule.orders, self.timeline.spans, self._memory_after, strict=True):
            starts, ends = [start - origin for start, _ in spans], [end - origin for _, end in spans]
            actions: Sequence[Action] = order
            if schedule.vocabulary_barriers:
                shown = [a.kind not in VOCABULARY or s < e for a, s, e in zip(order, starts, ends, strict=True)]
                actions = list(compress(actions, shown))
                starts, ends, levels = (list(compress(values, shown)) for values in (starts, ends, levels))
            columns.append(Columns(actions, starts, ends, levels))
        return tuple(columns)

    @cached_property
    def chunks(self) -> dict[tuple[Kind, int], int]:
        """The chunk of every kind of action on every stage that has a box; 0 for vocabulary actions."""
        placement = self.timeline.schedule.placement
        drawn = dict.fromkeys(map(KIND_AND_STAGE, chain.from_iterable(columns.actions for columns in self.columns)))
        return {(kind, at): 0 if kind in VOCABULARY else placement.chunk_of(at) for kind, at in drawn}

    @cached_property
    def rows(self) -> tuple[tuple[Box, ...], ...]:
        """The boxes of each device, in order."""
        return tuple(
            tuple(Box(box[0], device, self.chunks[box[0][:2]], *box[1:]) for box in zip(*columns, strict=True))
            for device, columns in enumerate(self.columns)
        )

    @cached_property
    def pairs(self) -> tuple[tuple[Box, Box], ...]:
        """The boxes of every pair (``Schedule.pairs``). The second box begins after the forward's own seconds."""
        pairs = self.timeline.schedule.pairs
        return tuple(both for row in self.rows for both in pairwise(row) if both[0].action in pairs)

    @property
    def _memory_after(self) -> Sequence[Sequence[float]]:
        """Return the memory of each device after each action: as counted in a run, or computed from the costs."""
        schedule, costs = self.timeline.schedule, self.timeline.costs
        if self.timeline.measured.held is not None:
            return self.timeline.measured.held
        units, weights = schedule.units, unit_factors(schedule, costs)
        changes = costs.memory_changes(schedule.placement, schedule.recomputed, units)
        unit = costs.memory_unit(schedule.placement, units)
        return [[held * unit for held in held_after(order, changes, weights, units)] for order in schedule.orders]

    @cached_property
    def step_starts(self) -> tuple[tuple[float, ...], ...]:
        """For each device, the starts of all steps but the first. All are empty if steps overlap on a device."""
        none = ((),) * len(self.columns)
        if self.timeline.steps == 1:
            return none
        starts = []
        for row in self.rows:
            steps = [self.step_of(box) for box in row]
            if steps != sorted(steps):
                return none
            firsts = dict(reversed([(step, box.start) for step, box in zip(steps, row, strict=True)]))
            starts.append(tuple(sorted(firsts.values())[1:]))
        return tuple(starts)

    def step_of(self, box: Box) -> int:
        """Return the number of the step that an action belongs to, from 0."""
        return (box.action.microbatch or 0) // (len(self.timeline.schedule.units) // self.timeline.steps)

    @cached_property
    def host_transfers(self) -> tuple[tuple[HostTransfer, ...], ...]:
        """The copies of each device that take time, in the order in which they are started."""
        return tuple(
            tuple(
                HostTransfer(action, device, start - self.origin, end - self.origin)
                for action, start, end in transfers
                if end > start
            )
            for device, transfers in enumerate(self.timeline.transfers)
        )

    @cached_property
    def _needed(self) -> list[Sequence[int]]:
        """For each box of all devices, the indices of the boxes on other devices whose results it needs.

        Indices count the boxes of all devices in turn. Collectives do not count. Each action of a pair has its own
        entry.
        """
        schedule = self.timeline.schedule
        dependencies = Dependencies.of_schedule(replace(schedule, pairs=frozenset()) if schedule.pairs else schedule)
        actions = list(chain.from_iterable(columns.actions for columns in self.columns))
        vocabulary = VOCABULARY if schedule.vocabulary_barriers else ()
        places: Sequence[int] = range(len(actions))  # per node of ``dependencies``
        if vocabulary:  # some actions have no box, and collectives are nodes too
            places_of = {action: at for at, action in enumerate(actions)}
            places = [places_of.get(action, -1) for action in dependencies.actions]
        needed: list[Sequence[int]] = [()] * len(actions)
        for at, waits in zip(places, dependencies.graph.waits, strict=True):
            if waits and at >= 0 and actions[at].kind not in vocabulary:
                # An action in a window may need a result from before the window.
                needed[at] = [places[node] for node, _ in waits if node != NEVER and places[node] >= 0]
        return needed

    @property
    def messages(self) -> Iterator[DrawnMessage]:
        """Every dependency between two devices, except on collectives, in the order of the consumers."""
        boxes = list(chain.from_iterable(self.rows))
        for consumer, needed in zip(boxes, self._needed, strict=True):
            yield from (DrawnMessage(boxes[at], consumer) for at in needed)

    @cached_property
    def sources(self) -> list[int]:
        """For each box of all devices, the index of the box on another device that it waits for, -1 if there is none.

        Indices count the boxes of all devices in turn. If a box needs several results, it waits for the one that comes
        last.
        """
        pairs = self.timeline.schedule.pairs
        ends = list(chain.from_iterable(columns.ends for columns in self.columns))
        sources = [max(needed, key=ends.__getitem__, default=-1) for needed in self._needed]
        for at, action in enumerate(chain.from_iterable(columns.actions for columns in self.columns)) if pairs else ():
            if action in pairs:  # the first action of a pair waits for the inputs of both
                sources[at] = max(sources[at : at + 2], key=lambda source: ends[source] if source >= 0 else -1.0)
        return sources

    @cached_property
    def awaited(self) -> dict[Action, Box]:
        """For each action that needs results of other devices, the box of the producer that ends last."""
        boxes = list(chain.from_iterable(self.rows))
        return {box.action: boxes[source] for box, source in zip(boxes, self.sources, strict=True) if source >= 0}

    @cached_property
    def bubbles(self) -> tuple[tuple[Bubble, ...], ...]:
        """The idle times of each device from the start to the end of the timeline, in order."""
        makespan = self.timeline.makespan
        least = 1e-9 * (makespan or 1)
        rows = []
        for device, row in enumerate(self.rows):
            now, idle = 0.0, []
            for box in row:
                if box.start - now > least:
                    idle.append(Bubble(device, now, box.start, box, self.awaited.get(box.action)))
                now = max(now, box.end)
            if makespan - now > least:
                idle.append(Bubble(device, now, makespan, None, None))
            rows.append(tuple(idle))
        return tuple(rows)

    @cached_property
    def legend(self) -> list[tuple[Kind, int]]:
        """The pairs ``(kind, chunk)`` that occur, in the order of ``COMPUTE`` and then by chunk."""
        used = {(kind, chunk) for (kind, _), chunk in self.chunks.items()}
        return [pair for kind in COMPUTE for pair in sorted(pair for pair in used if pair[0] is kind)]

    def legend_name(self, kind: Kind, chunk: int) -> str:
        """Return the name of a kind of action in a legend, for example ``F forward, chunk 1``."""
        has_chunks = self.num_chunks > 1 and kind not in VOCABULARY
        return f"{kind} {kind.spec.says}" + (f", chunk {chunk}" if has_chunks else "")

    def colour(self, kind: Kind, chunk: int) -> str:
        """Return the colour of a chunk's actions of this kind."""
        return colour(kind, chunk, self.num_chunks)

    def memory_scale(self, runs: Sequence[DrawnRun]) -> float:
        """Return the top of this timeline's memory axis, if ``runs`` are drawn together.

        Timelines in bytes share one axis. Timelines in activation units share another one, which contains 1.
        """
        tops = [max(run.timeline.peak, float(run.in_units)) for run in runs if run.in_units == self.in_units]
        return 1.12 * (max(tops) or 1.0)

    @cached_property
    def peak_text(self) -> str:
        """The peak memory as text, with its share of 1F1B's bytes if that is known."""
        peak, share = self.memory_text(self.timeline.peak), share_of_1f1b(self.timeline)
        return peak if share is None else f"{peak} ({share:.3g} of 1F1B's)"

    @property
    def headline(self) -> str:
        """One line about the timeline, for example ``v-half: p=8, m=33, bubble 7.9%, peak 0.625``."""
        of_run = self.timeline.measured.bubble_rate
        bubble = f"{self.timeline.bubble_rate:.1%}" if of_run is None else f"{of_run:.1%} (median of the run's steps)"
        schedule, barriers = self.timeline.schedule, self.timeline.schedule.vocabulary_barriers
        head = ", with a head as long as one device's layers" if self.timeline.costs.vocabulary is None else ""
        passes = f" with vocabulary passes ({barriers} barrier{'s' if barriers > 1 else ''}{head})" if barriers else ""
        return (
            f"{schedule.name}{passes}: p={schedule.num_devices}, m={schedule.num_microbatches // self.timeline.steps}, "
            f"bubble {bubble}, peak {self.peak_text}"
        )

    def memory_text(self, held: float) -> str:
        """Return an amount of memory as text: a number of activation units, or bytes in GiB or MiB."""
        return f"{held:.4g}" if self.in_units else bytes_text(held)
