"""Hold what a schedule is chosen by (prices from the start, and what a run has measured since), and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import MESSAGES, VOCABULARY, Kind
from megatron_pipemem.schedule.action_prices import held_after, unit_weights
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate

if TYPE_CHECKING:  # loaded when something is searched for
    from megatron_pipemem.features.offload.orders import OffloadPlan
    from megatron_pipemem.features.offload.transfers import HostLink
    from megatron_pipemem.search import SearchResult
    from megatron_pipemem.search.result import ResultCache

UNIT, FILE, MEASURED = "unit", "file", "measured"
"""Where costs are from: nowhere, a file of the user's, the run itself."""

ASSUMED_RATIO = 1.0
"""Of the round trip of a layer's activations to its F, I and W, until both are measured."""

MemoryDeltas = Mapping[Kind, tuple[float, ...]]
"""By how many bytes every kind of action, messages included, changes what its device holds, one value per stage and slice,
stage by stage."""


class Shape(NamedTuple):
    """The size of a step, and whether it evaluates."""

    num_devices: int
    chunks: int | None
    """Model chunks per rank; ``None`` before a model is there."""
    num_microbatches: int
    group_size: int | None = None
    """Microbatches per group of the interleaved schedule, as Megatron's flags say."""
    forward_only: bool = False


@dataclass(frozen=True)
class Choice:
    """A schedule, and what was expected of it when it was chosen."""

    schedule: Schedule
    costs: Costs
    """What it was chosen for, in seconds unless they are unit costs. Where it was searched for, their memory is what the cap is
    about: none for activation units."""
    priced_by: str = UNIT
    why: str = ""
    bound: float | None = None
    """No schedule of this placement within the cap is faster; ``None`` without a search."""
    search_seconds: float | None = None
    notes: str = ""
    search: SearchResult | None = None
    """The best of all placements, where orders were searched for."""
    offload: OffloadPlan | None = None
    """What leaves the device or is computed again, and why not more, where that was planned."""
    arrival_makespan: float | None = None
    """Of the microbatches of one step in arrival order, by the schedule that all steps begin with, where the step has a plan of
    its own."""

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)

    @property
    def alone(self) -> Choice:
        """Return the choice without what else was found: what ranks tell each other."""
        return replace(self, search=None, offload=None)


