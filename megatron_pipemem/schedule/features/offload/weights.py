"""Move weight gradients closer to their input gradients: activations that wait for them can be nowhere but on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Order, Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate

_MOST_WAITING = 4


def with_prompt_weights(schedule: Schedule, costs: Costs) -> Iterator[Schedule]:
    """Orders in which at most 0, 1, 2 ... weight gradients of a device wait, and more run wherever it would be idle.

    Args:
        schedule: compute actions only.
        costs: what they take.
    """
    if not any(action.kind is Kind.W for order in schedule.orders for action in order):
        return
    timeline = simulate(schedule, costs)
    for most in range(_MOST_WAITING + 1):
        yield replace(schedule, orders=tuple(_prompt(timeline, device, most) for device in range(schedule.num_devices)))


def _prompt(timeline: Timeline, device: int, most: int) -> Order:
    seconds = timeline.costs.seconds(timeline.schedule.placement)[Kind.W]
    waiting: deque[Action] = deque()
    order: list[Action] = []
    now = 0.0
    for action, (start, end) in zip(timeline.schedule.orders[device], timeline.spans[device], strict=True):
        if action.kind is Kind.W:
            continue
        while waiting and (now + seconds[waiting[0].stage] <= start or len(waiting) > most):
            weight = waiting.popleft()
            now += seconds[weight.stage]
            order.append(weight)
        order.append(action)
        now = max(now, start) + end - start
        if action.kind is Kind.I:
            waiting.append(action._replace(kind=Kind.W))
    return (*order, *waiting)
