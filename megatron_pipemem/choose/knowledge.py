"""The inputs and the output of ``choose``: costs, measurements of a run, and the chosen schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import MEMORY, MESSAGES, RECOMPUTE, VOCABULARY, Kind
from megatron_pipemem.schedule.action_prices import held_after, unit_factors
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import HostLink
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate

if TYPE_CHECKING:  # loaded when something is searched for
    from megatron_pipemem.features.offload.orders import OffloadPlan
    from megatron_pipemem.search import SearchResult
    from megatron_pipemem.search.result import ResultCache

UNIT, FILE, MEASURED = "unit", "file", "measured"
"""The sources of costs: unit costs, a file of the user, or measurements of the run."""

ASSUMED_RATIO = 1.0
"""The seconds to copy a layer's activations to the host and back, divided by those of its F, I and W, until both are
measured."""

MemoryDeltas = Mapping[Kind, tuple[float, ...]]
"""Bytes by which every kind of action, messages included, changes its device's memory, one value per stage and part,
stage by stage."""


class Shape(NamedTuple):
    """The size of a step, and whether it is an evaluation step."""

    num_devices: int
    chunks: int | None
    """Model chunks per rank; ``None`` before a model exists."""
    num_microbatches: int
    group_size: int | None = None
    """Megatron's ``microbatch_group_size_per_vp_stage``; ``None`` if it is not given."""
    forward_only: bool = False


@dataclass(frozen=True)
class Choice:
    """A chosen schedule, the costs by which it was chosen, and the results of a search or plan, if there was one."""

    schedule: Schedule
    costs: Costs
    """Costs of the choice, in seconds unless they are unit costs. After a search, their memory is in the unit of the
    cap, ``None`` for activation units."""
    priced_by: str = UNIT
    """The source of the costs: ``unit``, ``file`` or ``measured``."""
    why: str = ""
    """The reason for a schedule that is not the one for the request, such as a step that counts bytes; else empty."""
    bound: float | None = None
    """Seconds that no schedule with this placement within the cap can beat; ``None`` if none were computed."""
    search_seconds: float | None = None
    """Duration of the search; ``None`` without one."""
    notes: str = ""
    """Remarks about the schedule for the log: its offload and recomputation, or that only a slow order keeps the cap."""
    search: SearchResult | None = None
    """The best schedules of all placements, after a search."""
    offload: OffloadPlan | None = None
    """The plan of offload and recomputation, with the reasons against more, if there is one."""
    arrival_makespan: float | None = None
    """If the step has its own plan (``plan_step``): the seconds of the base schedule with the microbatches in arrival
    order."""

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)

    @property
    def alone(self) -> Choice:
        """Return the choice without the results of searches and plans, to send it to other ranks."""
        return replace(self, search=None, offload=None)


