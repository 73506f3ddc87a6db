"""Define a schedule: a placement, and for every device the order of its actions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_pipemem.schedule.action import FORWARD, PREPARING, RECOMPUTE, VOCABULARY, Action, Kind
from megatron_pipemem.schedule.csv_format import Header, Table, read_table, write_header, write_table
from megatron_pipemem.schedule.display import Shown, brief
from megatron_pipemem.schedule.placement import Placement

Order = tuple[Action, ...]

NEVER_FLUSHED = (
    "a file shows a stretch of a pipeline that is never flushed, and not what its steps have in common; name the family that "
    "made it"
)
"""Why schedules with weight updates do not run from a file."""


class WeightUpdates(NamedTuple):
    """Say how an asynchronous schedule updates its weights."""

    every: int  # microbatches per update; the last group may be smaller
    kept: int  # how many versions, counted from the newest, a stage has room for
    delay: int | None = None
    """Group ``g`` uses version ``max(0, g - delay)`` on every stage; ``None``: a forward takes the newest version of its
    stage."""


@dataclass(frozen=True)
class Schedule(Shown):
    """Immutable. Says what runs where and in which order, not when and not how messages travel.

    Args:
        name: the name it was built under, or ``csv`` for an imported one.
        placement: which device holds which stage.
        num_microbatches: microbatches of one step, or of the window shown of an asynchronous schedule.
        orders: one tuple of actions (``action.ORDERED``) per device.
        slices: sequence slices into which every microbatch is cut; each is a unit of its own in ``orders`` (``Action``).
        updates: when weights change within the orders; ``None`` when they only do at the end of the step.
        vocabulary_barriers: barriers between the last stage's forward and backward when head and embedding are cut over the
            devices: 1 (Algorithm 2 of arXiv 2411.05288) or 2 (its Algorithm 1). 0: they are part of the end stages.
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Order, ...]
    slices: int = 1
    updates: WeightUpdates | None = None
    vocabulary_barriers: int = 0

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
    def num_units(self) -> int:
        """Return what a stage runs forward and backward once each: microbatches, or the sequence slices of all of them."""
        return self.num_microbatches * self.slices

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether any backward is split into I and W."""
        return any(action.kind is Kind.I for order in self.orders for action in order)

    @cached_property
    def recomputed(self) -> Mapping[int, Kind]:
        """The stages whose forwards run again before their backwards, whole (``R``) or in part (``RS``)."""
        return {a.stage: a.kind for order in self.orders for a in order if a.kind in RECOMPUTE}

    @cached_property
    def prepared(self) -> Mapping[int, tuple[Kind, ...]]:
        """The stages on which other actions wait for one of their own, and for which kinds (``KindSpec.prepares``)."""
        found: dict[int, dict[Kind, None]] = {}
        for order in self.orders:
            for kind, stage, _ in order:
                if kind in PREPARING:
                    found.setdefault(stage, {})[kind] = None
        return {stage: tuple(kinds) for stage, kinds in found.items()}

    @cached_property
    def offloads(self) -> bool:
        """Return whether any activations leave the device."""
        return any(action.kind is Kind.OFFLOAD for order in self.orders for action in order)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that affects execution. All ranks of a run compare it before the first step."""
        text = repr((self.placement.devices, self.num_microbatches)) + self.to_csv()
        return hashlib.sha256(text.encode()).hexdigest()

    def forward_only(self) -> Schedule:
        """Return the same schedule with nothing but its forwards, and the losses where they stand in it, for
        evaluation.
        """
        return replace(
            self,
            name=f"{self.name} (forward only)",
            orders=tuple(tuple(a for a in order if a.kind in FORWARD) for order in self.orders),
            updates=None,
        )

    def to_csv(self) -> str:
        """Return one line per device, one action per cell, as torch's ``_dump_csv`` writes compute-only schedules.

        What those cannot say, replicas, slices, weight updates and vocabulary parallelism, stands in a first line that
        starts with ``#``.
        """
        return write_header(self.header(self.orders)) + write_table(self.orders)

    def header(self, rows: Sequence[Order]) -> Header:
        """Return what a table with these rows, one per device, cannot say about the schedule."""
        placement = self.placement
        idle = tuple(device for device, row in enumerate(rows) if not row)
        told = {action.stage for row in rows for action in row if action.kind not in VOCABULARY}
        tells_devices = placement.replicas == 1 and not idle and told == set(range(placement.num_stages))
        devices = () if tells_devices else placement.devices
        return Header(placement.replicas, devices, idle, self.slices, self.vocabulary_barriers, *(self.updates or ()))

    @classmethod
    def from_csv(cls, text: str, dialect: str = "pipemem", name: str = "csv") -> Schedule:
        """Read what ``to_csv`` writes. The placement is recovered from which device runs which stage.

        Nothing is validated beyond the form: pass the result to ``validate``.

        Args:
            text: one line per device; empty cells are idle steps and are dropped. A line that starts with ``#`` tells
                of replicas, slices, weight updates and vocabulary parallelism.
            dialect: one of ``csv_format.DIALECTS``. ``pipemem`` reads what ``to_csv`` writes and nothing else. The
                others also read both generations of torch.distributed.pipelining's letters, drop the messages and
                sharding actions of its lowered files, because ``lower`` derives our own, and take an ``OVERLAP_F_B``
                pair for its two actions in turn.
            name: name of the resulting schedule.

        Raises:
            ScheduleFormatError: with the line and the cell, when a cell is no such action, or when a stage stands
                on two devices or on none.
        """
        table = read_table(text, dialect)
        if dialect == "pipemem":
            table.require_orders_only()
        return cls.of_table(table, name, table.num_microbatches())

    @classmethod
    def of_table(cls, table: Table, name: str, num_microbatches: int) -> Schedule:
        """Return the schedule in a table that has been read.

        Args:
            table: as ``read_table`` returns it.
            name: name of the schedule.
            num_microbatches: microbatches of the step.

        Raises:
            ScheduleFormatError: a stage stands on two devices or on none.
        """
        header = table.header
        updates = None
        if header.update_every is not None:
            assert header.versions_kept is not None, "read_header refuses one without the other"
            updates = WeightUpdates(header.update_every, header.versions_kept, header.update_delay)
        return cls(name, table.placement(), num_microbatches, table.orders, header.slices, updates, header.vocabulary)


