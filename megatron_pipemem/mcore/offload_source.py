"""Another source's schedules, with activations that leave the device or are computed again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.agreement import decided_by_rank_zero
from megatron_pipemem.mcore.sources import ONE_BY_ONE, MemoryDeltas, Plan, Shape, Source, with_messages
from megatron_pipemem.mcore.step.offloading import Offloading
from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.costs import Channel, Costs
from megatron_pipemem.schedule.core.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Order, Schedule
from megatron_pipemem.schedule.core.simulator import held_after, peaks
from megatron_pipemem.schedule.families.serial_orders import serial_schedule
from megatron_pipemem.schedule.features.offload import (
    OffloadPlan,
    fastest_within,
    over_cap,
    plan_offload,
    recompute_plans,
    recomputed_by_mode,
    with_early_recompute,
    with_recompute,
)
from megatron_pipemem.schedule.features.offload.search import OffloadSearchResult, search_offload
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.search.problem import better_full

logger = logging.getLogger(__name__)

ASSUMED_RATIO = 1.0
"""Of the round trip of a layer's activations to its F, I and W, until both are measured."""

_HOST_FILL = 0.8  # blocks of many sizes do not fill a pool
_PLANS_FOR_A_CAP = 4


class _Planned(NamedTuple):
    """What world rank 0 tells the others."""

    csv: str
    notes: str
    seconds: float | None


