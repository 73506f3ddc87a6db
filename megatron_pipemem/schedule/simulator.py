"""When every action runs, what is held, and where the bubbles are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, permutations

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.weights import versions_held


def dependencies(action: Action, placement: Placement, fused: set[Action], pieces: int = 1) -> tuple[Action, ...]:
    """The compute actions that must end before ``action`` starts.

    Sequence pieces of one microbatch share the keys and values of attention: a piece runs forward after the piece before
    it, and backward after the piece behind it, which adds to the gradients of its keys and values.

    Args:
        action: a compute action.
        placement: supplies the neighbours of the stage.
        fused: every B of the schedule; a stage's gradient comes from its neighbour's I or from its B.
        pieces: sequence pieces of a microbatch.
    """
    kind, stage, microbatch = action
    if kind is Kind.F:
        before = placement.previous_stage(stage)
        needed = () if before is None else (Action(Kind.F, before, microbatch),)
        return (*needed, Action(Kind.F, stage, microbatch - 1)) if microbatch % pieces else needed
    if kind is Kind.W:
        return (Action(Kind.I, stage, microbatch),)
    after = placement.next_stage(stage)
    needed = (Action(Kind.F, stage, microbatch),)
    if after is not None:
        full = Action(Kind.B, after, microbatch)
        needed = (*needed, full if full in fused else Action(Kind.I, after, microbatch))
    if (microbatch + 1) % pieces:
        full = Action(Kind.B, stage, microbatch + 1)
        needed = (*needed, full if full in fused else Action(Kind.I, stage, microbatch + 1))
    return needed


@dataclass(frozen=True)
class Timeline:
    """The simulated run of a schedule. Seconds are those of the costs; memory is in activation units or bytes.

    Args:
        schedule: what was run.
        costs: what it was priced with.
        spans: per device, ``(start, end)`` of every action of its order, in order.
        peaks: per device, the most it held after any action.
        messages: number of messages between different devices in one step.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[tuple[float, float], ...], ...]
    peaks: tuple[float, ...]
    messages: int

    @cached_property
    def makespan(self) -> float:
        """First start to last end over all devices."""
        used = [spans for spans in self.spans if spans]
        return max(spans[-1][1] for spans in used) - min(spans[0][0] for spans in used) if used else 0.0

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
        """As the papers count: 1 - ideal / (longest time from a device's first start to its last end)."""
        longest = max((spans[-1][1] - spans[0][0] for spans in self.spans if spans), default=0.0)
        return 1 - self.ideal / longest if longest else 0.0

    @property
    def peak(self) -> float:
        return max(self.peaks)

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """Per device, the most versions of the weights of any of its stages that it holds at once; 1 when synchronous."""
        return versions_held(self.schedule)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run ``schedule``: every action starts as soon as its device is free and its inputs have arrived.

    Messages take ``costs.p2p`` and do not occupy the devices. One of ``n`` sequence pieces costs ``1/n`` of everything:
    of the seconds, of its messages, and of the memory.

    Raises:
        ScheduleError: some action waits for ever; the message names it and what it waits for.
        CostsError: the costs do not fit the placement.
    """
    costs = costs or Costs()
    placement, orders, pieces = schedule.placement, schedule.orders, schedule.pieces
    seconds = {kind: tuple(s / pieces for s in prices) for kind, prices in costs.seconds(placement).items()}
    fused = {action for order in orders for action in order if action.kind is Kind.B}
    links = {
        (a, b): costs.link_seconds(a, b) / pieces
        for stage in range(placement.num_stages)
        if (after := placement.next_stage(stage)) is not None
        for a, b in permutations((placement.devices[stage], placement.devices[after]))
    }
    ends: dict[Action, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in orders]
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(len(orders)))
    while runnable:
        device = runnable.pop()
        order, ran = orders[device], spans[device]
        now = ran[-1][1] if ran else 0.0
        for action in order[len(ran) :]:
            start = now
            for needed in dependencies(action, placement, fused, pieces):
                if needed not in ends:
                    waiting.setdefault(needed, []).append(device)
                    break
                source = placement.devices[needed.stage]
                start = max(start, ends[needed] + (links[source, device] if source != device else 0.0))
            else:
                now = start + seconds[action.kind][action.stage]
                ran.append((start, now))
                ends[action] = now
                runnable.extend(waiting.pop(action, ()))
                continue
            break
    for device, (order, ran) in enumerate(zip(orders, spans, strict=True)):
        if len(ran) < len(order):
            action = order[len(ran)]
            unmet = [str(a) for a in dependencies(action, placement, fused, pieces) if a not in ends]
            raise ScheduleError(
                f"waits for ever for {', '.join(unmet)}; validate() shows why",
                device=device,
                position=len(ran),
                action=action,
            )
    return Timeline(
        schedule,
        costs,
        tuple(map(tuple, spans)),
        peaks(orders, placement, costs, pieces),
        count_messages(schedule),
    )


def count_messages(schedule: Schedule) -> int:
    """Messages between different devices in one step."""
    placement = schedule.placement
    neighbour = {Kind.F: placement.next_stage, Kind.I: placement.previous_stage, Kind.B: placement.previous_stage}
    crossing = {
        (kind, stage)
        for kind, neighbour_of in neighbour.items()
        for stage in range(placement.num_stages)
        if (other := neighbour_of(stage)) is not None and placement.devices[other] != placement.devices[stage]
    }
    return sum((action.kind, action.stage) in crossing for order in schedule.orders for action in order)


def held_after(actions: Sequence[Action], changes: Mapping[Kind, Sequence[float]]) -> list[float]:
    """What a device holds after each of its actions, starting from nothing."""
    return list(accumulate(changes[a.kind][a.stage] if a.kind in changes else 0 for a in actions))


def peaks(orders: Sequence[Order], placement: Placement, costs: Costs, pieces: int = 1) -> tuple[float, ...]:
    """The most every device holds after any of its actions. Depends on the orders alone, not on time."""
    changes, unit = costs.memory_changes(placement), costs.memory_unit(placement) / pieces
    return tuple(max(held_after(order, changes), default=0) * unit for order in orders)
