"""Say how long every action of a program takes by itself."""

from __future__ import annotations

from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule


class ActionPrices:
    """Seconds of every action of a program."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        placement, pieces = schedule.placement, schedule.pieces
        self._costs, self._pieces = costs, pieces
        seconds = costs.seconds(placement)
        if schedule.offloads:
            seconds |= costs.transfer_seconds(placement, schedule.recomputed)
        self._seconds = {kind: tuple(each / pieces for each in prices) for kind, prices in seconds.items()}
        self._sums = costs.replica_reduction_seconds(placement) if placement.replicas > 1 else ()
        self._collectives: dict[Kind, float] = {}
        if schedule.vocabulary_barriers:
            vocabulary = costs.vocabulary_costs(placement, schedule.vocabulary_barriers)
            self._seconds |= vocabulary.seconds(placement.num_devices)
            self._collectives = vocabulary.collective_seconds()

    def of(self, kind: Kind, stage: int) -> float:
        """Return the seconds of an action that is no message. Waits for transfers, and reductions of gradients, take no
        time here.
        """
        prices = self._seconds.get(kind)
        return self._collectives.get(kind, 0.0) if prices is None else prices[stage]

    def of_message(self, edge: tuple[int, int]) -> float:
        """Return the seconds of a message from one device to another."""
        return self._costs.link_seconds(*edge) / self._pieces

    def of_sum(self, stage: int) -> float:
        """Return the seconds of summing the gradients of a stage of the model over its replicas."""
        return self._sums[stage]
