"""The simulator: start and end of every action of a schedule, its peak memory, and its bubbles."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from megatron_pipemem.schedule.action import COPIES, KIND_AND_STAGE, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices, held_after, unit_factors
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Times
from megatron_pipemem.schedule.display import Shown, brief, drawing
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule, versions_held
from megatron_pipemem.schedule.validator import explained_by_validation


class Transfer(NamedTuple):
    """A transfer that runs beside the devices' own work, with its start and end.

    ``action`` is a copy of activations between a device and its host, a vocabulary collective (with the stage
    ``EVERYWHERE``), or the sum of a stage's gradients over its replicas. A collective or a sum starts when all devices
    have posted it.
    """

    action: Action
    start: float
    end: float


class CopyStall(NamedTuple):
    """The seconds that a device waited in a WAIT_OFFLOAD or WAIT_RELOAD, even if it had nothing else to do."""

    action: Action
    seconds: float


class Measured(NamedTuple):
    """Measurements of the training run in which a timeline's step was recorded."""

    bubble_rate: float | None = None  # over all steps of the run; ``None`` to use that of this step
    held: tuple[tuple[int, ...], ...] | None = None
    """Per device, the bytes held after every action of its order; ``None`` if they were not counted."""
    bytes_of_1f1b: float | None = None  # the peak of 1F1B for the same model; ``None`` if it is unknown
    has_counted_peaks: bool = False  # whether the timeline's peaks are those that the run has counted


