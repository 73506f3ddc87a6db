"""Plan which activations of a schedule go to the host, and when their copies start.

A timetable gives a start and an end to every compute action. In the simulated run, many actions end long before another
action needs their result. A timetable here moves such actions later, without a longer step. So activations live
shorter, and copies that end in time for these later actions delay nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from statistics import fmean
from typing import NamedTuple

from megatron_pipemem.features.offload.transfers import (
    CHANNEL_FULL,
    NO_HOST_MEMORY,
    NOT_CHOSEN,
    RECOMPUTED,
    TOO_SHORT,
    Item,
    Key,
    RoundTrip,
    plan_round_trips,
)
from megatron_pipemem.schedule.action import ROUND_TRIP, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices, held_after, unit_factors
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Times
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import Timeline


class PassTimes(NamedTuple):
    """A timetable: start and end in seconds of every action, one list per device in the order of its actions."""

    starts: list[list[float]]
    ends: list[list[float]]

    def stretched(self, factor: float) -> PassTimes:
        """Return the timetable with all times multiplied by ``factor``. The seconds of copies do not change."""
        starts = [[time * factor for time in device] for device in self.starts]
        ends = [[time * factor for time in device] for device in self.ends]
        return PassTimes(starts, ends)


def spread_timetable(schedule: Schedule, costs: Costs, share: float) -> PassTimes:
    """Return the timetable of an order in which the forwards of each stage start at least an interval apart.

    The interval is ``share`` of the busiest device's seconds for one unit. ``share`` is at most 1.
    """
    dependencies = Dependencies.of_schedule(schedule)
    graph, seconds, lags = ActionPrices(schedule, costs).of_graph(dependencies)
    work = [sum(seconds[graph.prices[node]] for node in nodes) for nodes in graph.lanes]
    interval = share * max(work) / len(schedule.units) * (1 - 1e-9)
    times = Times(graph, (), lags, 0.0)
    last: dict[int, float] = {}
    for node in dependencies.walk.nodes:
        kind, stage, _ = dependencies.actions[node]
        start = times.start_of(node)
        if kind is Kind.F:
            start = last[stage] = max(start, last.get(stage, -interval) + interval)
        times.starts[node] = start
        times.ends[node] = times.free[graph.lane_of[node]] = start + seconds[graph.prices[node]]
    lanes = dependencies.lanes
    starts = [times.starts[nodes.start : nodes.stop] for nodes in lanes]
    ends = [times.ends[nodes.start : nodes.stop] for nodes in lanes]
    return PassTimes(starts, ends)


def timetables(timeline: Timeline) -> tuple[PassTimes, ...]:
    """Return two timetables that end when the simulated run ends and in which actions start as late as possible.

    In the first, only the forwards of the warm-up are late. In the second, all actions are.
    """
    dependencies = Dependencies.of_schedule(timeline.schedule)

    def is_forward(node: int) -> bool:
        return dependencies.actions[node].kind is Kind.F

    warm_up = {node for nodes in dependencies.graph.lanes for node in takewhile(is_forward, nodes)}
    return tuple(
        _as_late_as_possible(timeline, dependencies, movable) for movable in (warm_up, range(len(dependencies.actions)))
    )


def _as_late_as_possible(timeline: Timeline, dependencies: Dependencies, movable: Container[int]) -> PassTimes:
    """Return the timetable of the simulated run with each ``movable`` node as late as its device and its results allow."""
    spans = timeline.spans
    graph, _, lags = ActionPrices(timeline.schedule, timeline.costs).of_graph(dependencies)
    end_of_run = max((device[-1][1] for device in spans if device), default=0.0)
    starts = [[start for start, _ in device] for device in spans]
    ends = [[end for _, end in device] for device in spans]
    limits = [end_of_run] * len(dependencies.actions)
    for node in reversed(dependencies.walk.nodes):
        device = graph.lane_of[node]
        at = node - dependencies.lanes[device].start
        start, end = spans[device][at]
        if node in movable:
            following = starts[device][at + 1] if at + 1 < len(starts[device]) else end_of_run
            latest = max(end, min(limits[node], following))
            starts[device][at], ends[device][at] = latest - (end - start), latest
        for needed, link in graph.waits[node]:
            limits[needed] = min(limits[needed], starts[device][at] - lags[link])
    return PassTimes(starts, ends)


def with_round_trips(
    order: Order, device: int, timetable: PassTimes, trips: Sequence[RoundTrip], lives: Mapping[Key, tuple[int, int]]
) -> Order:
    """Return the order of a device with its round trips of ``trips``, whose copies start and end as the timetable says."""
    own = _trips_of(device, trips)
    starts, ends = timetable.starts[device], timetable.ends[device]
    exact = _tolerance(ends)
    # Per action: the position before which it is inserted, then three keys that sort the actions of one position: its time,
    # its rank at equal times, and its number, counted trip by trip.
    insertions: list[tuple[int, float, float, int]] = []
    for number, (item, out, back) in enumerate(own):
        forward, backward = lives[item.key]
        # If passes take no time, many positions have the same time; the four actions of a round trip keep their order.
        at_out = min(backward, max(forward + 1, bisect_right(ends, out + exact)))
        at_left = max(at_out, bisect_left(starts, out + item.out_seconds - exact))
        at_back = min(backward, max(at_left, bisect_right(ends, back + exact)))
        # At one time, actions that free memory come before actions that take it. A transfer without duration does both.
        first = number * len(ROUND_TRIP)
        insertions += [
            (at_out, out, 2 if item.out_seconds else -1, first),
            (at_left, out + item.out_seconds, 0, first + 1),
            (at_back, back, 2 if item.back_seconds else 0.5, first + 2),
            (backward, item.backward_start, 1, first + 3),
        ]
    actions: list[Action] = []
    at = 0
    for before, _, _, number in sorted(insertions):
        trip, kind = divmod(number, len(ROUND_TRIP))
        actions += order[at:before]
        actions.append(Action(ROUND_TRIP[kind], *own[trip].item.key))
        at = before
    return (*actions, *order[at:])


def lives(order: Order) -> dict[Key, tuple[int, int]]:
    """Map ``(stage, microbatch)`` to two positions in a device's order: of F, and of the first RS, I or B after it.

    Forwards without a later use are left out.
    """
    forwards: dict[Key, int] = {}
    spans: dict[Key, tuple[int, int]] = {}
    for at, action in enumerate(order):
        key = (action.stage, action.microbatch)
        if action.kind is Kind.F:
            forwards[key] = at
        elif action.kind in (Kind.RS, Kind.I, Kind.B) and key not in spans:
            spans[key] = forwards[key], at
    return spans


def useless_trips(device: int, timetable: PassTimes, trips: Sequence[RoundTrip]) -> list[Item]:
    """Return the activations of a device whose round trip frees no memory, because no action runs in between."""
    own = _trips_of(device, trips)
    starts, ends = timetable.starts[device], timetable.ends[device]
    exact = _tolerance(ends)
    return [
        trip.item
        for trip in own
        if bisect_left(starts, trip.out_start + trip.item.out_seconds - exact)
        >= bisect_right(ends, trip.back_start + exact)
    ]


def _trips_of(device: int, trips: Sequence[RoundTrip]) -> list[RoundTrip]:
    return [trip for trip in trips if trip.item.device == device]


def _tolerance(ends: Sequence[float]) -> float:
    """Return the tolerance for comparing times: a billionth of the end of the device's last action."""
    return 1e-9 * ends[-1] if len(ends) else 0.0


