"""Prices of one schedule under given costs: seconds of every action and message, and the memory held after every
action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from megatron_pipemem.schedule.action import COLLECTIVES, EVERYWHERE, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Graph
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import WHOLE, Units


def held_after(
    actions: Sequence[Action],
    changes: Mapping[Kind, Sequence[float]],
    factors: Sequence[float] | None = None,
    units: Units = WHOLE,
) -> list[float]:
    """Return the memory that a device holds after each of its actions, in the unit of ``changes``.

    Before the first action the device holds nothing. ``actions`` are those of one device, in order. ``changes`` has
    one value per stage and part (``Units.place``) for every kind; a positive value takes memory. ``factors`` is the
    result of ``unit_factors``.
    """
    if units.are_whole:
        deltas = [changes[kind][stage] if kind in changes else 0 for kind, stage, _ in actions]
    else:
        place = units.place
        deltas = [changes[kind][place(stage, unit)] if kind in changes else 0 for kind, stage, unit in actions]
    if factors is not None:
        # An action on a whole stage has no microbatch, and so no factor.
        of_actions = (1.0 if a.microbatch is None else factors[a.microbatch] for a in actions)
        deltas = [change * factor for change, factor in zip(deltas, of_actions, strict=True)]
    return list(accumulate(deltas))


def unit_factors(schedule: Schedule, costs: Costs) -> tuple[float, ...] | None:
    """Return one factor of memory per unit; ``None`` if the costs have no factors of microbatches."""
    factors = costs.microbatch
    if factors is None:
        return None
    factors.check(schedule.num_microbatches)
    return tuple(factors.tokens[schedule.units.microbatch(unit)] for unit in range(len(schedule.units)))


class ActionPrices:
    """Look up the seconds of every action and message of a schedule under given costs."""

    def __init__(self, schedule: Schedule, costs: Costs, *, in_pairs: bool = False) -> None:
        """Prepare the prices. With ``in_pairs`` they are those of the schedule with pairs, which it may not have yet."""
        placement, units = schedule.placement, schedule.units
        self._costs, self._units, self._placement = costs, units, placement
        self._has_pairs = in_pairs or bool(schedule.pairs)
        self._factors = costs.microbatch
        if self._factors is not None:
            self._factors.check(schedule.num_microbatches)
        self._seconds = costs.seconds(placement, units)
        if schedule.offloads:
            self._seconds |= costs.transfer_seconds(placement, schedule.recomputed, units)
        self.sums = costs.replica_reduction_seconds(placement) if placement.replicas > 1 else ()
        """Seconds of the sum of the gradients over the replicas, one value per stage."""
        self._collectives: dict[Kind, float] = {}
        if schedule.vocabulary_barriers:
            vocabulary = costs.vocabulary_costs(placement, schedule.vocabulary_barriers, units)
            self._seconds |= vocabulary.seconds(placement.num_devices, units)
            self._collectives = vocabulary.collective_seconds(units)

    def of(self, kind: Kind, stage: int, unit: int | None = None) -> float:
        """Return the seconds of an action that is not a message.

        Waits for copies, gradient reductions and sums over replicas take no time here. For a vocabulary action
        ``stage`` is the device. Without ``unit`` the price is that of a first unit whose microbatch has factor 1.
        """
        factors = self._factors
        if factors is None or unit is None:
            return self.priced(kind, stage, unit or 0)
        if kind is Kind.B and kind not in factors.kinds:
            return self.of(Kind.I, stage, unit) + self.of(Kind.W, stage, unit)
        return self.priced(kind, stage, unit) * factors.seconds_of(kind)[self._units.microbatch(unit)]

    def priced(self, kind: Kind, stage: int, unit: int) -> float:
        """Return the seconds that an action would take if its microbatch had factor 1; 0 for a kind without a price."""
        prices = self._seconds.get(kind)
        if prices is None:
            return self._collectives.get(kind, 0.0)
        return prices[stage if self._units.are_whole else self._units.place(stage, unit)]

    def second_of_pair(self, first: Action, second: Action) -> float:
        """Return the seconds that a pair takes longer than its first action alone.

        While one action of a pair exchanges tokens, the other one computes. So the pair takes as long as its computing,
        its exchanges, or the longer one of its actions, whichever is most.
        """
        alone = [self.of(*action) for action in (first, second)]
        exchanged = sum(self._exchanged(*action) for action in (first, second))
        return max(*alone, exchanged, sum(alone) - exchanged) - alone[0]

    def _exchanged(self, kind: Kind, stage: int, unit: int | None) -> float:
        """Return the seconds of an F, I or B in which only tokens travel."""
        price = self.priced(kind, stage, unit or 0)
        return self.of(kind, stage, unit) * min(1.0, self._exchanges[kind][stage] / price) if price else 0.0

    def of_message(self, edge: tuple[int, int], unit: int | None = None) -> float:
        """Return the seconds of one message over ``edge``, a pair (source device, destination device).

        Without ``unit`` the price is that of a unit whose microbatch has factor 1.
        """
        seconds = self._costs.link_seconds(*edge) / self._units.parts
        if self._factors is None or unit is None:
            return seconds
        return seconds * self._factors.tokens[self._units.microbatch(unit)]

    def of_graph(self, dependencies: Dependencies) -> tuple[Graph, list[float], list[float]]:
        """Return the graph of ``dependencies``, the seconds of its prices, and the lags of its links: arguments of ``Times``.

        A lag is the time of a message over a link. If microbatches are alike, a kind has one price per stage (or per
        stage and part), and a link has one lag. If they have factors, every node has a price, and a link has one lag
        per unit.
        """
        graph, seconds, lags = self._of_single_actions(dependencies)
        if not dependencies.pairs:
            return graph, seconds, lags
        prices, shorter = list(graph.prices), {}
        for first in dependencies.pairs:
            second = first + 1
            key = prices[first], prices[second]
            if key not in shorter:
                shorter[key] = len(seconds)
                seconds.append(self.second_of_pair(dependencies.actions[first], dependencies.actions[second]))
            prices[second] = shorter[key]
        return Graph(graph.lanes, graph.waits, prices, graph.lane_of), seconds, lags

    def _of_single_actions(self, dependencies: Dependencies) -> tuple[Graph, list[float], list[float]]:
        """Return the result of ``of_graph`` with the price of every action outside of a pair."""
        graph, links, actions = dependencies.graph, dependencies.links, dependencies.actions
        if self._factors is None:
            parts, prices = range(1), graph.prices
            if actions and self._parts_differ:
                fullest = self._units.sizes.index(self._units.parts)
                parts = self._units.of(fullest)
                places = zip(prices, actions, strict=True)
                prices = [-1 if at < 0 else self._units.place(at, action.microbatch) for at, action in places]
                graph = Graph(graph.lanes, graph.waits, prices, graph.lane_of)
            seconds = [self.of_node(kind, stage, unit) for kind, stage in dependencies.kinds for unit in parts]
            return graph, seconds, list(map(self.of_message, links))
        units = range(len(self._units))
        own = (-1 if price < 0 else node for node, price in enumerate(graph.prices))
        waits = [
            [(needed, link * len(units) + actions[needed].microbatch) for needed, link in needs]
            for needs in graph.waits
        ]
        return (
            Graph(graph.lanes, waits, list(own), graph.lane_of),
            [self.of_node(*action) for action in actions],
            [self.of_message(link, unit) for link in links for unit in units],
        )

    @cached_property
    def _exchanges(self) -> Mapping[Kind, Sequence[float]]:
        return self._costs.exchange_seconds(self._placement)

    @cached_property
    def _parts_differ(self) -> bool:
        tables, parts = self._seconds.values(), self._units.parts
        return parts > 1 and any(table[at] != table[at - at % parts] for table in tables for at in range(len(table)))

    def of_node(self, kind: Kind, stage: int, unit: int | None = None) -> float:
        """Return the seconds of a graph node; 0 for the post of a collective, because the collective is a node too.

        In a schedule with pairs, exchanges hide W of a B that runs alone (``Costs.with_hidden_weights``).
        """
        if kind in COLLECTIVES and stage != EVERYWHERE:
            return 0.0
        if kind is not Kind.B or not self._has_pairs:
            return self.of(kind, stage, unit)
        hidden = min(self._exchanged(kind, stage, unit), self.of(Kind.W, stage, unit)) / 2
        return self.of(kind, stage, unit) - hidden