@dataclass(frozen=True)
class Knowledge:
    """The facts by which a schedule is chosen: costs, measurements of the run, and the model's placement."""

    costs: Costs = Costs()
    """Seconds; with bytes and a channel to the host if these are known in advance."""
    priced_by: str = UNIT
    """``unit``, ``file`` or ``measured``."""
    is_measuring: bool = False
    """Whether a run will measure unknown values, first bytes and then seconds."""
    counted_bytes: MemoryDeltas | None = None
    """The change of memory by every kind of action in bytes, as counted in the run; ``None`` before that."""
    selective_bytes: tuple[float, ...] | None = None
    """Per stage and part, the bytes that F kept in a step that recomputed every stage selectively."""
    predicted_bytes: MemoryDeltas | None = None
    """The change of memory by F, I and W in bytes, as predicted for the built model. W of a family's schedule then run
    as early as these bytes need (``with_earlier_weights``). ``None`` leaves every W at its place."""
    placement: Placement | None = None
    """The placement of the model; ``None`` before it is built."""
    offload_ratio: float | None = None
    """The seconds to copy a layer's activations to the host and back, divided by those of its F, I and W, if given."""
    host_links: tuple[HostLink, ...] | None = None
    """Per device, the measured bandwidth to its host."""
    shared_links: tuple[tuple[int, ...], ...] = ()
    """Groups of devices that share a channel to the host."""
    host_budget: float | None = None
    """The most host memory of a device, in the unit of the costs' memory."""
    queues: tuple[bool, ...] = (False,)
    """The programs that steps run: one entry each, ``True`` if it is lowered for devices with a single queue."""
    vocabulary_schedules: tuple[Schedule, ...] | None = None
    """Schedules with vocabulary passes that compete with the search's results; ``None`` for those of all families."""
    cache: ResultCache | None = None
    """The cache of finished searches; ``None`` always searches."""

    def with_measured(self, costs: Costs | None, changes: MemoryDeltas | None) -> Knowledge:
        """Return a copy with measured seconds (``costs``) and counted bytes (``changes``); either may be ``None``.

        If bytes were counted before, the new ones are those of a step that recomputed every stage selectively.
        """
        updated = self
        if costs is not None:
            memory = self.costs.memory if costs.memory is None else costs.memory
            costs = replace(costs, memory=memory, channel=self.costs.channel, microbatch=self.costs.microbatch)
            updated = replace(updated, costs=costs, priced_by=MEASURED)
        if changes is None:
            return updated
        if self.counted_bytes is None:
            return replace(updated, counted_bytes=changes)
        return replace(updated, selective_bytes=changes[Kind.F])

    def lacks_seconds(self, request: Request) -> bool:
        """Return whether the request offloads and the run must measure the seconds of copies because none are given."""
        return (
            self.is_measuring and request.offload != OFF and self.offload_ratio is None and self.costs.channel is None
        )

    def lacks_bytes(self, request: Request) -> bool:
        """Return whether a step of the run must count bytes before a schedule can be chosen.

        Selective recomputation may need a second such step. It is false if nothing is measured, or if the costs have
        bytes.
        """
        if not self.is_measuring or self.costs.memory is not None:
            return False
        if not request.plans_offload:
            return request.in_bytes and request.searches and self.counted_bytes is None
        if self.counted_bytes is not None:
            return self.selective_bytes is None and request.recompute in ("selective", "auto")
        return request.in_bytes or (
            request.offload != OFF and (self.lacks_seconds(request) or request.host_memory is not None)
        )

    def counted_costs(self, placement: Placement, in_bytes: bool) -> Costs:
        """Return the costs with memory in bytes if ``in_bytes`` is set and bytes are known, else in activation units.

        Counted bytes replace those of the costs. The bytes of a message are added to the F or I that makes or uses its
        tensor, and those of REDUCE_GRAD to W.
        """
        if not in_bytes:
            return replace(self.costs, memory=None)
        if self.counted_bytes is None:
            return self.costs
        memory = self._memory(self.counted_bytes, placement, with_messages(self.counted_bytes))
        # Vocabulary actions have one value per device.
        devices = placement.num_devices * _parts(self.counted_bytes, placement)
        memory |= {kind: self.counted_bytes[kind][:devices] for kind in VOCABULARY & set(self.counted_bytes)}
        return replace(self.costs, memory=memory)

    def offload_costs(self, request: Request, placement: Placement) -> Costs:
        """Return the costs, with the seconds of copies to the host and back if the request offloads.

        Memory is in activation units if the memory cap is, and otherwise in bytes, if these are known.
        """
        costs = self.counted_costs(placement, request.memory_cap is None or request.in_bytes)
        if request.offload == OFF:
            return costs
        channel = self._channel(placement)
        return replace(costs, channel=channel if channel.switches else replace(channel, switches=self.shared_links))

    def device_peaks(self, schedule: Schedule, costs: Costs) -> Sequence[float]:
        """Return the peak memory of every device, in the unit of the memory of ``costs``.

        If bytes were counted and ``costs`` have bytes, the peak is taken over the actions of the lowered programs, one
        for each entry of ``queues``, messages included.
        """
        if self.counted_bytes is None or costs.memory is None:
            return peaks(schedule, costs)
        compute = replace(costs, memory=self._memory(self.counted_bytes, schedule.placement, {}))
        changes = {
            **{
                kind: self.counted_bytes[kind]
                for kind in (MESSAGES | {Kind.REDUCE_GRAD} | VOCABULARY) & set(self.counted_bytes)
            },
            **compute.memory_changes(schedule.placement, schedule.recomputed, schedule.units),
        }
        programs = (lower(schedule, single_queue=single_queue, costs=costs) for single_queue in self.queues)
        weights = unit_factors(schedule, costs)
        return [
            max(
                chain.from_iterable(held_after(actions, changes, weights, schedule.units) for actions in orders),
                default=0,
            )
            for orders in zip(*(program.actions for program in programs), strict=True)
        ]

    def excess(self, request: Request, schedule: Schedule, costs: Costs) -> tuple[float, ...]:
        """Return by how much the peak of every device exceeds its cap, in the unit of the costs' memory; 0 if it keeps it."""
        caps = request.caps(schedule.num_devices)
        if caps is None:
            return (0.0,) * schedule.num_devices
        device_peaks = self.device_peaks(schedule, costs)
        return tuple(peak - cap if peak > loosened(cap) else 0.0 for peak, cap in zip(device_peaks, caps, strict=True))

    @property
    def message(self) -> float:
        """Return the bytes of the largest message with activations (RECV_F) counted on any stage; 0 if none was."""
        return max(self._messages(1))

    def _messages(self, parts: int) -> list[float]:
        """Return, for each part of a microbatch, the bytes of the largest RECV_F that was counted on any stage."""
        received = (self.counted_bytes or {}).get(Kind.RECV_F, (0,) * parts)
        return [max(received[at::parts]) for at in range(parts)]

    def _channel(self, placement: Placement) -> Channel:
        """Return the seconds of copies to the host: from the costs, or by a given ratio, measured links or an assumed ratio."""
        if self.costs.channel is not None:
            return self.costs.channel
        if self.offload_ratio is not None:
            return Channel(ratio=self.offload_ratio)
        if self.priced_by == UNIT or self.counted_bytes is None or self.host_links is None:
            return Channel(ratio=ASSUMED_RATIO)
        moved, parts = (
            [-change for change in self.counted_bytes[Kind.WAIT_OFFLOAD]],
            _parts(self.counted_bytes, placement),
        )
        links = [self.host_links[device] for device in placement.devices for _ in range(parts)]
        return Channel(
            tuple(nbytes / link.out for nbytes, link in zip(moved, links, strict=True)),
            tuple(nbytes / link.back for nbytes, link in zip(moved, links, strict=True)),
            duplex=all(link.duplex for link in self.host_links),
        )

    def _memory(
        self, counted: MemoryDeltas, placement: Placement, with_their_messages: MemoryDeltas
    ) -> dict[Kind, tuple[float, ...]]:
        """Return the bytes of every kind of action for ``Costs.memory``, from counted bytes without recomputation.

        ``with_their_messages`` replaces the counted bytes of passes. A forward that R repeats keeps only its output,
        until the output is sent, or used by the next stage on the same device.
        """
        changes = {**counted, **with_their_messages}
        handed_on: list[float] = []
        parts = _parts(counted, placement)
        for stage, device in enumerate(placement.devices):
            after = placement.next_stage(stage)
            stays_on_device = after is not None and placement.devices[after] == device
            handed_on += [message if stays_on_device else 0 for message in self._messages(parts)]
        saved = counted[Kind.F]
        unsent = counted.get(Kind.SEND_F, (0,) * len(saved))
        freed_by_r = tuple(taken + gone - kept for taken, gone, kept in zip(saved, unsent, handed_on, strict=True))
        kept = tuple(taken - part for taken, part in zip(changes[Kind.F], freed_by_r, strict=True))
        memory = {Kind.F: kept, Kind.R: freed_by_r, Kind.I: changes[Kind.I], Kind.W: changes[Kind.W]}
        if self.selective_bytes is not None:
            memory[Kind.RS] = tuple(taken - part for taken, part in zip(saved, self.selective_bytes, strict=True))
        return memory | {kind: changes[kind] for kind in (Kind.WAIT_OFFLOAD, Kind.RELOAD) if kind in changes}


