"""Choose the activations of a schedule that go to the host, and the places of their transfers in the order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.offload.transfers import CHANNEL_FULL, NOT_NEEDED, RECOMPUTED, Key
from megatron_pipemem.schedule.action import COMPUTE, MEMORY, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import brief
from megatron_pipemem.schedule.memory_cap import loosened, per_device
from megatron_pipemem.schedule.options import OFF, OFFLOAD
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate

if TYPE_CHECKING:
    from megatron_pipemem.features.offload.planner import PassTimes

Select = str | int | Collection[int]


@dataclass(frozen=True)
class OffloadPlan:
    """A schedule with round trips of activations to the host. Memory is in activation units or in the unit of the costs."""

    schedule: Schedule  # with actions on memory
    base: Schedule  # without them
    base_timeline: Timeline  # simulation of ``base``
    kept: Mapping[Key, str]  # by ``(stage, microbatch)`` that stays, a reason of ``transfers``
    memory_cap: tuple[float, ...] | None = None  # one cap per device

    def __repr__(self) -> str:
        """Return a text that needs no simulation."""
        size = f"{self.base.num_devices} devices, {self.base.num_microbatches} microbatches"
        moved = f"{len(self.offloaded)} activations leave, {len(self.kept)} stay"
        return f"<OffloadPlan of {brief(self.base.name)}: {size}, {moved}>"

    @cached_property
    def timeline(self) -> Timeline:
        """The simulation of ``schedule``."""
        return simulate(self.schedule, self.base_timeline.costs)

    @property
    def peaks(self) -> tuple[float, ...]:
        return self.timeline.peaks

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def delay(self) -> float:
        """Seconds that the transfers add to the step."""
        return max(0.0, self.timeline.makespan - self.base_timeline.makespan)

    @cached_property
    def offloaded(self) -> tuple[Key, ...]:
        """Return the activations that leave their device."""
        return tuple(
            (action.stage, action.microbatch)
            for order in self.schedule.orders
            for action in order
            if action.kind is Kind.OFFLOAD
        )

    @property
    def keeps_cap(self) -> bool:
        if self.memory_cap is None:
            return True
        return all(peak <= loosened(cap) for peak, cap in zip(self.peaks, self.memory_cap, strict=True))

    @cached_property
    def obstacles(self) -> Counter[str]:
        """Count, by reason, the activations that stay but would have to leave for a lower peak.

        They are on the devices above their cap, or on the fullest device if there is no cap. The result is empty if the cap
        is kept or nothing stays for lack of room.
        """
        if self.memory_cap is None:
            limits = (max(self.peaks) * (1 - 1e-9),) * len(self.peaks)
        else:
            limits = tuple(map(loosened, self.memory_cap))
        place = self.base.placement.devices
        return Counter(
            why
            for (stage, _), why in self.kept.items()
            if self.peaks[place[stage]] > limits[place[stage]] and why not in (NOT_NEEDED, RECOMPUTED)
        )

    @property
    def binds(self) -> str:
        """``obstacles`` in words, the most frequent first."""
        return ", ".join(f"{why} ({count} activations)" for why, count in self.obstacles.most_common())


def plan_offload(
    schedule: Schedule,
    costs: Costs,
    select: Select = "auto",
    memory_cap: float | Sequence[float] | None = None,
    host_budget: float | Sequence[float] | None = None,
    *,
    pace: bool = False,
    slow_down: bool = True,
) -> OffloadPlan:
    """Send activations to the host between their uses, without a longer step if possible.

    Every device is planned alone, or together with those that share its channel. An activation stays if it does not fit the
    channel, the host's memory or the time between forward and backward. The shortest-lived ones stay first, so there is
    always a plan.

    ``select`` names the activations that may leave. ``auto`` or ``full``: all. ``half``: those of the longer-lived half of
    every device's chunks. ``off``: none. A number: those of this many chunks per device. A collection: those of these stages.

    ``memory_cap`` and ``host_budget`` are one number or one per device, in activation units or the unit of ``costs.memory``.
    With a cap, as few activations as possible leave, and the step gets longer only if it must. Without one, the peak is made
    as low as possible without a longer step, and all others leave too that do not raise it.

    ``pace`` tries also warm-ups whose forwards run no faster than in the steady state, which may take longer. With a cap, they
    are tried in any case, before a slower steady state. ``slow_down`` allows that slower steady state if only it keeps the cap.
    """
    base = replace(schedule, orders=tuple(tuple(a for a in order if a.kind in COMPUTE) for order in schedule.orders))
    caps, budgets = (
        None if limit is None else per_device(limit, base.num_devices, name)
        for limit, name in ((memory_cap, "memory caps"), (host_budget, "host budgets"))
    )
    base_timeline = simulate(base, costs)
    from megatron_pipemem.features.offload.planner import Planner  # numpy takes a while to load

    planner = Planner(base_timeline, caps, budgets, pace, slow_down)
    plans = []
    for orders, kept, timetable in planner.run(_selected(base, base_timeline, select)):
        plan = OffloadPlan(replace(base, orders=orders), base, base_timeline, kept, caps)
        plans.append(in_time(plan, timetable))
    return min(plans, key=lambda plan: (max(plan.peaks), sum(plan.peaks), -len(plan.offloaded)))


def _selected(schedule: Schedule, timeline: Timeline, select: Select) -> frozenset[int]:
    """Return the stages that may be offloaded."""
    stages = schedule.placement.stages
    if isinstance(select, str):
        if select not in OFFLOAD:
            raise UnsupportedError(
                "bad-choice", f"cannot offload {select!r}; give {', '.join(OFFLOAD)}, or a number of chunks"
            )
        number = {OFF: 0, "half": -1}.get(select)
    elif isinstance(select, int):
        if isinstance(select, bool) or select < 0:
            raise UnsupportedError("bad-number", f"cannot offload {select} chunks; give a number of at least 0")
        number = select
    else:
        chosen = frozenset(select)
        if not chosen <= set(range(schedule.num_stages)):
            raise UnsupportedError(
                "unknown-stage", f"cannot offload stages {sorted(chosen)}; there are 0 to {schedule.num_stages - 1}"
            )
        return chosen
    if number is None:
        return frozenset(range(schedule.num_stages))
    ages = _mean_lifespans(timeline)
    longest = [sorted(held, key=lambda stage: (-ages.get(stage, 0.0), stage)) for held in stages]
    return frozenset(s for held in longest for s in held[: (len(held) + 1) // 2 if number < 0 else number])


def _mean_lifespans(timeline: Timeline) -> dict[int, float]:
    ages: defaultdict[int, float] = defaultdict(float)
    for order, spans in zip(timeline.schedule.orders, timeline.spans, strict=True):
        for action, (start, end) in zip(order, spans, strict=True):
            if action.kind is Kind.F:
                ages[action.stage] -= end
            elif action.kind in (Kind.I, Kind.B):
                ages[action.stage] += start
    return {stage: age / timeline.schedule.num_units for stage, age in ages.items()}


_AT_ONCE = 1 / 16
_EXACT = 1 + 1e-9


def in_time(plan: OffloadPlan, timetable: PassTimes) -> OffloadPlan:
    """Drop round trips until the step is no longer than the timetable or the schedule without transfers.

    The first late action is late because its device waits for a transfer, as all else was in time. So the transfers that are
    late first are dropped first. With a cap, only as many are dropped as keep it. ``timetable`` has the latest times of the
    plan's actions.
    """
    latest = max((float(ends[-1]) for ends in timetable.ends if len(ends)), default=0.0)
    allowed = max(latest, plan.base_timeline.makespan) * _EXACT
    best = plan
    while plan.keeps_cap and plan.makespan > allowed:
        late = _late(plan, timetable, allowed * (_EXACT - 1))
        plan = _without(plan, set(late[: max(1, int(len(late) * _AT_ONCE))]))
        if plan.keeps_cap and plan.makespan < best.makespan:
            best = plan
    return best


def _late(plan: OffloadPlan, timetable: PassTimes, exact: float) -> list[Key]:
    """Return the round trips that a device waited for beyond the timetable, the earliest first."""
    late: list[tuple[float, Key]] = []
    for device, (order, spans) in enumerate(zip(plan.schedule.orders, plan.timeline.spans, strict=True)):
        starts, position = timetable.starts[device], 0
        waited = {stall.action for stall in plan.timeline.stalls[device]}
        for action, (_, end) in zip(order, spans, strict=True):
            if action.kind not in MEMORY:
                position += 1
            elif action in waited and position < len(starts) and end > starts[position] + exact:
                late.append((end, (action.stage, action.microbatch)))
    return [key for _, key in sorted(late)]


def _without(plan: OffloadPlan, keys: set[Key]) -> OffloadPlan:
    orders = tuple(
        tuple(a for a in order if a.kind not in MEMORY or (a.stage, a.microbatch) not in keys)
        for order in plan.schedule.orders
    )
    kept = {**plan.kept, **dict.fromkeys(keys, CHANNEL_FULL)}
    return replace(plan, schedule=replace(plan.schedule, orders=orders), kept=kept)
