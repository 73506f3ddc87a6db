"""Choose which activations of a schedule go to the host, and insert the actions that copy them into the orders."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.offload.planner import PassTimes, Planner
from megatron_pipemem.features.offload.transfers import CHANNEL_FULL, NOT_CHOSEN, RECOMPUTED, Key
from megatron_pipemem.schedule.action import COMPUTE, MEMORY, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import brief, shortened
from megatron_pipemem.schedule.memory_cap import loosened, per_device
from megatron_pipemem.schedule.options import OFF, OFFLOAD
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate

Select = str | int | Collection[int]


@dataclass(frozen=True)
class OffloadPlan:
    """A schedule whose orders include copies of activations to the host and back (OFFLOAD and RELOAD).

    Memory is in bytes if the costs give bytes, and otherwise in activation units.
    """

    schedule: Schedule  # the orders with OFFLOAD, RELOAD and the waits for them
    base: Schedule  # the same orders without these actions
    base_timeline: Timeline  # the simulated timeline of ``base``
    kept: Mapping[Key, str]  # the reason (see ``transfers``) of each ``(stage, microbatch)`` that stays
    memory_cap: tuple[float, ...] | None = None  # one cap for each device

    def __repr__(self) -> str:
        """Return the numbers of devices, microbatches and activations, without simulating the schedule."""
        size = f"{self.base.num_devices} devices, {self.base.num_microbatches} microbatches"
        moved = f"{len(self.offloaded)} activations leave, {len(self.kept)} stay"
        return f"<OffloadPlan of {brief(self.base.name)}: {size}, {moved}>"

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of ``schedule``, which includes the copies."""
        return simulate(self.schedule, self.base_timeline.costs)

    @property
    def peaks(self) -> tuple[float, ...]:
        return self.timeline.peaks

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def delay(self) -> float:
        """The time that the copies add to the makespan of ``base``, in the unit of the costs. It is never negative."""
        return max(0.0, self.timeline.makespan - self.base_timeline.makespan)

    @cached_property
    def offloaded(self) -> tuple[Key, ...]:
        """Return ``(stage, microbatch)`` of all activations that are copied to the host."""
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
        """Return, by reason, how many activations stay on their device and would have to leave for a lower peak.

        Only devices above their cap count, or the devices with the highest peak if there is no cap. The result is empty
        if all caps are kept.
        """
        if self.memory_cap is None:
            limits = (max(self.peaks) * (1 - 1e-9),) * len(self.peaks)
        else:
            limits = tuple(map(loosened, self.memory_cap))
        place = self.base.placement.devices
        return Counter(
            why
            for (stage, _), why in self.kept.items()
            if self.peaks[place[stage]] > limits[place[stage]] and why not in (NOT_CHOSEN, RECOMPUTED)
        )

    @property
    def binds(self) -> str:
        """The counts of ``obstacles`` as text, largest first, for example ``host memory full (3 activations)``.

        The text is empty if there are none.
        """
        return ", ".join(f"{why} ({count} activations)" for why, count in self.obstacles.most_common())