@dataclass(frozen=True)
class Knowledge:
    """Hold what a schedule is chosen for."""

    costs: Costs = Costs()
    """Seconds; with bytes and a channel to the host where these are known beforehand."""
    priced_by: str = UNIT
    """``unit``, ``file`` or ``measured``."""
    measures: bool = False
    """Whether a run will measure what is not known, bytes first and seconds then."""
    changes: MemoryDeltas | None = None
    """Bytes that a run has counted; ``None`` before."""
    selective: tuple[float, ...] | None = None
    """Per stage and slice, bytes of a forward in a step in which every stage was recomputed selectively."""
    placement: Placement | None = None
    """Where the model's stages are; ``None`` before it has been built."""
    ratio: float | None = None
    """Seconds of a round trip of a layer's activations to the host over those of its F, I and W, if given."""
    links: tuple[HostLink, ...] | None = None
    """Per device, the way to its host as it was measured."""
    switches: tuple[tuple[int, ...], ...] = ()
    """Groups of devices that share a channel to the host."""
    host_budget: float | None = None
    """The most host memory of a device, in the unit of the costs' memory."""
    queues: tuple[bool, ...] = (False,)
    """The orders that steps run by, each as whether it is for ranks that serve everything in one hardware queue."""
    with_passes: tuple[Schedule, ...] | None = None
    """Schedules with as many vocabulary passes as are asked for, which a search compares with what it finds; ``None`` for those
    of all families."""
    cache: ResultCache | None = None
    """Where finished searches are kept and looked up; ``None`` searches afresh."""

    def with_measured(self, costs: Costs | None, changes: MemoryDeltas | None) -> Knowledge:
        """Return what is known after more steps of a run; ``None`` for what was not timed or counted.

        Bytes of a second time are of a step in which every stage was recomputed selectively.
        """
        known = self
        if costs is not None:
            kept = {name: getattr(self.costs, name) for name in ("memory", "channel", "microbatch")}
            costs = replace(costs, **kept)
            known = replace(known, costs=costs, priced_by=MEASURED)
        if changes is None:
            return known
        if self.changes is None:
            return replace(known, changes=changes)
        return replace(known, selective=changes[Kind.F])

    def lacks_seconds(self, request: Request) -> bool:
        """Return whether the channel is to be measured, which says little without the seconds of everything else."""
        return self.measures and request.offload != OFF and self.ratio is None and self.costs.channel is None

    def lacks_bytes(self, request: Request) -> bool:
        """Return whether nothing can be chosen before a step has shown what actions take and give back."""
        if not self.measures or self.costs.memory is not None:
            return False
        if not request.plans_offload:
            return request.in_bytes and request.searches and self.changes is None
        if self.changes is not None:
            return self.selective is None and request.recompute in ("selective", "auto")
        return request.in_bytes or (
            request.offload != OFF and (self.lacks_seconds(request) or request.host_memory is not None)
        )

    def counted_costs(self, placement: Placement, in_bytes: bool) -> Costs:
        """Return the costs with the memory that a cap in bytes, or else in activation units, is about. Messages are counted
        with the actions that need or make them.
        """
        if not in_bytes:
            return replace(self.costs, memory=None)
        if self.changes is None:
            return self.costs
        memory = self._memory(self.changes, placement, _with_messages(self.changes))
        # Of the vocabulary's passes and collectives every device has its own.
        devices = placement.num_devices * _slices(self.changes, placement)
        memory |= {kind: self.changes[kind][:devices] for kind in VOCABULARY & set(self.changes)}
        return replace(self.costs, memory=memory)

    def offload_costs(self, request: Request, placement: Placement) -> Costs:
        """Return the costs with the channel to the host, and with bytes where they are known."""
        costs = self.counted_costs(placement, request.memory_cap is None or request.in_bytes)
        if request.offload == OFF:
            return costs
        channel = self._channel(placement)
        return replace(costs, channel=channel if channel.switches else replace(channel, switches=self.switches))

    def held(self, schedule: Schedule, costs: Costs) -> Sequence[float]:
        """Return the most that every device holds, between messages too where their bytes are known. Where nothing was counted,
        the memory of ``costs`` says what is held.
        """
        if self.changes is None or costs.memory is None:
            return peaks(schedule, costs)
        compute = replace(costs, memory=self._memory(self.changes, schedule.placement, {}))
        changes = {
            **{kind: self.changes[kind] for kind in (MESSAGES | {Kind.REDUCE_GRAD} | VOCABULARY) & set(self.changes)},
            **compute.memory_changes(schedule.placement, schedule.recomputed, schedule.slices),
        }
        programs = (lower(schedule, single_queue=single_queue, costs=costs) for single_queue in self.queues)
        weights = unit_weights(schedule, costs)
        return [
            max(
                chain.from_iterable(held_after(actions, changes, weights, schedule.slices) for actions in orders),
                default=0,
            )
            for orders in zip(*(program.actions for program in programs), strict=True)
        ]

    def excess(self, request: Request, schedule: Schedule, costs: Costs) -> tuple[float, ...]:
        """Return by how much every device of a schedule exceeds the cap, in the unit of the costs' memory; see ``held``."""
        caps = request.caps(schedule.num_devices)
        if caps is None:
            return (0.0,) * schedule.num_devices
        held = self.held(schedule, costs)
        return tuple(peak - cap if peak > loosened(cap) else 0.0 for peak, cap in zip(held, caps, strict=True))

    @property
    def message(self) -> float:
        """Bytes of the largest message that was counted."""
        return max(self._messages(1))

    def _messages(self, slices: int) -> list[float]:
        """Return the bytes of the largest messages that were counted, one of every slice."""
        received = (self.changes or {}).get(Kind.RECV_F, (0,) * slices)
        return [max(received[at::slices]) for at in range(slices)]

    def _channel(self, placement: Placement) -> Channel:
        """Return the channel as if no device shared it, unless the costs say so."""
        if self.costs.channel is not None:
            return self.costs.channel
        if self.ratio is not None:
            return Channel.of_ratio(self.ratio, self.costs)
        if self.priced_by == UNIT or self.changes is None or self.links is None:
            return Channel.of_ratio(ASSUMED_RATIO, self.costs)
        moved, slices = [-change for change in self.changes[Kind.WAIT_OFFLOAD]], _slices(self.changes, placement)
        links = [self.links[device] for device in placement.devices for _ in range(slices)]
        return Channel(
            tuple(nbytes / link.out for nbytes, link in zip(moved, links, strict=True)),
            tuple(nbytes / link.back for nbytes, link in zip(moved, links, strict=True)),
            duplex=all(link.duplex for link in self.links),
        )

    def _memory(
        self, counted: MemoryDeltas, placement: Placement, with_their_messages: MemoryDeltas
    ) -> dict[Kind, tuple[float, ...]]:
        """Return the bytes of every action, by what was counted. A recomputed forward keeps nothing but its output, until
        that is sent or used here.
        """
        changes = {**counted, **with_their_messages}
        handed_on: list[float] = []
        slices = _slices(counted, placement)
        for stage, device in enumerate(placement.devices):
            after = placement.next_stage(stage)
            stays = after is not None and placement.devices[after] == device
            handed_on += [message if stays else 0 for message in self._messages(slices)]
        saved = counted[Kind.F]
        unsent = counted.get(Kind.SEND_F, (0,) * len(saved))
        again = tuple(taken + gone - kept for taken, gone, kept in zip(saved, unsent, handed_on, strict=True))
        kept = tuple(whole - part for whole, part in zip(changes[Kind.F], again, strict=True))
        memory = {Kind.F: kept, Kind.R: again, Kind.I: changes[Kind.I], Kind.W: changes[Kind.W]}
        if self.selective is not None:
            memory[Kind.RS] = tuple(whole - part for whole, part in zip(saved, self.selective, strict=True))
        return memory | {kind: changes[kind] for kind in (Kind.WAIT_OFFLOAD, Kind.RELOAD) if kind in changes}


def _slices(changes: MemoryDeltas, placement: Placement) -> int:
    """Return how many sequence slices of a microbatch have been counted."""
    return len(changes[Kind.F]) // placement.num_stages


# The bytes of a message belong to the action that needs it or makes it.
_WITH_MESSAGES = {
    Kind.F: (Kind.F, Kind.RECV_F, Kind.SEND_F),
    Kind.I: (Kind.I, Kind.RECV_I, Kind.SEND_I),
    Kind.W: (Kind.W, Kind.REDUCE_GRAD),
}


def _with_messages(changes: MemoryDeltas) -> dict[Kind, tuple[float, ...]]:
    """Return what compute actions change, their messages included, for searches that know no messages."""
    empty = (0.0,) * len(changes[Kind.F])
    return {
        kind: tuple(map(sum, zip(*(changes.get(part, empty) for part in parts), strict=True)))
        for kind, parts in _WITH_MESSAGES.items()
    }