@dataclass(frozen=True, eq=False)
class Program:
    """A lowered schedule: what the executor interprets. Equal to itself alone."""

    schedule: Schedule  # the schedule it was lowered from
    actions: tuple[Order, ...]
    """One tuple per device: the schedule's order, with messages and whole-stage actions between."""

    def __repr__(self) -> str:
        return f"<Program of {self.schedule!r}, {sum(map(len, self.actions))} with messages>"

    @property
    def placement(self) -> Placement:
        return self.schedule.placement


class Use(NamedTuple):
    """One action of a schedule and the weights it meets."""

    action: Action
    device: int
    position: int
    version: int
    """the version that the action uses"""
    newest: int
    """the newest version of its stage when the action starts"""
    updates: bool
    """whether its stage makes the next version right after it"""


def weight_uses(schedule: Schedule) -> Iterator[Use]:
    """Yield every action with its weights, device by device, for a schedule that has ``updates``.

    A backward whose forward does not come before it is taken to use the version that a forward would take now.
    """
    assert schedule.updates is not None
    every, _, delay = schedule.updates
    for device, order in enumerate(schedule.orders):
        groups = [action.microbatch // schedule.slices // every for action in order]
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
    """Return per device, the most versions that it holds of any of its stages: the newest, and all that are still to be
    used.

    The old version is gone by the time the new one is counted, unless some action still needs it.
    """
    most = [1] * len(schedule.orders)
    if schedule.updates is None:
        return tuple(most)
    uses = list(weight_uses(schedule))
    coming = Counter((use.action.stage, use.version) for use in uses)
    held: dict[int, set[int]] = {}
    for use in uses:
        stage = use.action.stage
        versions = held.setdefault(stage, {0})
        coming[stage, use.version] -= 1
        newest = use.newest + use.updates
        if use.updates:
            versions.add(newest)
        versions -= {version for version in versions if version != newest and not coming[stage, version]}
        most[use.device] = max(most[use.device], len(versions))
    return tuple(most)
