"""Simulate a schedule: when every action runs, what is held, and where the bubbles are."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megatron_pipemem.schedule.action import COPIES, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices, held_after, unit_weights
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Times
from megatron_pipemem.schedule.display import Shown, brief, drawing
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule, versions_held
from megatron_pipemem.schedule.validator import explained_by_validation


class Transfer(NamedTuple):
    """A copy of activations between a device and the host: when its channel served it."""

    action: Action
    start: float
    end: float


class CollectiveTransfer(NamedTuple):
    """A collective that all devices have posted: when the channel of the collectives served it."""

    kind: Kind
    microbatch: int
    start: float
    end: float


class ReplicaReduction(NamedTuple):
    """The gradients of a stage of the model are added up over its copies: when their channel did it."""

    stage: int
    start: float
    end: float


class CopyStall(NamedTuple):
    """Computing stood still until a copy had ended, also where it would have had nothing else to do."""

    action: Action
    seconds: float


class Measured(NamedTuple):
    """Measurements of the run that a timeline shows one step of."""

    bubble_rate: float | None = None  # of the run, over its steps; ``None`` to take that of the step
    held: tuple[tuple[int, ...], ...] | None = None
    """Per device, the bytes that it held after every action of its order; ``None`` if they were not counted."""
    bytes_of_1f1b: float | None = None  # the peak that 1F1B would have of the same model; ``None`` if it is not known


@dataclass(frozen=True)
class Timeline(Shown):
    """The simulated run of a schedule. Seconds are those of the costs; memory is in activation units or bytes.

    Args:
        schedule: what was run.
        costs: what it was priced with.
        spans: per device, ``(start, end)`` of every action of its order, in order. Those on memory take no time: they start
            and end when the device goes on.
        peaks: per device, the most it held after any action.
        messages: number of messages between different devices in one step.
        transfers: per device, its transfers in the order in which it issued them.
        stalls: per device, its waits for transfers that had not ended.
        host_peaks: per device, the most it held in host memory after any action.
        collectives: of vocabulary parallelism, in the order of their channel.
        replica_reductions: of every stage with replicas on other devices, the deepest first.
        measured: of a step that ran.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[tuple[float, float], ...], ...]
    peaks: tuple[float, ...]
    messages: int
    transfers: tuple[tuple[Transfer, ...], ...] = ()
    stalls: tuple[tuple[CopyStall, ...], ...] = ()
    host_peaks: tuple[float, ...] = ()
    collectives: tuple[CollectiveTransfer, ...] = ()
    replica_reductions: tuple[ReplicaReduction, ...] = ()
    measured: Measured = Measured()

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"<Timeline of {brief(schedule.name)}: {schedule.num_devices} devices, {schedule.num_microbatches} microbatches, "
            f"makespan {self.makespan:.6g}, bubble {self.bubble_rate:.2%}, peak {self.peak:.4g}>"
        )

    @cached_property
    def makespan(self) -> float:
        """First start to last end over all devices, sums of copies included."""
        used = [spans for spans in self.spans if spans]
        if not used:
            return 0.0
        ends = [*(spans[-1][1] for spans in used), *(each.end for each in self.replica_reductions)]
        return max(ends) - min(spans[0][0] for spans in used)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds every device computes."""
        return tuple(sum(end - start for start, end in spans) for spans in self.spans)

    @property
    def ideal(self) -> float:
        """Work of the busiest device: no schedule of this placement is faster."""
        return max(self.work)

    @cached_property
    def bubble_rate(self) -> float:
        """1 - ideal / makespan."""
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    @cached_property
    def device_bubble_rate(self) -> float:
        """Bubble rate as the papers count: 1 - ideal / (longest time from a device's first start to its last end)."""
        longest = max((spans[-1][1] - spans[0][0] for spans in self.spans if spans), default=0.0)
        return 1 - self.ideal / longest if longest else 0.0

    @property
    def peak(self) -> float:
        return max(self.peaks)

    @property
    def host_peak(self) -> float:
        return max(self.host_peaks, default=0.0)

    @cached_property
    def stall_seconds(self) -> tuple[float, ...]:
        """Per device, how long it stood still for copies."""
        return tuple(sum(stall.seconds for stall in stalls) for stalls in self.stalls)

    def to_dataframe(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per action: device, action, kind, stage, chunk, microbatch, start and end in
        seconds from the first start of the run, and what the device holds after it.

        Raises:
            UnsupportedError: pandas is missing.
        """
        return drawing().to_dataframe(self)

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """Per device, the most versions of the weights of any of its stages that it holds at once; 1 when synchronous."""
        return versions_held(self.schedule)


@explained_by_validation
def simulate(
    schedule: Schedule, costs: Costs | None = None, already: Container[Action] = (), begins: Sequence[float] = ()
) -> Timeline:
    """Run ``schedule``: every action starts as soon as its device is free and its inputs have arrived.

    Messages take ``costs.p2p`` and do not occupy the devices; nor do collectives, which run one after the other, each
    when all devices have posted it. A device posts when it has ready what it brings. Sums over replicas take
    ``costs.copy_sum`` when both ends have their last gradients, one after the other between two devices. One of ``n``
    sequence slices costs ``1/n`` of everything: of the seconds, of its messages, and of the memory; of seconds and memory it
    costs what the costs say, where they have a price per slice. A microbatch with weights
    (``costs.microbatch``) costs its multiple of everything. Transfers to the host wait
    for their channel: whose transfer is issued first is served first. A device that waits for one does nothing else.

    Args:
        schedule: what to run.
        costs: what it costs; unit costs by default.
        already: actions that have run before, and whose messages have arrived: what earlier windows of a stream did.
        begins: per device, when it can begin; at 0 by default.

    Raises:
        ScheduleError: some action waits for ever; the message names it and what it waits for.
        CostsError: the costs do not fit the placement, or their weights not the microbatches.
    """
    costs = costs or Costs()
    placement, orders = schedule.placement, schedule.orders
    found = Dependencies.of_schedule(schedule, already)
    if error := found.stuck():
        raise error
    prices = ActionPrices(schedule, costs)
    transfers = _Transfers(schedule, costs, prices)
    actions, lanes, lane_of = found.actions, found.lanes, found.graph.lane_of
    graph, seconds, lags = prices.of_graph(found)
    times = Times(graph, seconds, lags, 0.0, lambda node, start: transfers.run(lane_of[node], actions[node], start))
    times.free[: len(begins)] = begins
    # Where devices share a channel, their actions are taken in order of time, so that transfers queue up as they are issued.
    in_turn = schedule.offloads and costs.channel is not None and costs.channel.is_shared
    times.run(graph.steps(graph.by_urgency(times.start_of) if in_turn else found.walk.nodes))
    spans = list(zip(times.starts, times.ends, strict=True))
    served = zip(actions[sum(map(len, orders)) :], spans[sum(map(len, orders)) :], strict=True)
    return Timeline(
        schedule,
        costs,
        tuple(tuple(spans[nodes.start : nodes.stop]) for nodes in lanes[: len(orders)]),
        peaks(schedule, costs),
        count_messages(schedule),
        tuple(map(tuple, transfers.transfers)),
        tuple(map(tuple, transfers.stalls)),
        peaks(schedule, costs, host=True),
        tuple(CollectiveTransfer(kind, microbatch, *span) for (kind, _, microbatch), span in served),
        _replica_reductions(placement, costs, zip(actions, times.ends, strict=True)),
    )


def _replica_reductions(
    placement: Placement, costs: Costs, ends: Iterable[tuple[Action, float]]
) -> tuple[ReplicaReduction, ...]:
    """Run the sums over replicas in the order in which ``lower`` posts them; those within one device take no time."""
    if placement.replicas == 1:
        return ()
    complete: dict[int, float] = {}
    for (kind, stage, _), end in ends:
        stage %= placement.model_stages
        if kind in (Kind.W, Kind.B) and len(placement.holders(stage)) > 1:
            complete[stage] = max(end, complete.get(stage, end))
    seconds = costs.replica_reduction_seconds(placement)
    vacant: dict[tuple[int, ...], float] = {}
    sums = []
    for stage in sorted(complete, reverse=True):
        channel = placement.holders(stage)
        start = max(complete[stage], vacant.get(channel, 0.0))
        vacant[channel] = start + seconds[stage]
        sums.append(ReplicaReduction(stage, start, vacant[channel]))
    return tuple(sums)


class _Transfers:
    """The channels of all devices while a schedule runs."""

    def __init__(self, schedule: Schedule, costs: Costs, prices: ActionPrices) -> None:
        self._prices = prices
        self._channel = costs.channel or Channel(0.0)
        self._vacant: dict[tuple[int, bool], float] = {}
        self._ends: dict[Action, float] = {}
        self.transfers: list[list[Transfer]] = [[] for _ in schedule.orders]
        self.stalls: list[list[CopyStall]] = [[] for _ in schedule.orders]

    def run(self, device: int, action: Action, now: float) -> float:
        """Run an action on memory that its device reaches at ``now``, and return when the device goes on."""
        if action.kind in COPIES:
            lane = self._channel.lane_of(device, action.kind)
            start = max(now, self._vacant.get(lane, now))
            end = start + self._prices.of(*action)
            self._vacant[lane] = self._ends[action] = end
            self.transfers[device].append(Transfer(action, start, end))
            return now
        (awaited,) = action.kind.spec.needs
        end = self._ends[action._replace(kind=Kind(awaited.kind))]
        if end > now:
            self.stalls[device].append(CopyStall(action, end - now))
        return max(now, end)


def count_messages(schedule: Schedule) -> int:
    """Return the number of messages between different devices in one step."""
    emits = Router(schedule.placement).emits
    return sum(emits(action) for order in schedule.orders for action in order)


def peaks(schedule: Schedule, costs: Costs | None = None, *, host: bool = False) -> tuple[float, ...]:
    """Return the most that every device holds after any of its actions. It depends on the orders alone, not on time."""
    costs = costs or Costs()
    placement, slices = schedule.placement, schedule.slices
    changes = (costs.host_changes if host else costs.memory_changes)(placement, schedule.recomputed, slices)
    unit, weights = costs.memory_unit(placement, slices), unit_weights(schedule, costs)
    return tuple(max(held_after(order, changes, weights, slices), default=0) * unit for order in schedule.orders)