def plan_offload(
    schedule: Schedule,
    costs: Costs,
    select: Select = "auto",
    memory_cap: float | Sequence[float] | None = None,
    host_budget: float | Sequence[float] | None = None,
    *,
    spread_warmup: bool = False,
    slow_down: bool = True,
) -> OffloadPlan:
    """Return a plan that copies activations to the host between their forward and their backward.

    Every device is planned alone, or together with the devices that share its channel to the host. An activation stays
    on its device if the copies do not fit into the channel, the host's memory or the time between forward and backward.
    If some must stay, those with the shortest time between forward and backward stay first.

    ``select`` names the activations that may leave.

    - ``auto`` or ``full``: all activations.
    - ``half``: those of half of every device's stages, rounded up, namely the stages that hold activations longest.
    - ``off``: none.
    - A number: those of this many of every device's stages, again the stages that hold activations longest.
    - A collection of stages: the activations of these stages.

    ``memory_cap`` and ``host_budget`` are one number for all devices, or one per device. Their unit is bytes if
    ``costs.memory`` is in bytes, and otherwise the activation unit.

    With a memory cap, as few activations as possible leave, and the step gets longer only if the cap cannot be kept
    otherwise. Without a cap, the plan has the lowest peak that does not make the step longer. Other activations leave
    too if that does not raise the peak.

    ``spread_warmup`` also tries plans in which the forwards of the warm-up start further apart, up to the interval of
    the steady state. Such a step may take longer. With a cap, they are tried only if no other plan keeps it, but then
    even without ``spread_warmup``. If they do not keep the cap either, ``slow_down`` allows plans in which devices wait
    for copies in the steady state too. If no plan keeps the cap, the result is the one with the lowest peak, and
    ``keeps_cap`` is false.
    """
    base = replace(schedule, orders=tuple(tuple(a for a in order if a.kind in COMPUTE) for order in schedule.orders))
    caps, budgets = (
        None if limit is None else per_device(limit, base.num_devices, name)
        for limit, name in ((memory_cap, "memory caps"), (host_budget, "host budgets"))
    )
    base_timeline = simulate(base, costs)
    planner = Planner(base_timeline, caps, budgets, spread_warmup, slow_down)
    plans = []
    for orders, kept, timetable in planner.run(_selected(base, base_timeline, select)):
        plan = OffloadPlan(replace(base, orders=orders), base, base_timeline, kept, caps)
        plans.append(without_late_copies(plan, timetable))
    return min(plans, key=lambda plan: (max(plan.peaks), sum(plan.peaks), -len(plan.offloaded)))


def _selected(schedule: Schedule, timeline: Timeline, select: Select) -> frozenset[int]:
    """Return the stages whose activations may leave their device, as ``select`` of ``plan_offload`` says."""
    if isinstance(select, str):
        if select not in OFFLOAD:
            raise UnsupportedError(
                "bad-choice", f"cannot offload {shortened(select)}; give {', '.join(OFFLOAD)}, or a number of chunks"
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
    leaving: set[int] = set()
    for stages in schedule.placement.stages:
        longest_first = sorted(stages, key=lambda stage: (-ages.get(stage, 0.0), stage))
        count = (len(stages) + 1) // 2 if number < 0 else number
        leaving.update(longest_first[:count])
    return frozenset(leaving)


def _mean_lifespans(timeline: Timeline) -> dict[int, float]:
    ages: defaultdict[int, float] = defaultdict(float)
    for order, spans in zip(timeline.schedule.orders, timeline.spans, strict=True):
        for action, (start, end) in zip(order, spans, strict=True):
            if action.kind is Kind.F:
                ages[action.stage] -= end
            elif action.kind in (Kind.I, Kind.B):
                ages[action.stage] += start
    return {stage: age / len(timeline.schedule.units) for stage, age in ages.items()}


_AT_ONCE = 1 / 16
_EXACT = 1 + 1e-9


def without_late_copies(plan: OffloadPlan, timetable: PassTimes) -> OffloadPlan:
    """Return a plan with fewer round trips, so that its copies do not make the step longer than the timetable allows.

    The allowed time is the end of ``timetable``, or that of the schedule without copies if it is later. The first late
    action is late because its device waits for a copy, so the copies that are late first are removed first. With a cap,
    removing stops before a peak exceeds it, and the result is the plan with the shortest step so far.
    """
    latest = max((float(ends[-1]) for ends in timetable.ends if len(ends)), default=0.0)
    allowed = max(latest, plan.base_timeline.makespan) * _EXACT
    best = plan
    while plan.keeps_cap and plan.makespan > allowed:
        late = _late_copies(plan, timetable, allowed * (_EXACT - 1))
        plan = _without(plan, set(late[: max(1, int(len(late) * _AT_ONCE))]))
        if plan.keeps_cap and plan.makespan < best.makespan:
            best = plan
    return best


def _late_copies(plan: OffloadPlan, timetable: PassTimes, exact: float) -> list[Key]:
    """Return the copies that delay their device by over ``exact`` seconds beyond the timetable, the earliest first."""
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
