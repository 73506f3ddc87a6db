"""Build what vocabulary parallelism is compared with: the head on the last stage, and layers moved away from
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement


def head_on_last_stage(costs: Costs, placement: Placement, head: float, layers: Sequence[int] | None = None) -> Costs:
    """Return the costs of a model whose head is a part of its last stage.

    Args:
        costs: of the layers alone, evenly cut where they are single numbers.
        placement: one model copy.
        head: seconds of forward and backward of the whole head; a third each goes to F, I and W.
        layers: layers of every stage, where they are not evenly cut: ``costs`` are then single numbers and every layer
            takes the same. In activation units their stages are held to take the same memory all the same.

    Raises:
        UnsupportedError: ``layers`` are given for costs per stage, or not one number per stage, or there are none at all.
    """
    seconds = costs.seconds(placement)
    if layers is not None:
        if len(layers) != placement.num_stages or any(
            isinstance(price, Sequence) for price in (costs.forward, costs.backward_input, costs.backward_weight)
        ):
            raise UnsupportedError(
                f"{len(layers)} numbers of layers for {placement.num_stages} stages: give one per stage, and costs as "
                "single numbers, the price of a device's whole share"
            )
        if min(layers) < 0 or not sum(layers):
            raise UnsupportedError(
                f"layers of the stages {', '.join(map(str, layers))} make no model; give 0 or more for each, at least 1 in all"
            )
        model = {kind: sum(prices) for kind, prices in seconds.items()}
        seconds = {kind: tuple(model[kind] * n / sum(layers) for n in layers) for kind in seconds}
    forward, inputs, weights = (
        (*seconds[kind][:-1], seconds[kind][-1] + head / 3) for kind in (Kind.F, Kind.I, Kind.W)
    )
    return replace(costs, forward=forward, backward_input=inputs, backward_weight=weights)


def redistribute(layers: int, placement: Placement, head: float) -> tuple[int, ...]:
    """Return the layers of every stage such that the slowest device is as fast as whole layers allow.

    Args:
        layers: of the model.
        placement: one model copy.
        head: the head's cost in layers; it stays on the last stage.

    Raises:
        UnsupportedError: a number is negative, or there is more than one model copy.
    """
    if layers < 0 or head < 0:
        raise UnsupportedError("layers and head must not be negative; give the cost of the head in layers")
    if placement.replicas > 1:
        raise UnsupportedError("layers are redistributed over the stages of one model copy; this placement has more")
    load = [0.0] * placement.num_devices
    load[placement.devices[-1]] += head
    held = [0] * placement.num_devices
    for _ in range(layers):
        device = min(range(len(load)), key=lambda d: (load[d], held[d], d))
        load[device] += 1
        held[device] += 1
    found = [0] * placement.num_stages
    for device, stages in enumerate(placement.stages):
        # A device's earlier stages take what does not divide: the last one has the head already.
        for index, stage in enumerate(stages):
            found[stage] = held[device] // len(stages) + (index < held[device] % len(stages))
    return tuple(found)
