"""Vary the order of a schedule's unequal microbatches, many variations at once, for a faster step within the caps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np

from megatron_pipemem.schedule.action import COLLECTIVES, EVERYWHERE, Kind, place
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate

# Variations per try. The time of a try depends on the longest chain of actions, and hardly on the number of orders.
_AT_ONCE = 96
# Variations per try by the simulator, which takes the sum of their times.
_SIMULATED = 4
# The most moves that are applied together, after each of them has made the step faster alone.
_TOGETHER = 6
# The value of an order grows by this factor times its excess over the cap. So variations may pass through such orders.
_PENALTY = 3.0

Order = tuple[int, ...]
Move = Callable[[Sequence[int]], Order]


class Variation:
    """The search for the best order of microbatches for one schedule, whose actions stay in their order.

    Attributes:
        order: the order with the smallest ``value``. It may exceed the caps.
        value: the makespan of ``order`` in seconds, times a factor above 1 if it exceeds the caps.
        fitting: makespan and order of the fastest order within the caps; the makespan is infinite if there is none.
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
        """Try random moves in the best order, and return whether the best value has become smaller.

        The best move of a round is kept. Further moves that gained in it are tried on top of it in the next round.
        """
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
        """Return the ``value`` of every order, and keep the order with the smallest one; of equal ones the later.

        The later one is kept so that variations go on. ``fitting`` is updated too.
        """
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
        """Simulate each order; return its makespan, and its largest excess over a device's cap, divided by the cap."""
        all_costs = [replace(self._costs, microbatch=self._weights.reordered(order)) for order in orders]
        held = [zip(peaks(self.schedule, costs), self._caps, strict=True) for costs in all_costs]
        excess = [max((now - cap) / (cap or 1.0) for now, cap in each) for each in held]
        return [simulate(self.schedule, costs).makespan for costs in all_costs], excess


def random_move(count: int, random: Random) -> Move:
    """Return a random move: a function that swaps two microbatches of an order, or moves one to another position.

    The function returns a new order. ``count`` is the number of microbatches in an order.
    """
    first, second, swaps = random.randrange(count), random.randrange(count), random.random() < 0.5

    def moved(order: Sequence[int]) -> Order:
        changed = list(order)
        if swaps:
            changed[first], changed[second] = changed[second], changed[first]
        else:
            changed.insert(second, changed.pop(first))
        return tuple(changed)

    return moved


class Outcomes(NamedTuple):
    """The makespan and the excess over the caps of every tried order."""

    makespans: np.ndarray  # seconds, without the summing of gradients over replicas of the model
    excess: (
        np.ndarray
    )  # the largest excess of a device over its cap, as a share of the cap; at most 0 if all keep theirs


class _Level(NamedTuple):
    """Nodes of a graph that wait only for nodes of earlier levels, so that their times are computed at once."""

    nodes: slice  # consecutive numbers
    before: np.ndarray  # per node, the one before it in its lane
    needs: list[tuple[np.ndarray, np.ndarray | None]]
    """One array per wait: the needed nodes, and the rows of their lags, or ``None`` if no message takes time."""


