"""Where the schedules of a run come from: a family or a file here, a search in ``search_source``."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron.core import num_microbatches_calculator

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.cut_flags import as_built
from megatron_pipemem.mcore.agreement import is_first_rank
from megatron_pipemem.report.run import announcement
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate
from megatron_pipemem.schedule.families.serial_orders import forward_schedule
from megatron_pipemem.schedule.model_cut import placements_of
from megatron_pipemem.schedule.registry import build_schedule, chunks_per_device, family
from megatron_pipemem.schedule.request import check_devices_of_file, check_microbatches_of_file, schedule_of_file

logger = logging.getLogger(__name__)

ONE_BY_ONE = "one microbatch at a time, because nothing else was found to keep the cap"

MemoryDeltas = Mapping[Kind, tuple[float, ...]]
"""By how many bytes every kind of action, messages included, changes what its device holds, one value per stage."""


class Shape(NamedTuple):
    """What a step's schedule depends on.

    Args:
        num_devices: pipeline ranks.
        chunks: model chunks per rank.
        num_microbatches: microbatches of the step.
        group_size: microbatches per group of the interleaved schedule, as Megatron's flags say.
    """

    num_devices: int
    chunks: int
    num_microbatches: int
    group_size: int | None = None


@dataclass(frozen=True)
class Plan:
    """A schedule, and what was expected of it when it was chosen.

    Args:
        schedule: what to run.
        costs: what it was chosen for; seconds unless they are unit costs.
        priced_by: ``unit``, ``file`` or ``measured``.
        reason: why it was chosen now.
        lower_bound: no schedule of this placement within the cap is faster; ``None`` where nobody searched.
        search_seconds: how long the search took.
        notes: what else there is to say about it.
    """

    schedule: Schedule
    costs: Costs
    priced_by: str
    reason: str
    lower_bound: float | None = None
    search_seconds: float | None = None
    notes: str = ""

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)


def announce(plan: Plan) -> None:
    """Log what is about to run, once for the job."""
    if not is_first_rank():
        return
    try:
        line = announcement(plan.timeline)
    except Exception as error:  # a line of the log ends no run
        line = f"{plan.schedule.name}, which cannot be simulated: {error}"
    logger.info("%s: %s", plan.reason, line)


class Source(ABC):
    """Makes the schedules of a run.

    Args:
        name: what the user typed.
        costs: prices of plans; measured ones may take their place in the run.
        priced_by: where ``costs`` are from.
    """

    may_split: bool
    """Whether a schedule may have I and W, so that layers must be able to split their backwards."""
    may_offload = False
    """Whether activations may leave the device."""
    may_recompute = False
    """Whether a schedule may run a forward, or part of one, again."""
    is_round_robin: bool
    """Whether Megatron's own placement is all that can come."""
    chunks: int
    """Model chunks per rank and replica to ask Megatron for when the user does not say how the model is cut."""
    barriers = 0
    """Of vocabulary parallelism, to plan for; with 0, embedding and head are parts of the first and the last stage."""
    needs_bytes = False
    """Whether it cannot plan before somebody has counted what actions take and give back."""
    single_queue = False
    """Whether its schedules are lowered for ranks that serve everything in one queue."""
    needs_seconds = False
    """Whether it plans better when somebody has timed actions, whatever costs the user has named."""

    def __init__(self, name: str, costs: Costs, priced_by: str):
        self.name = name
        self.costs = costs
        self.priced_by = priced_by

    @abstractmethod
    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        """The placement for a model with that many chunks per rank; ``None`` where nobody knows them yet.

        Raises:
            UnsupportedError: there is none on that many devices.
        """

    @abstractmethod
    def plan(self, shape: Shape, reason: str, before: Plan | None = None, minimum_gain: float = 0.0) -> Plan:
        """A schedule for training steps of this shape. Every rank of the job calls this at the same time.

        Args:
            shape: of the step.
            reason: why a plan is wanted.
            before: the plan so far, if there is one.
            minimum_gain: the part of its makespan that another schedule must save to take its place.

        Raises:
            UnsupportedError: there is no such schedule.
        """

    @staticmethod
    def _if_faster(found: Plan, before: Plan | None, minimum_gain: float) -> Plan:
        """``found``, or what ran before at today's costs if that is hardly slower; see ``plan``."""
        if before is None:
            return found
        reason = found.reason
        if found.schedule != before.schedule:
            reason = f"{reason}; no schedule is that much faster"
        kept = replace(found, schedule=before.schedule, reason=reason, notes=before.notes)
        return kept if found.timeline.makespan > kept.timeline.makespan * (1 - minimum_gain) else found

    def likely(self, shape: Shape) -> Schedule:
        """What most training steps of this shape will run, for choices that must be made before the first one.

        Every rank of the job calls this at the same time.

        Raises:
            PipememError: as ``plan``.
        """
        return self.plan(shape, "for a choice before the first step").schedule

    def forwards(self, shape: Shape) -> Schedule:
        """A schedule for evaluation steps of this shape."""
        placement = self.placement(shape.num_devices, shape.chunks)
        return forward_schedule(placement, shape.num_microbatches, f"{self.name} (forward only)")

    def measured(self, costs: Costs | None, changes: MemoryDeltas | None) -> None:
        """Plan from now on with what the run itself has shown.

        Args:
            costs: seconds, or ``None`` when nothing was timed.
            changes: bytes, or ``None`` when nothing was counted.
        """
        if costs is not None:
            self.costs = replace(costs, memory=self.costs.memory, channel=self.costs.channel)
            self.priced_by = "measured"


