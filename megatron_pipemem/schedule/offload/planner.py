"""Which activations of a schedule go to the host, when they leave and when they return."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.offload.copies import (
    CHANNEL_FULL,
    NO_HOST_MEMORY,
    TOO_SHORT,
    Item,
    RoundTrip,
    plan_round_trips,
)
from megatron_pipemem.schedule.offload.timetable import Timetable, paced, timetables
from megatron_pipemem.schedule.options import OFF, OFFLOAD
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import Timeline, held_after, simulate

Select = str | int | Collection[int]
Key = tuple[int, int]
"""Stage and microbatch."""

NOT_NEEDED, RECOMPUTED = "not needed", "recomputed"
"""Why activations stay on their device, beside what ``plan_round_trips`` says."""

# Shares of the longest-lived activations that are tried.
_SHARES = 4
_GOLDEN = 0.6180339887498949
# By how much a plan may pretend that computing is slower, where only stalls keep a cap.
_STRETCHES = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
# Shares of the steady state's interval that the forwards of a warm-up are apart.
_PACES = (0.5, 0.75, 1.0)
# Copies as they are, and slower ones: their plans hold as well, and are at times the better.
_SLOWER = (1.0, 1.2)


@dataclass(frozen=True)
class OffloadPlan:
    """A schedule with its activations' round trips to the host. Memory in activation units, or in that of the costs.

    Args:
        schedule: with actions on memory.
        base: the same without them.
        timeline: the simulated run of ``schedule``.
        base_timeline: that of ``base``.
        kept: per ``(stage, microbatch)`` that does not leave its device, why: ``lifespan too short``, ``channel full``,
            ``host memory``, ``not needed``, or ``recomputed``.
        memory_cap: what was asked for, per device.
    """

    schedule: Schedule
    base: Schedule
    timeline: Timeline
    base_timeline: Timeline
    kept: Mapping[Key, str]
    memory_cap: tuple[float, ...] | None = None

    @property
    def peaks(self) -> tuple[float, ...]:
        return self.timeline.peaks

    @property
    def host_peaks(self) -> tuple[float, ...]:
        return self.timeline.host_peaks

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def delay(self) -> float:
        """Seconds by which the copies make the step longer."""
        return max(0.0, self.timeline.makespan - self.base_timeline.makespan)

    @property
    def stall_seconds(self) -> tuple[float, ...]:
        """Per device, how long it stands still for copies, idle time included."""
        return self.timeline.stall_seconds

    @cached_property
    def offloaded(self) -> tuple[Key, ...]:
        """What leaves its device."""
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
        """Why, and how many, activations stay that would have to leave for a lower peak: on the devices that exceed their
        cap or, without one, on the fullest. Empty when the cap is kept or nothing stays for want of room."""
        if self.memory_cap is None:
            limits = (max(self.peaks) * (1 - 1e-9),) * len(self.peaks)
        else:
            limits = tuple(cap * (1 + 1e-9) for cap in self.memory_cap)
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
    """Send activations to the host while nobody uses them, without making the step longer if that can be.

    Every device is planned for itself, or together with those that share its channel. What does not fit the channel, the
    host's memory or the time between forward and backward stays, the shortest-lived first: there is always a plan.

    Args:
        schedule: any; actions on memory that it has are planned afresh.
        costs: with a channel; without one, copies take no time.
        select: what may leave: ``auto`` or ``full`` everything, ``half`` the longer-lived half of every device's chunks,
            ``off`` nothing, a number that many chunks of every device, a collection these stages.
        memory_cap: the most a device may hold, one number or one per device, in activation units or the unit of
            ``costs.memory``. With it, as little moves as keeps it, and the step becomes longer only where it must. Without,
            the peak is made as low as it gets for free, and all leaves that does not raise it.
        host_budget: the most host memory of a device, one number or one per device, in the same unit.
        pace: also try warm-ups whose forwards run no faster than those of the steady state, which may take longer. With a
            cap, they are tried in any case before anything that slows the steady state.
        slow_down: whether the steady state may become slower where only that keeps the cap.

    Raises:
        UnsupportedError: ``select`` means nothing, or caps or budgets are not as many as devices.
        CostsError: the costs do not fit the schedule.
    """
    base = replace(schedule, orders=tuple(tuple(a for a in order if a.kind in COMPUTE) for order in schedule.orders))
    caps = _per_device(memory_cap, base, "memory caps")
    budgets = _per_device(host_budget, base, "host budgets")
    base_timeline = simulate(base, costs)
    planner = _Planner(base_timeline, caps, budgets, pace, slow_down)
    orders, kept = planner.run(_selected(base, base_timeline, select))
    planned = replace(base, orders=orders)
    return OffloadPlan(planned, base, simulate(planned, costs), base_timeline, kept, caps)


def _per_device(limit: float | Sequence[float] | None, schedule: Schedule, what: str) -> tuple[float, ...] | None:
    if limit is None:
        return None
    limits = tuple(map(float, limit)) if hasattr(limit, "__len__") else (float(limit),) * schedule.num_devices
    if len(limits) != schedule.num_devices or not all(each >= 0 for each in limits):
        raise UnsupportedError(
            f"{what} {limit!r} do not fit {schedule.num_devices} devices; give one number of at least 0, or one per device"
        )
    return limits


def _selected(schedule: Schedule, timeline: Timeline, select: Select) -> frozenset[int]:
    """The stages that may be offloaded."""
    stages = schedule.placement.stages
    if isinstance(select, str):
        if select not in OFFLOAD:
            raise UnsupportedError(f"cannot offload {select!r}; take {', '.join(OFFLOAD)}, or a number of chunks")
        number = {OFF: 0, "half": -1}.get(select)
    elif isinstance(select, int):
        if isinstance(select, bool) or select < 0:
            raise UnsupportedError(f"cannot offload {select} chunks; give a number of at least 0")
        number = select
    else:
        chosen = frozenset(select)
        if not chosen <= set(range(schedule.num_stages)):
            raise UnsupportedError(f"cannot offload stages {sorted(chosen)}; there are 0 to {schedule.num_stages - 1}")
        return chosen
    if number is None:
        return frozenset(range(schedule.num_stages))
    ages = _mean_lifespans(timeline)
    longest = [sorted(held, key=lambda stage: (-ages.get(stage, 0.0), stage)) for held in stages]
    return frozenset(s for held in longest for s in held[: (len(held) + 1) // 2 if number < 0 else number])


def _mean_lifespans(timeline: Timeline) -> dict[int, float]:
    ages: Counter[int] = Counter()
    for order, spans in zip(timeline.schedule.orders, timeline.spans, strict=True):
        for action, (start, end) in zip(order, spans, strict=True):
            if action.kind is Kind.F:
                ages[action.stage] -= end
            elif action.kind in (Kind.I, Kind.B):
                ages[action.stage] += start
    return {stage: age / timeline.schedule.num_units for stage, age in ages.items()}


@dataclass(frozen=True)
class _Group:
    """A plan of the devices that share a channel.

    Args:
        orders: of these devices.
        kept: why the others of the items stay.
        over: by how much the devices exceed their caps, all together; 0 without caps.
        peak: the most that any of them holds.
        trips: round trips.
    """

    orders: dict[int, Order]
    kept: dict[Key, str]
    over: float
    peak: float
    trips: int


class _Planner:
    def __init__(
        self,
        timeline: Timeline,
        caps: tuple[float, ...] | None,
        budgets: tuple[float, ...] | None,
        pace: bool,
        slow_down: bool,
    ) -> None:
        base, costs = timeline.schedule, timeline.costs
        placement = base.placement
        self._base, self._caps, self._budgets = base, caps, budgets
        self._channel = costs.channel or Channel(0.0)
        self._unit = costs.memory_unit(placement) / base.pieces
        self._changes = costs.memory_changes(placement, base.recomputed)
        self._host_changes = costs.host_changes(placement, base.recomputed)
        prices = costs.copy_seconds(placement, base.recomputed)
        self._out, self._back = ([s / base.pieces for s in prices[kind]] for kind in (Kind.OFFLOAD, Kind.RELOAD))
        self._timetables = timetables(timeline)
        self._places = [{action: at for at, action in enumerate(order)} for order in base.orders]
        self._stretches = _STRETCHES if slow_down and caps is not None else ()
        self._paced = [paced(base, costs, share) for share in _PACES] if pace or caps is not None else []
        shared = [devices for devices in self._channel.switches if len(devices) > 1]
        alone = set(range(base.num_devices)) - {device for devices in shared for device in devices}
        self._groups = [*shared, *((device,) for device in sorted(alone))]

    def run(self, stages: frozenset[int]) -> tuple[tuple[Order, ...], dict[Key, str]]:
        """The orders of all devices and why what stays does."""
        whole = {stage for stage, kind in self._base.recomputed.items() if kind is Kind.R}
        stages -= whole
        # Devices wait for one another: only plans for one timetable hold nobody up together.
        plan = min((self._plan_all(stages, timetable, 1.0) for timetable in self._timetables), key=self._rank)
        slower = [(timetable, 1.0) for timetable in self._paced]
        slower += [(self._paced[-1], stretch) for stretch in self._stretches]
        for timetable, stretch in slower:
            if self._caps is not None and not any(group.over for group in plan):
                break
            other = self._plan_all(stages, timetable, stretch)
            if self._rank(other)[:-2] < self._rank(plan)[:-2]:
                plan = other
        orders = {device: order for group in plan for device, order in group.orders.items()}
        # Stages that were not selected are in no group's plan.
        kept = {
            (action.stage, action.microbatch): RECOMPUTED if action.stage in whole else NOT_NEEDED
            for order in self._base.orders
            for action in order
            if action.kind is Kind.F
        }
        kept |= {key: why for group in plan for key, why in group.kept.items()}
        for order in orders.values():
            for action in order:
                if action.kind is Kind.OFFLOAD:
                    del kept[action.stage, action.microbatch]
        return tuple(orders[device] for device in range(self._base.num_devices)), kept

    def _rank(self, groups: Sequence[_Group]) -> tuple[float, ...]:
        peaks, trips = [group.peak for group in groups], sum(group.trips for group in groups)
        if self._caps is None:
            return max(peaks), sum(peaks), -trips
        over = sum(group.over for group in groups)
        return over, max(peaks) if over else 0.0, sum(peaks) if over else 0.0, trips

    def _plan_all(self, stages: frozenset[int], timetable: Timetable, stretch: float) -> list[_Group]:
        """The best plan of every device when all but copies takes ``stretch`` times as long."""
        timetable = timetable.stretched(stretch)
        return [self._best(devices, stages, timetable) for devices in self._groups]

    def _best(self, devices: tuple[int, ...], stages: frozenset[int], timetable: Timetable) -> _Group:
        """The plan of some devices: within the caps with the fewest round trips, or else with the lowest peak."""
        items = self._items(devices, timetable, stages, 1.0)
        best = self._emit(devices, timetable, [], items)
        for factor in _SLOWER:
            if self._caps is None or best.over:
                best = self._with_fewer(devices, timetable, stages, factor, best)
        if self._caps is not None and not best.over:
            return best
        reasons = {_key(item): self._why(item) for item in items}
        kept = {key: reasons[key] if why == NOT_NEEDED else why for key, why in best.kept.items()}
        return replace(best, kept=kept)

    def _why(self, item: Item) -> str:
        """Why an item stays that would only be in the way of others."""
        if self._budgets is not None and item.size * self._unit > self._budgets[item.device]:
            return NO_HOST_MEMORY
        return TOO_SHORT if item.lifespan < item.out + item.back else CHANNEL_FULL

    def _with_fewer(
        self, devices: tuple[int, ...], timetable: Timetable, stages: frozenset[int], factor: float, best: _Group
    ) -> _Group:
        """Try the longest-lived items, ever more of them."""
        items = self._items(devices, timetable, stages, factor)
        counts = {-(-len(items) * share // _SHARES) for share in range(1, _SHARES + 1)}
        counts.add(_capacity(items))
        counts = sorted(counts - {0})
        fitting = None
        for count in counts:
            group = self._plan(devices, timetable, items[:count], items[count:])
            if self._better(group, best):
                best = group
            if self._caps is not None and not group.over:
                fitting = count
                break
        if fitting is not None:
            low, high = max((count for count in counts if count < fitting), default=0), fitting
            while high - low > 1:
                middle = (low + high) // 2
                group = self._plan(devices, timetable, items[:middle], items[middle:])
                if self._better(group, best):
                    best = group
                if group.over:
                    low = middle
                else:
                    high = middle
        return best

    def _better(self, group: _Group, best: _Group) -> bool:
        if self._caps is None:
            return (group.peak, -group.trips) < (best.peak, -best.trips)
        if best.over or group.over:
            return (group.over, group.peak, group.trips) < (best.over, best.peak, best.trips)
        return group.trips < best.trips

    def _items(
        self, devices: tuple[int, ...], timetable: Timetable, stages: frozenset[int], factor: float
    ) -> list[Item]:
        """What may leave, the longest-lived first."""
        items = []
        for device in devices:
            made: dict[Key, float] = {}
            order = self._base.orders[device]
            for action, start, end in zip(order, timetable.starts[device], timetable.ends[device], strict=True):
                key = (action.stage, action.microbatch)
                if action.kind is Kind.F and action.stage in stages:
                    made[key] = end
                elif action.kind in _USES and key in made:
                    out, back = self._out[action.stage] * factor, self._back[action.stage] * factor
                    size = -self._changes[Kind.WAIT_OFFLOAD][action.stage]
                    if size:  # a stage without layers has nothing to send
                        items.append(Item(device, *key, made[key], start, out, back, size))
                    del made[key]
        # Where not all of equally long-lived items have room, those that leave are spread evenly over the step.
        tick = 1e-6 * max((item.lifespan for item in items), default=1.0) or 1.0
        return sorted(items, key=lambda item: (-round(item.lifespan / tick), item.microbatch * _GOLDEN % 1, item.stage))

    def _plan(
        self, devices: tuple[int, ...], timetable: Timetable, chosen: Sequence[Item], others: Sequence[Item]
    ) -> _Group:
        """Round trips of as many of ``chosen`` as have room in the channel and in host memory."""
        if self._budgets is None:
            return self._plan_within(devices, timetable, chosen, others, None)
        budgets = [budget / self._unit for budget in self._budgets]
        while True:
            group = self._plan_within(devices, timetable, chosen, others, budgets)
            over = [
                device
                for device, order in group.orders.items()
                if max(held_after(order, self._host_changes), default=0) * self._unit > loosened(self._budgets[device])
            ]
            if not over:
                return group
            # An order issues copies a little ahead of their time: where that is too much, plan with a little less room.
            for device in over:
                budgets[device] -= min(item.size for item in chosen if item.device == device)

    def _plan_within(
        self,
        devices: tuple[int, ...],
        timetable: Timetable,
        chosen: Sequence[Item],
        others: Sequence[Item],
        budgets: Sequence[float] | None,
    ) -> _Group:
        """Round trips without those that nothing runs in the absence of."""
        idle: list[Item] = []
        for _ in range(2):
            trips, kept = plan_round_trips(chosen, self._channel.duplex, budgets)
            useless = {trip.item for trip in trips if not self._frees(trip, timetable)}
            if not useless:
                break
            idle += useless
            chosen = [item for item in chosen if item not in useless]
        trips = [trip for trip in trips if trip.item not in useless]
        group = self._emit(devices, timetable, trips, others)
        reasons = {_key(item): why for item, why in kept.items()} | {_key(item): TOO_SHORT for item in idle}
        return replace(group, kept={**group.kept, **reasons})

    def _frees(self, trip: RoundTrip, timetable: Timetable) -> bool:
        """Whether something runs while the item is away."""
        starts, ends = timetable.starts[trip.item.device], timetable.ends[trip.item.device]
        exact = 1e-9 * ends[-1]
        return bisect_left(starts, trip.out + trip.item.out - exact) < bisect_right(ends, trip.back + exact)

    def _emit(
        self, devices: tuple[int, ...], timetable: Timetable, trips: Sequence[RoundTrip], others: Sequence[Item]
    ) -> _Group:
        """The orders of the devices with these round trips."""
        orders = {}
        for device in devices:
            own = [trip for trip in trips if trip.item.device == device]
            orders[device] = _with_copies(
                self._base.orders[device], self._places[device], timetable.starts[device], timetable.ends[device], own
            )
        held = {device: max(held_after(orders[device], self._changes), default=0) * self._unit for device in devices}
        over = 0.0
        for device in devices:
            if self._caps is not None:
                over += max(0.0, held[device] - loosened(self._caps[device]))
        kept = {_key(item): NOT_NEEDED for item in others}
        return _Group(orders, kept, over, max(held.values()), len(trips))


def _capacity(items: Sequence[Item]) -> int:
    """How many of the first items one channel can copy both ways in the time that they span."""
    if not items:
        return 0
    span = max(item.used for item in items) - min(item.made for item in items)
    copied = list(accumulate(item.out + item.back for item in items))
    return bisect_right(copied, span)


def _key(item: Item) -> Key:
    return item.stage, item.microbatch


_ROUND_TRIP = (Kind.OFFLOAD, Kind.WAIT_OFFLOAD, Kind.RELOAD, Kind.WAIT_RELOAD)
_USES = (Kind.RS, Kind.I, Kind.B)
"""What needs activations on the device."""


def _with_copies(
    order: Order,
    place: Mapping[Action, int],
    starts: Sequence[float],
    ends: Sequence[float],
    trips: Sequence[RoundTrip],
) -> Order:
    """An order with its round trips: every copy is issued where the device stands when its channel gets to it."""
    exact = 1e-9 * (ends[-1] if ends else 0.0)
    events: list[tuple[int, float, float, Action]] = []
    for item, out, back in trips:
        stage, microbatch = item.stage, item.microbatch
        offload, wait_offload, reload, wait_reload = (Action(kind, stage, microbatch) for kind in _ROUND_TRIP)
        made = place[Action(Kind.F, stage, microbatch)]
        used = min(place[use] for kind in _USES if (use := Action(kind, stage, microbatch)) in place)
        # Where passes take no time, many positions have the same time; a round trip's four actions stay in their order.
        issued = min(used, max(made + 1, bisect_right(ends, out + exact)))
        left = max(issued, bisect_left(starts, out + item.out - exact))
        returning = min(used, max(left, bisect_right(ends, back + exact)))
        # Of what happens at one time: what has ended gives room to what begins. A copy that takes no time is both.
        events += [
            (issued, out, 2 if item.out else -1, offload),
            (left, out + item.out, 0, wait_offload),
            (returning, back, 2 if item.back else 0.5, reload),
            (used, item.used, 1, wait_reload),
        ]
    events.sort(key=itemgetter(0, 1, 2))
    merged: list[Action] = []
    following = 0
    for at, action in enumerate(order):
        while following < len(events) and events[following][0] <= at:
            merged.append(events[following][3])
            following += 1
        merged.append(action)
    return tuple(merged)