class OffloadSource(Source):
    """Plans what leaves the device, when, and what is computed again, for the schedules of another source.

    Unless everything is known beforehand, the first step runs one microbatch after another, each offloaded: that holds
    least, and shows the bytes of every action. Where stages may be recomputed selectively, a second such step shows what that
    leaves of a forward. The steps after it assume ``ASSUMED_RATIO`` for the channel until seconds are
    measured too.

    Args:
        base: of the schedules.
        offloading: what is asked for, and the host side.
        memory_cap: for the plan with its offload, not for ``base``; ``None`` for no limit.
        search_seconds: search for the order too, for so long, where there is a cap to search for; ``None`` for the orders
            of ``base``, which always says where stages are.
    """

    def __init__(
        self, base: Source, offloading: Offloading, memory_cap: MemoryCap | None, search_seconds: float | None = None
    ):
        super().__init__(base.name, base.costs, base.priced_by)
        self._base = base
        self._offloading = offloading
        self._cap = memory_cap
        leaves_choice = memory_cap is not None and offloading.settings.leaves_choice
        self._search_seconds = search_seconds if leaves_choice else None
        self._changes: MemoryDeltas | None = None
        # Of the forwards of a step in which every stage was recomputed selectively.
        self._selective: tuple[float, ...] | None = None
        # What the choice of the placement has found, on the rank that searches.
        self._answers: dict[tuple[Placement, int], OffloadSearchResult] = {}
        self.may_split = base.may_split
        self.may_offload = offloading.settings.mode != "off" or base.may_offload
        self.may_recompute = offloading.settings.recompute != "none" or base.may_recompute
        self.is_round_robin = base.is_round_robin
        self.chunks = base.chunks

    @property
    def searches(self) -> bool:
        """Whether orders are searched for together with what leaves the device."""
        return self._search_seconds is not None

    @property
    def needs_bytes(self) -> bool:
        if self.costs.memory is not None:
            return False
        if self._changes is not None:
            return self._selective is None and self._offloading.settings.recompute in ("selective", "auto")
        in_bytes = self._cap is not None and self._cap.in_bytes
        settings = self._offloading.settings
        return in_bytes or (settings.mode != "off" and (self.needs_seconds or settings.host_memory is not None))

    @property
    def needs_seconds(self) -> bool:
        """Whether the channel is to be measured, which says little without the seconds of everything else."""
        settings = self._offloading.settings
        return settings.mode != "off" and settings.ratio is None and self.costs.channel is None

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        return self._base.placement(num_devices, chunks)

    def forwards(self, shape: Shape) -> Schedule:
        return self._base.forwards(shape)

    def measured(self, costs: Costs | None, changes: MemoryDeltas | None) -> None:
        super().measured(costs, changes)
        self._base.measured(costs, None)
        self._answers.clear()
        if changes is None:
            return
        if self._changes is None:
            self._changes = changes
        else:
            self._selective = changes[Kind.F]

    def fastest(self, placements: Sequence[Placement], num_microbatches: int) -> Placement:
        """The placement of the fastest plan within the cap, for the costs known so far; all have as many stages.

        Raises:
            UnsupportedError: no plan of any of them keeps the cap.
        """
        if self._cap.in_bytes and self.costs.memory is None:
            return placements[0]  # nobody can say yet what keeps the cap
        costs = self._costs_of(placements[0])
        budget = self._host_budget() if costs.memory is not None else None

        def index_of_fastest() -> int:
            caps = self._cap.of(placements[0].num_devices)
            result = self._search_within(caps, placements, num_microbatches, costs, budget)
            best = result.schedule.placement
            self._answers[best, num_microbatches] = result
            return placements.index(best)

        return placements[decided_by_rank_zero(index_of_fastest)]

    def plan(self, shape: Shape, reason: str, before: Plan | None = None, minimum_gain: float = 0.0) -> Plan:
        placement = self.placement(shape.num_devices, shape.chunks)
        if self.needs_bytes:
            schedule = self._serial(placement, shape.num_microbatches, f"{self.name} (counting bytes)", frozenset())
            return Plan(schedule, self.costs, self.priced_by, "one microbatch at a time, to count bytes")
        costs = self._costs_of(placement)
        # Asked of every rank before rank 0 decides alone.
        budget = self._host_budget() if costs.memory is not None else None
        if self.searches:
            base = None
            planned = decided_by_rank_zero(lambda: self._search(placement, shape.num_microbatches, costs, budget))
        else:
            base = self._base.plan(shape, reason)
            planned = decided_by_rank_zero(lambda: self._decide(base.schedule, costs, budget))
        schedule = Schedule.from_csv(planned.csv, name=self.name if base is None else base.schedule.name)
        found = Plan(schedule, costs, self.priced_by, reason, search_seconds=planned.seconds, notes=planned.notes)
        # What ran before the bytes were known need not keep the cap.
        if before is not None and self._excess(before.schedule, costs):
            return found
        return self._if_faster(found, before, minimum_gain)

    def _search(self, placement: Placement, num_microbatches: int, costs: Costs, budget: float | None) -> _Planned:
        """The fastest plan of any order that keeps the cap.

        Raises:
            UnsupportedError: none does.
        """
        caps = self._cap.of(placement.num_devices)
        known = self._answers.get((placement, num_microbatches))
        seconds = 0.0
        for _ in range(_PLANS_FOR_A_CAP):
            result = known or self._search_within(caps, [placement], num_microbatches, costs, budget)
            known = None
            seconds += result.seconds
            if not self._excess(result.schedule, costs):
                return _Planned(result.schedule.to_csv(), f"{result.best.found_by}: {_notes(result.plan)}", seconds)
            caps = self._tightened(caps, result.plan, costs)
        serial = self._serial(placement, num_microbatches, self.name, better_full(placement, costs))
        if self._excess(serial, costs):
            raise UnsupportedError(self._refusal(result.plan, costs))
        logger.warning("memory cap: %s", ONE_BY_ONE)
        return _Planned(serial.to_csv(), ONE_BY_ONE, seconds)

    def _search_within(
        self,
        caps: Sequence[float],
        placements: Sequence[Placement],
        num_microbatches: int,
        costs: Costs,
        budget: float | None,
    ) -> OffloadSearchResult:
        settings = self._offloading.settings
        return search_offload(
            placements[0].num_devices,
            num_microbatches,
            costs,
            caps,
            host_budget=budget,
            placements=placements,
            offload=settings.mode != "off",
            recompute=settings.recompute,
            seconds=self._search_seconds,
        )

    def _serial(self, placement: Placement, num_microbatches: int, name: str, full: Collection[int]) -> Schedule:
        """One microbatch after another, each offloaded if anything may be: none holds less without recomputation, if the
        stages whose I takes memory are in ``full``."""
        schedule = serial_schedule(placement, num_microbatches, name, full)
        if self._changes is not None and self.needs_bytes:
            schedule = with_recompute(schedule, dict.fromkeys(range(placement.num_stages), Kind.RS))
        if self._offloading.settings.mode == "off":
            return schedule
        return replace(schedule, orders=tuple(map(_everything_away, schedule.orders)))

    def _decide(self, schedule: Schedule, costs: Costs, budget: float | None) -> _Planned:
        """The fastest of the plans that keep the cap.

        Raises:
            UnsupportedError: none does.
        """
        settings = self._offloading.settings

        def over(again: Schedule) -> Sequence[int]:
            if self._cap is None:
                return ()
            free = plan_offload(again, costs, settings.mode, None, budget)
            return over_cap(self._held(free.schedule, costs), self._cap.of(again.num_devices))

        planned = partial(self._plan_within_cap, costs=costs, budget=budget)
        plans = recompute_plans(schedule, costs, settings.recompute, planned, over)
        best = fastest_within(plans, lambda plan: self._excess(plan.schedule, costs))
        if self._excess(best.schedule, costs):
            raise UnsupportedError(self._refusal(best, costs))
        best = with_early_recompute(best, lambda plan: not self._excess(plan.schedule, costs))
        return _Planned(best.schedule.to_csv(), _notes(best), None)

    def _plan_within_cap(self, schedule: Schedule, costs: Costs, budget: float | None) -> OffloadPlan:
        """Messages are posted between the actions that a plan knows, so some bytes come on top of what it counts."""
        select = self._offloading.settings.mode
        caps = None if self._cap is None else self._cap.of(schedule.num_devices)
        plan = plan_offload(schedule, costs, select, caps, budget)
        for _ in range(_PLANS_FOR_A_CAP if self._cap is not None and self._cap.in_bytes else 0):
            if not self._excess(plan.schedule, costs):
                break
            caps = self._tightened(caps, plan, costs)
            plan = plan_offload(schedule, costs, select, caps, budget)
        return plan

    def _tightened(self, caps: Sequence[float], plan: OffloadPlan, costs: Costs) -> list[float]:
        """Lower by what the plan's program holds too much, and by a message: another order may post another one."""
        message = max(self._changes.get(Kind.RECV_F, (0,))) if self._changes is not None else 0
        held = self._held(plan.schedule, costs)
        return [
            max(0.0, cap - (each - most) - message) if each > most else cap
            for cap, each, most in zip(caps, held, self._cap.of(len(held)), strict=True)
        ]

    def _excess(self, schedule: Schedule, costs: Costs) -> float:
        """By how much a device exceeds its cap at most."""
        if self._cap is None:
            return 0.0
        caps = self._cap.of(schedule.num_devices)
        held = self._held(schedule, costs)
        return max((peak - cap for peak, cap in zip(held, caps, strict=True) if peak > loosened(cap)), default=0.0)

    def _held(self, schedule: Schedule, costs: Costs) -> Sequence[float]:
        """The most that every device holds, between messages too where their bytes are known."""
        if self._changes is None:
            return peaks(schedule.orders, schedule.placement, costs)
        changes = {
            **{kind: self._changes[kind] for kind in _MESSAGE_BYTES if kind in self._changes},
            **replace(costs, memory=self._memory(schedule.placement, {})).memory_changes(
                schedule.placement, schedule.recomputed
            ),
        }
        program = lower(schedule, single_queue=self.single_queue, costs=costs)
        return [max(held_after(actions, changes), default=0) for actions in program.actions]

    def _refusal(self, plan: OffloadPlan, costs: Costs) -> str:
        held = max(self._held(plan.schedule, costs))
        least = MemoryCap(held, self._cap.in_bytes)
        why = f"; what stays: {plan.binds}" if plan.binds else ""
        return (
            f"no plan of {self.name} with offload {self._offloading.settings.mode} keeps a memory cap of "
            f"{self._cap}: the least found is {least}{why}; raise --pipemem-memory-cap, or try "
            "--pipemem-offload auto, --pipemem-recompute auto or --pipemem-schedule auto"
        )

    def _costs_of(self, placement: Placement) -> Costs:
        """What is known: seconds, the channel, and bytes where they count."""
        costs = self.costs
        if self._changes is not None:
            costs = replace(costs, memory=self._memory(placement, with_messages(self._changes, placement)))
        return replace(costs, channel=self._channel(placement))

    def _channel(self, placement: Placement) -> Channel | None:
        if self._offloading.settings.mode == "off":
            return self.costs.channel
        channel = self._channel_of_its_own(placement)
        return channel if channel.switches else replace(channel, switches=self._offloading.switches())

    def _channel_of_its_own(self, placement: Placement) -> Channel:
        """As if no device shared it, unless the costs say so."""
        settings = self._offloading.settings
        if self.costs.channel is not None:
            return self.costs.channel
        if settings.ratio is not None:
            return Channel.of_ratio(settings.ratio, self.costs)
        if self.priced_by == "unit" or self._changes is None:
            return Channel.of_ratio(ASSUMED_RATIO, self.costs)
        links = self._offloading.links(placement.num_devices)
        moved = [-change for change in self._changes[Kind.WAIT_OFFLOAD]]
        return Channel(
            tuple(nbytes / links[device].out for nbytes, device in zip(moved, placement.devices, strict=True)),
            tuple(nbytes / links[device].back for nbytes, device in zip(moved, placement.devices, strict=True)),
            duplex=all(link.duplex for link in links),
        )

    def _memory(self, placement: Placement, with_their_messages: MemoryDeltas) -> dict[Kind, tuple[float, ...]]:
        """Bytes of every action. A recomputed forward keeps nothing but its output, until that is sent or used here."""
        changes = {**self._changes, **with_their_messages}
        message = max(self._changes.get(Kind.RECV_F, (0,)))
        handed_on = []
        for stage, device in enumerate(placement.devices):
            after = placement.next_stage(stage)
            handed_on.append(message if after is not None and placement.devices[after] == device else 0)
        saved = self._changes[Kind.F]
        unsent = self._changes.get(Kind.SEND_F, (0,) * placement.num_stages)
        again = tuple(taken + gone - kept for taken, gone, kept in zip(saved, unsent, handed_on, strict=True))
        kept = tuple(whole - part for whole, part in zip(changes[Kind.F], again, strict=True))
        memory = {Kind.F: kept, Kind.R: again, Kind.I: changes[Kind.I], Kind.W: changes[Kind.W]}
        if self._selective is not None:
            memory[Kind.RS] = tuple(whole - part for whole, part in zip(saved, self._selective, strict=True))
        return memory | {kind: changes[kind] for kind in (Kind.WAIT_OFFLOAD, Kind.RELOAD) if kind in changes}

    def _host_budget(self) -> float:
        return _HOST_FILL * self._offloading.budget()


_MESSAGE_BYTES = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_I, Kind.RECV_I, Kind.REDUCE_GRAD)


def _everything_away(order: Order) -> Order:
    """Every forward of a serial order leaves at once, and returns right before its backward."""
    away: list[Action] = []
    recomputed = any(action.kind is Kind.RS for action in order)
    for action in order:
        if action.kind is Kind.RS or (not recomputed and action.kind in (Kind.I, Kind.B)):
            away += [action._replace(kind=kind) for kind in (Kind.RELOAD, Kind.WAIT_RELOAD)]
        away.append(action)
        if action.kind is Kind.F:
            away += [action._replace(kind=kind) for kind in (Kind.OFFLOAD, Kind.WAIT_OFFLOAD)]
    return tuple(away)


def _notes(plan: OffloadPlan) -> str:
    """What moves and why the rest stays, in words."""
    counts: dict[str, int] = {}
    for why in plan.kept.values():
        counts[why] = counts.get(why, 0) + 1
    stays = "".join(f", {count} stay ({why})" for why, count in sorted(counts.items()))
    again = "".join(f"; {mode} recomputation of stages {s}" for mode, s in recomputed_by_mode(plan.schedule).items())
    return f"{len(plan.offloaded)} activations are offloaded{stays}{again}"