# The bytes of a message belong to the action that needs it or makes it.
_WITH_MESSAGES = {
    Kind.F: (Kind.F, Kind.RECV_F, Kind.SEND_F),
    Kind.I: (Kind.I, Kind.RECV_I, Kind.SEND_I),
    Kind.W: (Kind.W, Kind.REDUCE_GRAD),
}


def with_messages(changes: MemoryDeltas, placement: Placement) -> dict[Kind, tuple[float, ...]]:
    """What compute actions change, their messages included, for searches that know no messages."""
    empty = (0.0,) * placement.num_stages
    return {
        kind: tuple(map(sum, zip(*(changes.get(part, empty) for part in parts), strict=True)))
        for kind, parts in _WITH_MESSAGES.items()
    }


class FamilySource(Source):
    """Schedules of a registered family.

    Args:
        name: of the family.
        memory_cap: in activation units, or ``None``.
        options: of the family.
        costs: prices of plans.
        priced_by: where ``costs`` are from.
    """

    def __init__(
        self,
        name: str,
        memory_cap: float | Sequence[float] | None = None,
        options: Mapping[str, object] | None = None,
        costs: Costs | None = None,
        priced_by: str = "unit",
    ):
        super().__init__(name, costs or Costs(), priced_by)
        chosen = family(name)
        self._family = chosen
        self._memory_cap = memory_cap
        self._options = dict(options or {})
        self.may_split = chosen.splits_backward
        self.may_offload = chosen.offloads
        self.is_round_robin = self._options.get("placement", chosen.placement) in ("linear", "interleaved")
        self.chunks = chunks_per_device(name, **self._options) // chosen.replicas

    def build(
        self, num_devices: int, chunks: int | None, num_microbatches: int, group_size: int | None = None
    ) -> Schedule:
        """The family's schedule for a model with ``chunks`` chunks per rank.

        Raises:
            UnsupportedError: the family cannot be built so.
        """
        options = dict(self._options)
        accepted = family(self.name).options
        if group_size == num_devices:  # Megatron's default, and ours, which copes better with an odd last group
            group_size = None
        # Only where the user left them to us: Megatron's own flags then say how the model is cut.
        for option, value in (("chunks", chunks), ("group_size", group_size)):
            if option in accepted and value is not None:
                options.setdefault(option, value)
        return build_schedule(
            self.name,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            memory_cap=self._memory_cap,
            costs=self.costs,
            **options,
        )

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        try:
            return self.build(num_devices, chunks, self._family.fewest_microbatches(num_devices)).placement
        except UnsupportedError:
            if chunks is not None:  # which may be what is wrong, and the user knows them by Megatron's names
                placements_of(self.name, self._options, num_devices, as_built(chunks))
            raise

    def plan(self, shape: Shape, reason: str, before: Plan | None = None, minimum_gain: float = 0.0) -> Plan:
        return self._if_faster(Plan(self._build(shape), self.costs, self.priced_by, reason), before, minimum_gain)

    def forwards(self, shape: Shape) -> Schedule:
        try:
            return self._build(shape).forward_only()
        except UnsupportedError:  # for training, with as many microbatches as these; evaluation has other numbers
            return super().forwards(shape)

    def _build(self, shape: Shape) -> Schedule:
        return self.build(shape.num_devices, shape.chunks, shape.num_microbatches, shape.group_size)


class FileSource(Source):
    """The schedule of a CSV file, as ``Schedule.to_csv`` writes it.

    Args:
        path: of the file; every rank reads it.
        memory_cap: in activation units, or ``None``.
        costs: prices of plans.
        priced_by: where ``costs`` are from.

    Raises:
        PipememError: see ``schedule_of_file``.
    """

    def __init__(self, path: str, memory_cap: float | Sequence[float] | None, costs: Costs, priced_by: str):
        super().__init__(path, costs, priced_by)
        self._schedule = schedule_of_file(path, memory_cap)
        self.barriers = self._schedule.vocabulary_barriers
        placement = self._schedule.placement
        self.may_split = self._schedule.splits_backward
        self.may_offload = self._schedule.offloads
        self.may_recompute = bool(self._schedule.recomputed)
        self.is_round_robin = placement.replicas == 1 and all(
            device == stage % placement.num_devices for stage, device in enumerate(placement.devices)
        )
        self.chunks = placement.num_chunks // placement.replicas

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        check_devices_of_file(self._schedule, num_devices)
        return self._schedule.placement

    def plan(self, shape: Shape, reason: str, before: Plan | None = None, minimum_gain: float = 0.0) -> Plan:
        check_microbatches_of_file(self._schedule, shape.num_microbatches)
        return Plan(self._schedule, self.costs, self.priced_by, reason)


def microbatches_of_the_run() -> int | None:
    """What Megatron's own calculator says, where a training loop has set it up."""
    try:
        return num_microbatches_calculator.get_num_microbatches()
    except AttributeError:
        return None
