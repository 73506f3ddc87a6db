"""Run W earlier on devices that would otherwise hold more bytes than the fullest device of 1F1B.

In activation units, a device holds as much from I to W as from F to I, and schedules delay W by that rule. In bytes,
some parts of a model differ. The head keeps the logits of one microbatch from F to I, beside the microbatches that wait
for W. Layers with experts keep more than the dense layers on the first device of 1F1B. A device then exceeds the bytes
of 1F1B, unless fewer microbatches wait:

    zb-h1, p = 4, device 3:   F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 ...
    with W earlier:           F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 ...

No W moves to a later place, so no device holds more than before, and no action waits for a W of another device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from megatron_pipemem.schedule.action import PLAIN, Action, Kind
from megatron_pipemem.schedule.action_prices import held_after, unit_factors
from megatron_pipemem.schedule.baseline import bytes_of_1f1b
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.schedule import Schedule

_Changes = dict[Action, float]
"""The bytes that each action of a device takes (positive) or gives back."""


def with_earlier_weights(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the schedule with W as much earlier as its devices need to hold no more bytes than 1F1B's fullest device.

    If a device holds more even where each W directly follows its I, the limit is the fullest of these devices. The
    result is the schedule itself if no W moves: also for costs without bytes, and for schedules with other actions than
    F, I, W and B, or with pairs.
    """
    if costs.memory is None or schedule.pairs or not schedule.splits_backward:
        return schedule
    if not all(action.kind in PLAIN for order in schedule.orders for action in order):
        return schedule
    limit = bytes_of_1f1b(costs, schedule.placement, schedule.units)
    if limit is None:
        return schedule
    held = _bytes_after(schedule, costs)
    if max(map(max, held)) <= loosened(limit):
        return schedule
    devices = [
        {action: after - before for action, (before, after) in zip(order, pairwise(memory), strict=True)}
        for order, memory in zip(schedule.orders, held, strict=True)
    ]
    limit = loosened(max(limit, *(max(accumulate(_with_direct_weights(changes))) for changes in devices)))
    orders = tuple(
        order if max(memory) <= limit else tuple(action for action, _ in _with_limit(changes, limit))
        for order, memory, changes in zip(schedule.orders, held, devices, strict=True)
    )
    return schedule if orders == schedule.orders else replace(schedule, orders=orders)


def _bytes_after(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Return the bytes that each device holds at the beginning, and after every action."""
    changes = costs.memory_changes(schedule.placement, units=schedule.units)
    weights = unit_factors(schedule, costs)
    return [[0.0, *held_after(order, changes, weights, schedule.units)] for order in schedule.orders]


def _with_direct_weights(changes: _Changes) -> Iterator[float]:
    """Yield the bytes of a device's actions in the order in which each W directly follows its I."""
    for action, change in changes.items():
        kind, stage, microbatch = action
        if kind is not Kind.W:
            yield change
        if kind is Kind.I:
            yield changes[Action(Kind.W, stage, microbatch)]


def _with_limit(changes: _Changes, limit: float) -> Iterator[tuple[Action, float]]:
    """Yield the actions of a device with their bytes; W run before an action that would exceed the limit without them."""
    waiting: deque[Action] = deque()  # W whose I has run, in the order of these I
    memory, early = 0.0, set()
    for action, change in changes.items():
        if action in early:
            continue
        if action.kind is Kind.W:
            waiting.remove(action)
        while waiting and action.kind is not Kind.W and memory + change > limit:
            weight = waiting.popleft()
            early.add(weight)
            memory += changes[weight]
            yield weight, changes[weight]
        if action.kind is Kind.I:
            waiting.append(Action(Kind.W, action.stage, action.microbatch))
        memory += change
        yield action, change
