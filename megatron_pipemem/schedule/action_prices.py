"""Prices of one schedule under given costs: seconds of every action and message, and the memory held after every
action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from megatron_pipemem.schedule.action import COLLECTIVES, EVERYWHERE, Action, Kind, place
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Graph
from megatron_pipemem.schedule.schedule import Schedule


def held_after(
    actions: Sequence[Action],
    changes: Mapping[Kind, Sequence[float]],
    weights: Sequence[float] | None = None,
    slices: int = 1,
) -> list[float]:
    """Return the memory that a device holds after each of its actions, in the unit of ``changes``.

    Before the first action the device holds nothing. ``actions`` are those of one device, in order. ``changes`` has
    one value per stage, or per stage and slice, for every kind; a positive value takes memory. ``weights`` is the
    result of ``unit_weights``.
    """
    if slices == 1:
        deltas = [changes[kind][stage] if kind in changes else 0 for kind, stage, _ in actions]
    else:
        deltas = [changes[a.kind][place(a, slices)] if a.kind in changes else 0 for a in actions]
    if weights is not None:
        # An action on a whole stage has no microbatch, and so no weight.
        of_actions = (1.0 if a.microbatch is None else weights[a.microbatch] for a in actions)
        deltas = [change * weight for change, weight in zip(deltas, of_actions, strict=True)]
    return list(accumulate(deltas))


def unit_weights(schedule: Schedule, costs: Costs) -> tuple[float, ...] | None:
    """Return one factor of memory per microbatch or slice; ``None`` if the costs have no weights of microbatches."""
    weights = costs.microbatch
    if weights is None:
        return None
    weights.check(schedule.num_microbatches)
    return tuple(weight for weight in weights.tokens for _ in range(schedule.slices))


class ActionPrices:
    """Look up the seconds of every action and message of a schedule under given costs."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        placement, slices = schedule.placement, schedule.slices
        self._costs, self._slices, self._placement = costs, slices, placement
        self._weights = costs.microbatch
        if self._weights is not None:
            self._weights.check(schedule.num_microbatches)
        self._seconds = costs.seconds(placement, slices)
        if schedule.offloads:
            self._seconds |= costs.transfer_seconds(placement, schedule.recomputed, slices)
        self.sums = costs.replica_reduction_seconds(placement) if placement.replicas > 1 else ()
        """Seconds of the sum of the gradients over the replicas, one value per stage."""
        self._collectives: dict[Kind, float] = {}
        if schedule.vocabulary_barriers:
            vocabulary = costs.vocabulary_costs(placement, schedule.vocabulary_barriers, slices)
            self._seconds |= vocabulary.seconds(placement.num_devices, slices)
            self._collectives = vocabulary.collective_seconds(slices)

    def of(self, kind: Kind, stage: int, unit: int | None = None) -> float:
        """Return the seconds of an action that is not a message.

        Waits for copies, gradient reductions and sums over replicas take no time here. For a vocabulary action
        ``stage`` is the device. ``unit`` is the microbatch or slice. Without ``unit`` the price is that of a
        microbatch of weight 1, on its first slice.
        """
        weights = self._weights
        if weights is None or unit is None:
            return self.priced(kind, stage, unit or 0)
        if kind is Kind.B and kind not in weights.kinds:
            return self.of(Kind.I, stage, unit) + self.of(Kind.W, stage, unit)
        return self.priced(kind, stage, unit) * weights.seconds_of(kind)[unit // self._slices]

    def priced(self, kind: Kind, stage: int, unit: int) -> float:
        """Return the seconds that an action would take if its microbatch had weight 1; 0 for a kind without a price."""
        prices = self._seconds.get(kind)
        if prices is None:
            return self._collectives.get(kind, 0.0)
        return prices[stage if self._slices == 1 else place(Action(kind, stage, unit), self._slices)]

    def second_of_pair(self, first: Action, second: Action) -> float:
        """Return the seconds that a pair takes longer than its first action alone.

        While one action of a pair exchanges tokens, the other one computes. So the pair takes as long as its computing,
        its exchanges, or the longer one of its actions, whichever is most.
        """
        alone = [self.of(*action) for action in (first, second)]
        exchanged = [
            seconds
            * min(1.0, self._exchanges[kind][stage] / price if (price := self.priced(kind, stage, unit)) else 0.0)
            for seconds, (kind, stage, unit) in zip(alone, (first, second), strict=True)
        ]
        return max(*alone, sum(exchanged), sum(alone) - sum(exchanged)) - alone[0]

    def of_message(self, edge: tuple[int, int], unit: int | None = None) -> float:
        """Return the seconds of one message over ``edge``, a pair (source device, destination device).

        ``unit`` is the microbatch or slice of the message. Without it the price is that of weight 1. If there are
        slices, it is the price of one slice.
        """
        seconds = self._costs.link_seconds(*edge) / self._slices
        if self._weights is None or unit is None:
            return seconds
        return seconds * self._weights.tokens[unit // self._slices]

    def of_graph(self, dependencies: Dependencies) -> tuple[Graph, list[float], list[float]]:
        """Return the graph of ``dependencies``, the seconds of its prices, and the lags of its links: arguments of ``Times``.

        A lag is the time of a message over a link. If microbatches are alike, a kind has one price per stage (or per
        stage and slice), and a link has one lag. If they have weights, every node has a price, and a link has one lag
        per microbatch or slice.
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
        graph, links, actions, slices = dependencies.graph, dependencies.links, dependencies.actions, self._slices
        if self._weights is None:
            units, prices = range(1), graph.prices
            if self._slices_differ:
                units = range(slices)
                places = zip(prices, actions, strict=True)
                prices = [-1 if at < 0 else at * slices + action.microbatch % slices for at, action in places]
                graph = Graph(graph.lanes, graph.waits, prices, graph.lane_of)
            seconds = [self.of_node(kind, stage, unit) for kind, stage in dependencies.kinds for unit in units]
            return graph, seconds, list(map(self.of_message, links))
        units = range(len(self._weights) * slices)
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
    def _slices_differ(self) -> bool:
        tables, slices = self._seconds.values(), self._slices
        return slices > 1 and any(table[at] != table[at - at % slices] for table in tables for at in range(len(table)))

    def of_node(self, kind: Kind, stage: int, unit: int | None = None) -> float:
        """Return the seconds of a graph node; 0 for the post of a collective, because the collective is a node too."""
        return 0.0 if kind in COLLECTIVES and stage != EVERYWHERE else self.of(kind, stage, unit)