def _parts(changes: MemoryDeltas, placement: Placement) -> int:
    """Return the number of parts per microbatch for which bytes were counted."""
    return len(changes[Kind.F]) // placement.num_stages


# The bytes of a message belong to the action that needs it or makes it.
_WITH_MESSAGES = {
    Kind.F: (Kind.F, Kind.RECV_F, Kind.SEND_F),
    Kind.I: (Kind.I, Kind.RECV_I, Kind.SEND_I),
    Kind.W: (Kind.W, Kind.REDUCE_GRAD),
}


def with_messages(changes: Mapping[Kind, Sequence[float]]) -> dict[Kind, tuple[float, ...]]:
    """Return the bytes of F and I with those of their messages, and of W with REDUCE_GRAD, which searches lack."""
    empty = (0.0,) * len(next(iter(changes.values())))
    return {
        kind: tuple(map(sum, zip(*(changes.get(part, empty) for part in parts), strict=True)))
        for kind, parts in _WITH_MESSAGES.items()
    }


def pass_memory(memory: Mapping[Kind, Sequence[float]], parts: int = 1) -> dict[Kind, tuple[float, ...]]:
    """Return the changes of held bytes by F, I and W, with those of their messages added.

    ``memory`` has the changes of every kind of action, one value per stage and part. So has the result. If the run did
    not split its backwards, W frees all bytes that F and I have added. With several parts, W frees the bytes that B
    freed, because B of a part also frees memory that other parts took.
    """
    changes = with_messages(memory)
    fused = memory.get(Kind.B, (0.0,) * len(changes[Kind.W]))
    per_part = zip(changes[Kind.F], changes[Kind.I], changes[Kind.W], fused, strict=True)
    weights = []
    for by_forward, by_input, by_weight, by_fused in per_part:
        if by_fused and not by_weight:
            weights.append(-(by_forward + by_input) if parts == 1 else by_fused)
        else:
            weights.append(by_weight)
    changes[Kind.W] = tuple(weights)
    return changes


def action_memory(memory: Mapping[Kind, Sequence[float]], parts: int = 1) -> dict[Kind, tuple[float, ...]]:
    """Return the changes of held bytes by all actions of a schedule without messages, for ``Costs.memory``."""
    further = RECOMPUTE | MEMORY | VOCABULARY
    return pass_memory(memory, parts) | {kind: tuple(changes) for kind, changes in memory.items() if kind in further}