class ManyOrders:
    """Compute time and memory of a schedule for many orders of its microbatches at once, with numpy.

    The schedule must not offload, because the order in which copies use their channel depends on times.
    """

    def __init__(self, schedule: Schedule, costs: Costs, caps: Sequence[float]) -> None:
        assert not schedule.offloads and costs.microbatch is not None
        found = Dependencies.of_schedule(schedule)
        self._weights = costs.microbatch
        self._rows: list[tuple[float, ...]] = []
        self._levels, numbers = _levels(found)
        nodes = sorted(range(len(numbers)), key=numbers.__getitem__)
        self._price_nodes(schedule, costs, found, nodes)
        self._price_messages(schedule, costs, found, numbers)
        self._weigh_lanes(schedule, costs, caps)

    def try_all(self, orders: Sequence[Sequence[int]]) -> Outcomes:
        """Return makespan and excess of every order. An order lists indices of microbatches in ``costs.microbatch``."""
        chosen = np.asarray(orders).T
        weights = np.asarray(self._rows)[:, chosen]
        seconds = np.zeros((len(self._of_node[0][0]), len(orders)))
        for prices, rows, units in self._of_node:
            seconds += prices * weights[rows, units]
        lags = None if self._lags is None else self._lags[0] * weights[self._lags[1], self._lags[2]]
        ends = np.zeros((len(seconds) + 1, len(orders)))  # the last row is the begin of the step
        for nodes, before, needs in self._levels:
            start = ends[before]
            for needed, links in needs:
                arrival = ends[needed]
                if links is not None and lags is not None:
                    arrival += lags[links]
                np.maximum(start, arrival, out=start)
            np.add(start, seconds[nodes], out=ends[nodes])
        excess = np.full(len(orders), -np.inf)
        for changes, units, cap in self._held:
            peaks = np.cumsum(changes * weights[self._tokens][units], axis=0).max(axis=0)
            np.maximum(excess, (peaks - cap) / (cap or 1.0), out=excess)
        return Outcomes(ends.max(axis=0), excess)

    def _row(self, weights: tuple[float, ...]) -> int:
        if weights not in self._rows:
            self._rows.append(weights)
        return self._rows.index(weights)

    def _price_nodes(self, schedule: Schedule, costs: Costs, found: Dependencies, nodes: list[int]) -> None:
        """Store price and weight of every node. A B without weights of its own has two of each: for I and for W.

        ``nodes`` has the graph's nodes in the order of their new numbers (``_levels``).
        """
        prices, weights = ActionPrices(schedule, costs), self._weights
        rows = {kind: self._row(weights.seconds_of(kind)) for kind, _ in found.kinds}
        split = Kind.B not in weights.kinds and any(kind is Kind.B for kind, _ in found.kinds)
        parts: list[list[tuple[float, int, int]]] = [[], []] if split else [[]]
        for node in nodes:
            kind, stage, unit = found.actions[node]
            microbatch = unit // schedule.slices
            kinds = (Kind.I, Kind.W) if split and kind is Kind.B else (kind,)
            for number, part in enumerate(parts):
                each = kinds[min(number, len(kinds) - 1)]
                costly = number < len(kinds) and (kind not in COLLECTIVES or stage == EVERYWHERE)
                row = rows[each] if each in rows else self._row(weights.seconds_of(each))
                part.append((prices.priced(each, stage, unit) if costly else 0.0, row, microbatch))
        self._of_node = [_columns(part) for part in parts]

    def _price_messages(self, schedule: Schedule, costs: Costs, found: Dependencies, numbers: list[int]) -> None:
        """Store the seconds of messages per link and microbatch, and their index for every wait, unless all are 0.

        ``numbers`` has the new number of every node (``_levels``).
        """
        prices, self._tokens = ActionPrices(schedule, costs), self._row(self._weights.tokens)
        seconds = [prices.of_message(link) for link in found.links]
        self._lags = None
        if not any(seconds):
            return
        m, slices = schedule.num_microbatches, schedule.slices
        self._lags = _columns([(lag, self._tokens, k) for lag in seconds for k in range(m)])
        nodes = {number: node for node, number in enumerate(numbers)}
        for level in self._levels:
            at = range(level.nodes.start, level.nodes.stop)
            for slot, (needed, _) in enumerate(level.needs):
                links = np.zeros(len(needed), int)
                for row, number in enumerate(at):
                    waits = found.graph.waits[nodes[number]]
                    if slot < len(waits):
                        other, link = waits[slot]
                        links[row] = link * m + found.actions[other].microbatch // slices
                level.needs[slot] = (needed, links)

    def _weigh_lanes(self, schedule: Schedule, costs: Costs, caps: Sequence[float]) -> None:
        """Store, for every device, the change of memory by each action, its microbatch, and the cap.

        Actions and devices without a change of memory are left out.
        """
        slices = schedule.slices
        changes = costs.memory_changes(schedule.placement, schedule.recomputed, slices)
        unit = costs.memory_unit(schedule.placement, slices)
        self._held = []
        for order, cap in zip(schedule.orders, caps, strict=True):
            of_device = [
                (changes[a.kind][place(a, slices)] * unit, 0, a.microbatch // slices)
                for a in order
                if a.kind in changes
            ]
            if of_device:
                change, _, units = _columns(of_device)
                self._held.append((change, units, cap))


def _columns(entries: list[tuple[float, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the entries as three arrays: prices as a column, rows of weights, and microbatches."""
    prices, rows, units = zip(*entries, strict=True)
    return np.asarray(prices, float)[:, None], np.asarray(rows), np.asarray(units)


def _levels(found: Dependencies) -> tuple[list[_Level], list[int]]:
    """Return the levels of a graph, and a new number for every node, counted level by level."""
    graph = found.graph
    before: dict[int, int] = {}
    for lane in graph.lanes:
        before.update(zip(lane[1:], lane, strict=False))
    level_of = [0] * len(graph.waits)
    members: list[list[int]] = []
    for node in found.walk.nodes:
        earlier = [needed for needed, _ in graph.waits[node]]
        if node in before:
            earlier.append(before[node])
        level_of[node] = 1 + max((level_of[each] for each in earlier), default=-1)
        if level_of[node] == len(members):
            members.append([])
        members[level_of[node]].append(node)
    numbers = [0] * len(graph.waits)
    for number, node in enumerate(node for level in members for node in level):
        numbers[node] = number
    begin, levels, first = len(numbers), [], 0
    for level in members:
        most = max(len(graph.waits[node]) for node in level)
        needs = [
            np.asarray([numbers[waits[slot][0]] if slot < len(waits := graph.waits[node]) else begin for node in level])
            for slot in range(most)
        ]
        lane_before = np.asarray([numbers[before[node]] if node in before else begin for node in level])
        levels.append(_Level(slice(first, first + len(level)), lane_before, [(each, None) for each in needs]))
        first += len(level)
    return levels, numbers