# Number of shares of the longest-lived activations that are tried.
_NUM_SHARES = 4
_GOLDEN_RATIO = 0.6180339887498949
# Factors by which a plan may assume slower computing, if only stalls keep a cap.
_STRETCHES = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
# Distances between the forwards of a warm-up, as shares of the interval in the steady state.
_SPREADS = (0.5, 0.75, 1.0)
# Factors for the seconds of transfers. A plan for slower ones is valid too, and sometimes better.
_TRANSFER_FACTORS = (1.0, 1.2)


class _ChannelGroup(NamedTuple):
    """Devices that share a channel to the host (or one device that has its own), and the timetable of all devices."""

    devices: tuple[int, ...]
    timetable: PassTimes


@dataclass(frozen=True)
class _TripGroup:
    """The planned round trips of the devices of one ``_ChannelGroup``, with the resulting memory."""

    part: _ChannelGroup
    trips: Sequence[RoundTrip]
    kept: dict[Key, str]  # the reasons of the activations that stay
    over: float  # sum over devices of the memory above their cap; 0 without caps
    peak: float  # the highest peak of these devices


Proposal = tuple[tuple[Order, ...], dict[Key, str], PassTimes]
"""The orders with round trips, the reason of each activation that stays, and the latest times of all actions."""


class Planner:
    """Choose the activations that go to the host and the times of their copies. ``plan_offload`` explains the
    arguments.
    """

    def __init__(
        self,
        timeline: Timeline,
        caps: tuple[float, ...] | None,
        budgets: tuple[float, ...] | None,
        spread_warmup: bool,
        slow_down: bool,
    ) -> None:
        base, costs = timeline.schedule, timeline.costs
        placement = base.placement
        self._base, self._caps, self._budgets = base, caps, budgets
        self._channel = costs.channel or Channel(0.0)
        self._units = base.units
        self._unit = costs.memory_unit(placement, base.units)
        self._changes = costs.memory_changes(placement, base.recomputed, base.units)
        self._host_changes = costs.host_changes(placement, base.recomputed, base.units)
        self._weights = unit_factors(base, costs)
        self._seconds = costs.transfer_seconds(placement, base.recomputed, base.units)
        weights = costs.microbatch or MicrobatchFactors((1.0,) * base.num_microbatches)
        self._of_copies = {kind: weights.seconds_of(kind) for kind in (Kind.OFFLOAD, Kind.RELOAD)}
        self._timetables = timetables(timeline)
        self._lives = [lives(order) for order in base.orders]
        self._stretches = _STRETCHES if slow_down and caps is not None else ()
        self._spread = (
            [spread_timetable(base, costs, share) for share in _SPREADS] if spread_warmup or caps is not None else []
        )
        shared = [devices for devices in self._channel.switches if len(devices) > 1]
        alone = set(range(base.num_devices)) - {device for devices in shared for device in devices}
        self._groups = [*shared, *((device,) for device in sorted(alone))]

    def run(self, stages: frozenset[int]) -> list[Proposal]:
        """Return plans in which activations of ``stages`` leave, of which the caller simulates each and takes the best.

        There are several only without a cap and with a shared channel. Otherwise the peaks are known without
        simulation.
        """
        recomputed_stages = {stage for stage, kind in self._base.recomputed.items() if kind is Kind.R}
        stages -= recomputed_stages
        # Devices wait for each other, so all of them are planned for one timetable.
        plans = [self._plan_all(stages, timetable, 1.0) for timetable in self._timetables]
        slower = [(timetable, 1.0) for timetable in self._spread]
        slower += [(self._spread[-1], stretch) for stretch in self._stretches]
        if self._caps is None and self._channel.is_shared:
            plans += [self._plan_all(stages, timetable, stretch) for timetable, stretch in slower]
            return [self._proposal(plan, recomputed_stages) for plan in plans]
        plan = min(plans, key=self._rank)
        for timetable, stretch in slower:
            if self._caps is not None and not any(group.over for group in plan):
                break
            other = self._plan_all(stages, timetable, stretch)
            if self._rank(other)[:-2] < self._rank(plan)[:-2]:
                plan = other
        return [self._proposal(plan, recomputed_stages)]

    def _proposal(self, plan: Sequence[_TripGroup], recomputed_stages: set[int]) -> Proposal:
        """Return the orders of all devices with their round trips, the reasons why activations stay, and the timetable."""
        orders = {
            device: self._order(device, group.part, group.trips) for group in plan for device in group.part.devices
        }
        # No group's plan has the stages that were not selected.
        kept = {
            (action.stage, action.microbatch): RECOMPUTED if action.stage in recomputed_stages else NOT_CHOSEN
            for order in self._base.orders
            for action in order
            if action.kind is Kind.F
        }
        kept |= {key: why for group in plan for key, why in group.kept.items()}
        for group in plan:
            for trip in group.trips:
                del kept[trip.item.key]
        return tuple(orders[device] for device in range(self._base.num_devices)), kept, plan[0].part.timetable

    def _rank(self, groups: Sequence[_TripGroup]) -> tuple[float, ...]:
        peaks, trips = [group.peak for group in groups], sum(len(group.trips) for group in groups)
        if self._caps is None:
            return max(peaks), sum(peaks), -trips
        over = sum(group.over for group in groups)
        return over, max(peaks) if over else 0.0, sum(peaks) if over else 0.0, trips

    def _plan_all(self, stages: frozenset[int], timetable: PassTimes, stretch: float) -> list[_TripGroup]:
        """Return the best plan of every channel group if compute actions take ``stretch`` times as long and copies do not."""
        timetable = timetable.stretched(stretch)
        return [self._best(_ChannelGroup(devices, timetable), stages) for devices in self._groups]

    def _best(self, part: _ChannelGroup, stages: frozenset[int]) -> _TripGroup:
        """Return the best plan of a channel group: the fewest round trips within the caps, or without caps the lowest peak."""
        items = self._items(part, stages, 1.0)
        if self._caps is None:
            best = self._with_lowest_peak(part, stages)
        else:
            best = self._group(part, [], items)
            for factor in _TRANSFER_FACTORS:
                if best.over:
                    best = self._with_fewer(part, stages, factor, best)
            if not best.over:
                return best
        reasons = {item.key: self._reason_to_stay(item) for item in items}
        kept = {key: reasons[key] if why == NOT_CHOSEN else why for key, why in best.kept.items()}
        return replace(best, kept=kept)

    def _reason_to_stay(self, item: Item) -> str:
        """Return the reason that is reported for an activation that stays although the peak is too high."""
        if self._budgets is not None and item.memory * self._unit > self._budgets[item.device]:
            return NO_HOST_MEMORY
        return TOO_SHORT if item.lifespan < item.out_seconds + item.back_seconds else CHANNEL_FULL

    def _with_lowest_peak(self, part: _ChannelGroup, stages: frozenset[int]) -> _TripGroup:
        """Return the plan of a channel group with the lowest peak, without caps: all activations move, then fewer, while that
        may help.
        """
        ranked: list[tuple[tuple[float, ...], float, int, _TripGroup]] = []
        for factor in _TRANSFER_FACTORS:
            items = self._items(part, stages, factor)
            for count in reversed([0, *_counts(items)]):
                if ranked and self._best_possible_rank(part, items[:count]) > min(ranked)[0]:
                    break
                group = self._plan(part, items[:count], items[count:])
                ranked.append((self._rank([group]), factor, count, group))
        return min(ranked)[-1]

    def _best_possible_rank(self, part: _ChannelGroup, items: Sequence[Item]) -> tuple[float, ...]:
        """Return a rank that no plan with these activations or some of them can beat: each has a channel of its own."""
        trips = [RoundTrip(item, item.forward_end, item.backward_start - item.back_seconds) for item in items]
        trips = [trip for trip in trips if trip.out_start + trip.item.out_seconds <= trip.back_start]
        return self._rank([self._group(part, trips, ())])

    def _with_fewer(self, part: _ChannelGroup, stages: frozenset[int], factor: float, best: _TripGroup) -> _TripGroup:
        """Return the best plan of a channel group under caps, at least as good as ``best``.

        The number of copies is found by bisection.
        """

        def rank(group: _TripGroup) -> tuple[float, ...]:
            return self._rank([group])

        items = self._items(part, stages, factor)
        too_few, enough = 0, None
        for count in _counts(items):
            group = self._plan(part, items[:count], items[count:])
            best = min(best, group, key=rank)
            if not group.over:
                enough = count
                break
            too_few = count
        while enough is not None and enough - too_few > 1:
            middle = (too_few + enough) // 2
            group = self._plan(part, items[:middle], items[middle:])
            best = min(best, group, key=rank)
            if group.over:
                too_few = middle
            else:
                enough = middle
        return best

    def _items(self, part: _ChannelGroup, stages: frozenset[int], factor: float) -> list[Item]:
        """Return the activations of ``stages`` on a channel group's devices, the longest-lived first."""
        items = []
        for device in part.devices:
            starts, ends = part.timetable.starts[device], part.timetable.ends[device]
            for (stage, microbatch), (forward, backward) in self._lives[device].items():
                weight = 1.0 if self._weights is None else self._weights[microbatch]
                at = self._units.place(stage, microbatch)
                size = -self._changes[Kind.WAIT_OFFLOAD][at] * weight
                if stage in stages and size:  # a stage without layers has no activations
                    out, back = (
                        self._seconds[kind][at] * of_microbatch[self._units.microbatch(microbatch)] * factor
                        for kind, of_microbatch in self._of_copies.items()
                    )
                    items.append(
                        Item(device, stage, microbatch, ends[forward], starts[backward], out, back, size, weight)
                    )
        # If only some of equally long-lived items have room, those that leave are spread evenly over the step.
        tick = 1e-6 * max((item.lifespan for item in items), default=1.0) or 1.0
        return sorted(
            items, key=lambda item: (-round(item.lifespan / tick), item.microbatch * _GOLDEN_RATIO % 1, item.stage)
        )

    def _plan(self, part: _ChannelGroup, chosen: Sequence[Item], others: Sequence[Item]) -> _TripGroup:
        """Plan round trips of as many activations of ``chosen`` as fit the channel and the host memory."""
        if self._budgets is None:
            return self._plan_within(part, chosen, others, None)
        budgets = [budget / self._unit for budget in self._budgets]
        while True:
            group = self._plan_within(part, chosen, others, budgets)
            over = [
                device
                for device in part.devices
                if self._peak(self._order(device, part, group.trips), self._host_changes)
                > loosened(self._budgets[device])
            ]
            if not over:
                return group
            # An order issues transfers a little early. If that takes too much memory, plan with a little less room.
            for device in over:
                own = [item for item in chosen if item.device == device]
                budgets[device] -= min(item.memory / item.memory_factor for item in own) * fmean(
                    item.memory_factor for item in own
                )

    def _plan_within(
        self,
        part: _ChannelGroup,
        chosen: Sequence[Item],
        others: Sequence[Item],
        budgets: Sequence[float] | None,
    ) -> _TripGroup:
        """Plan round trips within ``budgets``, and leave out those during which no action of their device runs."""
        idle: list[Item] = []
        for _ in range(2):
            trips, kept = plan_round_trips(chosen, self._channel.duplex, budgets)
            idling = {item for device in part.devices for item in useless_trips(device, part.timetable, trips)}
            if not idling:
                break
            idle += idling
            chosen = [item for item in chosen if item not in idling]
        trips = [trip for trip in trips if trip.item not in idling]
        group = self._group(part, trips, others)
        reasons = {item.key: why for item, why in kept.items()} | {item.key: TOO_SHORT for item in idle}
        return replace(group, kept={**group.kept, **reasons})

    def _group(self, part: _ChannelGroup, trips: Sequence[RoundTrip], others: Sequence[Item]) -> _TripGroup:
        """Return these round trips with their peak memory, and the memory above the caps. ``others`` need not leave."""
        peaks = {device: self._peak(self._order(device, part, trips), self._changes) for device in part.devices}
        over = 0.0
        for device in part.devices:
            if self._caps is not None:
                over += max(0.0, peaks[device] - loosened(self._caps[device]))
        kept = {item.key: NOT_CHOSEN for item in others}
        return _TripGroup(part, trips, kept, over, max(peaks.values()))

    def _order(self, device: int, part: _ChannelGroup, trips: Sequence[RoundTrip]) -> Order:
        return with_round_trips(self._base.orders[device], device, part.timetable, trips, self._lives[device])

    def _peak(self, order: Order, changes: Mapping[Kind, Sequence[float]]) -> float:
        """Return the peak of the memory, or host memory, that ``changes`` describes, in the unit of the costs' memory."""
        return max(0.0, *held_after(order, changes, self._weights, self._units)) * self._unit


def _counts(items: Sequence[Item]) -> list[int]:
    """Return the numbers of activations to try, the smallest first, for a list with the longest-lived first.

    One number is how many the channel can carry between the first forward and the last backward.
    """
    shares = {-(-len(items) * share // _NUM_SHARES) for share in range(1, _NUM_SHARES + 1)}
    first = min((item.forward_end for item in items), default=0.0)
    span = max((item.backward_start for item in items), default=0.0) - first
    capacity = bisect_right(list(accumulate(item.out_seconds + item.back_seconds for item in items)), span)
    return sorted((shares | {capacity}) - {0})
