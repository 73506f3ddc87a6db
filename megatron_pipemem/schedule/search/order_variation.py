"""Vary the order of a schedule's microbatches, many variations at once, towards a shorter step within the caps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import loosened
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import peaks, simulate
from megatron_pipemem.schedule.search.many_orders import ManyOrders

# Variations tried at once: a try takes as long as there are actions one after another, and hardly longer for more orders.
_AT_ONCE = 96
# A try by the simulator takes as long as that of all the others.
_SIMULATED = 4
# Moves that gained by themselves, and are then tried one after another.
_TOGETHER = 6
# An order that exceeds its cap by a share is worse by so many times this share: variations may pass through it.
_PENALTY = 3.0

Order = tuple[int, ...]
Move = Callable[[Sequence[int]], Order]


class Variation:
    """The best orders found for one schedule.

    Args:
        schedule: valid; its actions stay as they are.
        costs: with weights of the microbatches, in arrival order.
        caps: the most every device may hold, in the unit of the costs' memory.
        starts: orders to start from; the best of them is varied.
        random: of the moves.

    Attributes:
        order: the best one; it may exceed the caps for as long as none that keeps them is better.
        value: its makespan in seconds, or more where it exceeds the caps.
        fitting: makespan and order of the fastest that keeps the caps; infinite without any.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, caps: Sequence[float], starts: Sequence[Order], random: Random
    ) -> None:
        assert costs.microbatch is not None
        self._weights = costs.microbatch
        self.schedule, self._costs, self._caps, self._random = schedule, costs, caps, random
        self._many = None if schedule.offloads else ManyOrders(schedule, costs, caps)
        self._gained: list[Move] = []
        self.order, self.value = starts[0], math.inf
        self.fitting: tuple[float, Order] = (math.inf, starts[0])
        for at in range(0, len(starts), self._at_once):
            self._try(starts[at : at + self._at_once])

    @property
    def _at_once(self) -> int:
        return _SIMULATED if self._many is None else _AT_ONCE

    def round(self) -> bool:
        """Try single moves of the best order, and those together by which it gained before; return whether any gained."""
        further, tries = self.order, []
        for move in self._gained:
            further = move(further)
            tries.append(further)
        moves = [random_move(len(self.order), self._random) for _ in range(self._at_once - len(tries))]
        before = self.value
        values = self._try([*tries, *(move(self.order) for move in moves)])
        gains = sorted((value, at) for at, value in enumerate(values[len(tries) :]) if value < before)
        self._gained = [moves[at] for _, at in gains[1:_TOGETHER]]
        return self.value < before

    def _try(self, orders: Sequence[Order]) -> list[float]:
        """Return the values of orders, and keep the best. Of equal ones it is the later one: variations move on."""
        makespans, excess = self._simulated(orders) if self._many is None else self._many.try_all(orders)
        values = []
        for order, makespan, over in zip(orders, map(float, makespans), map(float, excess), strict=True):
            fits = over <= loosened(1.0) - 1
            values.append(makespan if fits else makespan * (1 + _PENALTY * over))
            if values[-1] <= self.value:
                self.order, self.value = order, values[-1]
            if fits and makespan < self.fitting[0]:
                self.fitting = makespan, order
        return values

    def _simulated(self, orders: Sequence[Order]) -> tuple[list[float], list[float]]:
        """Return makespans and excess as ``ManyOrders`` does."""
        all_costs = [replace(self._costs, microbatch=self._weights.reordered(order)) for order in orders]
        held = [zip(peaks(self.schedule, costs), self._caps, strict=True) for costs in all_costs]
        excess = [max((now - cap) / (cap or 1.0) for now, cap in each) for each in held]
        return [simulate(self.schedule, costs).makespan for costs in all_costs], excess


def random_move(count: int, random: Random) -> Move:
    """Return what lets two microbatches change places, or moves one elsewhere."""
    first, second, swaps = random.randrange(count), random.randrange(count), random.random() < 0.5

    def moved(order: Sequence[int]) -> Order:
        changed = list(order)
        if swaps:
            changed[first], changed[second] = changed[second], changed[first]
        else:
            changed.insert(second, changed.pop(first))
        return tuple(changed)

    return moved
