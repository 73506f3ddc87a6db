"""Schedules: a placement and the order of actions of every device, before and after lowering."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter, lt
from typing import NamedTuple

from megatron_pipemem.schedule.action import FORWARD, PREPARING, RECOMPUTE, VOCABULARY, Action, Kind
from megatron_pipemem.schedule.csv_format import Header, Table, read_table, write_header, write_table
from megatron_pipemem.schedule.display import Shown, brief
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import Units, as_units

Order = tuple[Action, ...]

NEVER_FLUSHED = (
    "a file shows a part of a pipeline that is never flushed, and not the steps in it; name the family that made it"
)
"""The reason why an asynchronous schedule cannot be run from a file. Messages of errors end with it."""


class WeightUpdates(NamedTuple):
    """The weight updates within an asynchronous schedule."""

    every: int  # microbatches per update; the last group may be smaller
    kept: int  # the most versions that a stage keeps, the newest included
    delay: int | None = None
    """The microbatches of update ``g`` use version ``max(0, g - delay)`` on every stage. ``None``: a forward uses the
    newest version of its stage."""


@dataclass(frozen=True)
class Schedule(Shown):
    """The actions of every device, in order, without times and messages. Schedules are immutable.

    Args:
        name: the name of its family, or ``csv`` for an imported schedule.
        placement: the device of every stage.
        units: the units of one step, or of the part of an endless asynchronous run that it shows. A number stands for
            that many whole microbatches.
        orders: one tuple of actions (``action.ORDERED``) per device.
        updates: weight updates within the orders; ``None`` if weights change only at the end of the step.
        vocabulary_barriers: 0 if the first stage has the embedding and the last stage the head. If both are cut over
            the devices, the number of barriers between forward and backward of the last stage: 1 (Algorithm 2 of
            arXiv 2411.05288) or 2 (its Algorithm 1).
        pairs: forwards, each of which runs together with the backward (I or B) that follows it in its device's order.
            A pair starts when the inputs of both have arrived, and both results are ready when it ends.
    """

    name: str
    placement: Placement
    units: Units
    orders: tuple[Order, ...]
    updates: WeightUpdates | None = None
    vocabulary_barriers: int = 0
    pairs: frozenset[Action] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", as_units(self.units))

    def __repr__(self) -> str:
        size = f"{self.num_stages} stages on {self.num_devices} devices"
        return (
            f"<Schedule {brief(self.name)}: {size} ({self.placement.name}), {self.num_microbatches} microbatches, "
            f"{sum(map(len, self.orders))} actions>"
        )

    @property
    def num_devices(self) -> int:
        return self.placement.num_devices

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.units.num_microbatches

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Return the kinds of all actions."""
        return frozenset(map(itemgetter(0), chain.from_iterable(self.orders)))

    @property
    def splits_backward(self) -> bool:
        """Return whether any backward runs as I and W."""
        return Kind.I in self.kinds

    @cached_property
    def recomputed(self) -> Mapping[int, Kind]:
        """Return the recomputed stages, each with the kind of its recomputation, ``R`` or ``RS``."""
        if self.kinds.isdisjoint(RECOMPUTE):
            return {}
        return {a.stage: a.kind for order in self.orders for a in order if a.kind in RECOMPUTE}

    @cached_property
    def prepared(self) -> Mapping[int, tuple[Kind, ...]]:
        """Return, by stage, the computing kinds that prepare other actions (``KindSpec.prepares``), such as ``R``.

        Stages without such kinds are left out.
        """
        kinds_of: dict[int, dict[Kind, None]] = {}
        for order in self.orders:
            for kind, stage, _ in order:
                if kind in PREPARING:
                    kinds_of.setdefault(stage, {})[kind] = None
        return {stage: tuple(kinds) for stage, kinds in kinds_of.items()}

    @property
    def offloads(self) -> bool:
        """Return whether any activations are copied to the host."""
        return Kind.OFFLOAD in self.kinds

    @cached_property
    def proofs(self) -> set[str]:
        """The proofs of ``validator.validate`` that hold for this schedule. It never changes, so they hold for good."""
        return set()

    @cached_property
    def digest(self) -> str:
        """Return a hash of everything that affects execution. All ranks compare their digests before the first step."""
        text = repr((self.placement.devices, self.num_microbatches)) + self.to_csv()
        return hashlib.sha256(text.encode()).hexdigest()

    def forward_only(self) -> Schedule:
        """Return the schedule for evaluation: only the actions that evaluation runs, such as forwards, losses and S.

        It has no pairs and no weight updates.
        """
        return replace(
            self,
            name=f"{self.name} (forward only)",
            orders=tuple(tuple(a for a in order if a.kind in FORWARD) for order in self.orders),
            updates=None,
            pairs=frozenset(),
        )

    def to_csv(self) -> str:
        """Return one line per device and one action per cell, as torch's ``_dump_csv`` writes compute-only schedules.

        Properties that the actions do not show, such as units (see ``csv_format``), are written to a first line that
        starts with ``#``.
        """
        return write_header(self.header(self.orders)) + write_table(self.orders, pairs=self.pairs)

    def header(self, rows: Sequence[Order]) -> Header:
        """Return the properties of the schedule that cannot be seen in a table with ``rows``, one per device."""
        placement = self.placement
        idle = tuple(device for device, row in enumerate(rows) if not row)
        shown = {action.stage for row in rows for action in row if action.kind not in VOCABULARY}
        shows_devices = placement.replicas == 1 and not idle and shown == set(range(placement.num_stages))
        devices = () if shows_devices else placement.devices
        parts = (self.units.parts,) if self.units.are_equal else self.units.sizes
        return Header(placement.replicas, devices, idle, parts, self.vocabulary_barriers, *(self.updates or ()))

    @classmethod
    def from_csv(cls, text: str, dialect: str = "pipemem", name: str = "csv") -> Schedule:
        """Read the text of ``to_csv``. The placement is in the first line, or follows from the stages in every line.

        Only the form is checked: pass the result to ``validate``.

        Args:
            text: one line per device. Empty cells are idle steps and are dropped. A line that starts with ``#`` has
                replicas, parts of microbatches, weight updates and vocabulary parallelism.
            dialect: one of ``csv_format.DIALECTS``. ``pipemem`` reads only text of ``to_csv``. The others also read
                the letters of torch.distributed.pipelining before and since 2.6. They drop the messages and sharding
                actions in torch's lowered files, because ``lower`` adds messages. They read an ``OVERLAP_F_B`` pair of
                two backwards as two actions, one after the other.
            name: name of the resulting schedule.

        Raises:
            ScheduleFormatError: a cell is not an action, or a stage is on two devices or on none. The error has the
                line and the column.
        """
        table = read_table(text, dialect)
        if dialect == "pipemem":
            table.require_orders_only()
        return cls.of_table(table, name, table.units())

    @classmethod
    def of_table(cls, table: Table, name: str, units: Units) -> Schedule:
        """Return the schedule in a table.

        Args:
            table: the result of ``read_table``.
            name: name of the schedule.
            units: the units of the step.

        Raises:
            ScheduleFormatError: a stage is on two devices or on none.
        """
        header = table.header
        updates = None
        if header.update_every is not None:
            assert header.versions_kept is not None, "read_header refuses one without the other"
            updates = WeightUpdates(header.update_every, header.versions_kept, header.update_delay)
        return cls(name, table.placement(), units, table.orders, updates, header.vocabulary, table.pairs)