@dataclass(frozen=True)
class Timeline(Shown):
    """The simulated run of a schedule. Times are in the unit of the costs, memory in activation units or bytes.

    Args:
        schedule: the schedule that was run.
        costs: the prices that were used.
        spans: per device, ``(start, end)`` of every action of its order. Copies to and from the host, and the waits
            for them, start and end at the time when the device goes on.
        peaks: per device, the most memory held after any action.
        messages: number of messages between different devices in one step.
        transfers: per device, its copies to and from the host, in the order in which it issued them.
        stalls: per device, its waits for copies.
        host_peaks: per device, the most host memory held after any action.
        collectives: vocabulary collectives, in the order in which they run.
        replica_reductions: sums over replicas that are on different devices, the deepest stage first.
        measured: measurements, if the step was recorded in a run.
        steps: number of equal steps without a barrier between them that the schedule holds.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[tuple[float, float], ...], ...]
    peaks: tuple[float, ...]
    messages: int
    transfers: tuple[tuple[Transfer, ...], ...] = ()
    stalls: tuple[tuple[CopyStall, ...], ...] = ()
    host_peaks: tuple[float, ...] = ()
    collectives: tuple[Transfer, ...] = ()
    replica_reductions: tuple[Transfer, ...] = ()
    measured: Measured = Measured()
    steps: int = 1

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"<Timeline of {brief(schedule.name)}: {schedule.num_devices} devices, {schedule.num_microbatches} microbatches, "
            f"makespan {self.makespan:.6g}, bubble {self.bubble_rate:.2%}, peak {self.peak:.4g}>"
        )

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end over all devices, sums over replicas included."""
        used = [spans for spans in self.spans if spans]
        if not used:
            return 0.0
        ends = [*(spans[-1][1] for spans in used), *(reduction.end for reduction in self.replica_reductions)]
        return max(ends) - min(spans[0][0] for spans in used)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The seconds that every device spends in its actions."""
        return tuple(sum(end - start for start, end in spans) for spans in self.spans)

    @property
    def ideal(self) -> float:
        """The seconds that the busiest device computes. No other order of the same actions takes less time."""
        return max(self.work)

    @cached_property
    def bubble_rate(self) -> float:
        """1 - ideal / makespan."""
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    @cached_property
    def device_bubble_rate(self) -> float:
        """The bubble rate of the papers: 1 - ideal / (longest time from a device's first start to its last end)."""
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
        """Seconds that every device waited for copies."""
        return tuple(sum(stall.seconds for stall in stalls) for stalls in self.stalls)

    def to_dataframe(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per action.

        The columns are device, action, kind, stage, chunk, microbatch, start and end in seconds since the first
        start, and the memory held afterwards.

        Raises:
            UnsupportedError: pandas is missing.
        """
        return drawing().to_dataframe(self)

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """Per device, the most weight versions that it holds of one stage at once; 1 for synchronous schedules."""
        return versions_held(self.schedule)


@explained_by_validation
def simulate(
    schedule: Schedule, costs: Costs | None = None, already: Container[Action] = (), begins: Sequence[float] = ()
) -> Timeline:
    """Simulate ``schedule``: every action starts as soon as its device is free and its inputs have arrived.

    - A message takes ``costs.p2p`` and does not occupy the devices.
    - Collectives run one after the other. Each starts when all devices have posted it. A device posts a collective
      when its data are ready.
    - A sum over replicas takes ``costs.copy_sum``. It starts when all devices with a replica have their last gradients
      of the stage. Sums between the same devices run one after the other.
    - One of ``n`` parts of a microbatch costs ``1/n`` of everything, unless the costs have a price per part.
    - Factors of microbatches (``costs.microbatch``) multiply the seconds and memory of their actions.
    - Copies to and from the host wait for their channel, in the order in which they are issued. A device that waits
      for a copy does nothing else.

    Args:
        schedule: the schedule to run.
        costs: the prices of its actions; unit costs by default.
        already: actions that ran before, in earlier steps of an asynchronous schedule. Their messages have arrived.
        begins: per device, the time at which it can begin; 0 by default.

    Raises:
        ScheduleError: an action can never run. The message names this action and those that it waits for.
        CostsError: the costs do not fit the placement, or their weights do not fit the microbatches.
    """
    return simulated(schedule, costs or Costs(), Dependencies.of_schedule(schedule, already), begins)


def simulated(schedule: Schedule, costs: Costs, dependencies: Dependencies, begins: Sequence[float] = ()) -> Timeline:
    """Return the result of ``simulate`` for a schedule whose dependencies are known."""
    placement, orders = schedule.placement, schedule.orders
    if error := dependencies.stuck():
        raise error
    prices = ActionPrices(schedule, costs)
    transfers = _Transfers(schedule, costs, prices)
    actions, lanes, lane_of = dependencies.actions, dependencies.lanes, dependencies.graph.lane_of
    graph, seconds, lags = prices.of_graph(dependencies)
    times = Times(graph, seconds, lags, 0.0, lambda node, start: transfers.run(lane_of[node], actions[node], start))
    times.free[: len(begins)] = begins
    # Devices that share a channel run in order of time, so that their copies queue up as they are issued.
    in_turn = schedule.offloads and costs.channel is not None and costs.channel.is_shared
    if in_turn:
        times.run(graph.steps(graph.by_urgency(times.start_of)))
    elif graph is dependencies.graph:
        times.run(dependencies.steps)  # many costs share them
    else:
        times.run(graph.steps(dependencies.walk.nodes))
    spans = list(zip(times.starts, times.ends, strict=True))
    served = zip(actions[sum(map(len, orders)) :], spans[sum(map(len, orders)) :], strict=True)
    return Timeline(
        schedule,
        costs,
        tuple(tuple(spans[nodes.start : nodes.stop]) for nodes in lanes[: len(orders)]),
        peaks(schedule, costs),
        dependencies.num_messages,
        tuple(map(tuple, transfers.transfers)),
        tuple(map(tuple, transfers.stalls)),
        peaks(schedule, costs, host=True),
        tuple(Transfer(action, *span) for action, span in served),
        _replica_reductions(placement, costs, zip(actions, times.ends, strict=True)),
    )


def _replica_reductions(
    placement: Placement, costs: Costs, ends: Iterable[tuple[Action, float]]
) -> tuple[Transfer, ...]:
    """Return start and end of the sums over replicas, in the order in which ``lower`` posts them.

    ``ends`` has every action with the seconds at which it ends. Sums of replicas on the same device are left out,
    because they take no time.
    """
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
        sums.append(Transfer(Action(Kind.REDUCE_REPLICAS, stage), start, vacant[channel]))
    return tuple(sums)


class _Transfers:
    """Simulate the copies between devices and hosts: when each channel is free, and the end of every copy."""

    def __init__(self, schedule: Schedule, costs: Costs, prices: ActionPrices) -> None:
        self._prices = prices
        self._channel = costs.channel or Channel(0.0)
        self._vacant: dict[tuple[int, bool], float] = {}
        self._ends: dict[Action, float] = {}
        self.transfers: list[list[Transfer]] = [[] for _ in schedule.orders]
        self.stalls: list[list[CopyStall]] = [[] for _ in schedule.orders]

    def run(self, device: int, action: Action, now: float) -> float:
        """Run a copy, or the wait for one, that starts at ``now``; return the time at which the device goes on."""
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
    emitting = Router(schedule.placement).emitting
    return sum(map(emitting.__contains__, map(KIND_AND_STAGE, chain.from_iterable(schedule.orders))))


def peaks(schedule: Schedule, costs: Costs | None = None, *, host: bool = False) -> tuple[float, ...]:
    """Return the most memory, or host memory, that every device holds after any of its actions.

    They are in bytes if ``costs.memory`` is, and otherwise in activation units. They depend on the orders of actions and
    not on their times.
    """
    if host and not schedule.offloads:
        return (0.0,) * schedule.num_devices
    costs = costs or Costs()
    placement, units = schedule.placement, schedule.units
    changes = (costs.host_changes if host else costs.memory_changes)(placement, schedule.recomputed, units)
    unit, weights = costs.memory_unit(placement, units), unit_factors(schedule, costs)
    return tuple(max(held_after(order, changes, weights, units), default=0) * unit for order in schedule.orders)