@dataclass(frozen=True, eq=False)
class Program:
    """A lowered schedule, which the executor runs. Two programs are never equal, even with the same actions."""

    schedule: Schedule  # the schedule it was lowered from
    actions: Sequence[Order]
    """One tuple per device: the schedule's order, with messages and gradient reductions inserted."""

    def __repr__(self) -> str:
        return f"<Program of {self.schedule!r}, {sum(map(len, self.actions))} with messages>"

    @property
    def placement(self) -> Placement:
        return self.schedule.placement


class Use(NamedTuple):
    """An action of an asynchronous schedule, with the version of the weights that it uses."""

    action: Action
    device: int
    position: int
    version: int  # the version that the action uses
    newest: int  # the newest version of its stage when the action starts
    updates: bool  # whether its stage makes the next version right after the action


def weight_uses(schedule: Schedule) -> Iterator[Use]:
    """Yield every action of an asynchronous schedule with its weight version, device by device.

    For a backward whose forward is missing, the version is the one that a forward would use at that time.
    """
    assert schedule.updates is not None
    every, _, delay = schedule.updates
    for device, order in enumerate(schedule.orders):
        groups = [schedule.units.microbatch(action.microbatch) // every for action in order]
        last = {
            (action.stage, group): position
            for position, (action, group) in enumerate(zip(order, groups, strict=True))
            if action.kind is Kind.W or action.kind is Kind.B
        }
        newest: Counter[int] = Counter()
        used: dict[tuple[int, int], int] = {}
        for position, (action, group) in enumerate(zip(order, groups, strict=True)):
            _, stage, microbatch = action
            version = used.get((stage, microbatch))
            if version is None:
                version = newest[stage] if delay is None else max(0, group - delay)
                used[stage, microbatch] = version
            updates = last.get((stage, group)) == position
            yield Use(action, device, position, version, newest[stage], updates)
            newest[stage] += updates


def versions_held(schedule: Schedule) -> tuple[int, ...]:
    """Return for every device the most weight versions that it holds of one stage at the same time.

    A stage holds its newest version and all versions that later actions use. A version without later uses is dropped
    before the next version is counted.
    """
    most = [1] * len(schedule.orders)
    if schedule.updates is None:
        return tuple(most)
    uses = list(weight_uses(schedule))
    coming = Counter((use.action.stage, use.version) for use in uses)
    versions_of: dict[int, set[int]] = {}
    for use in uses:
        stage = use.action.stage
        versions = versions_of.setdefault(stage, {0})
        coming[stage, use.version] -= 1
        newest = use.newest + use.updates
        if use.updates:
            versions.add(newest)
        versions -= {version for version in versions if version != newest and not coming[stage, version]}
        most[use.device] = max(most[use.device], len(versions))
    return tuple(most)


def numbered(orders: Sequence[Sequence[Action]]) -> list[range]:
    """Number all actions device by device, from 0, and return the numbers of every device as a range."""
    lanes, first = [], 0
    for order in orders:
        lanes.append(range(first, first + len(order)))
        first += len(order)
    return lanes


class ActionNodes:
    """The nodes of orders, or of the rows of a program: every action has a number, device by device.

    Attributes:
        lanes: the nodes of every device.
        actions: the action of every node.
        groups: by kind and stage, the node of every unit, in the order of the device. Actions without a unit have the
            unit 0. Of an action that occurs twice, the groups have the last node.
    """

    def __init__(self, orders: Sequence[Sequence[Action]]) -> None:
        self.lanes = numbered(orders)
        self.actions: list[Action] = list(chain.from_iterable(orders))
        self.groups: dict[tuple[Kind, int], dict[int, int]] = defaultdict(dict)
        for node, (kind, stage, unit) in enumerate(self.actions):
            self.groups[kind, stage][unit or 0] = node

    def of(self, *kinds: Kind, stage: int) -> Mapping[int, int]:
        """Return the nodes of these kinds on a stage, by unit."""
        groups = [self.groups[kind, stage] for kind in kinds if (kind, stage) in self.groups]
        if len(groups) == 1:
            return groups[0]
        return {unit: node for group in groups for unit, node in group.items()}


def come_before(earlier: Mapping[int, int], nodes: Mapping[int, int]) -> bool:
    """Return whether the first argument has a smaller node for every unit of the second."""
    return earlier.keys() >= nodes.keys() and all(map(lt, map(earlier.__getitem__, nodes), nodes.values()))
