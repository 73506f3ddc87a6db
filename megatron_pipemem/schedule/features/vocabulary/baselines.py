"""Build what vocabulary parallelism is compared with: the head on the last stage, layers moved away from it, and
interlacing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule


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


def redistribute(layers: int, placement: Placement, head: float, embedding: float = 0.0) -> tuple[int, ...]:
    """Return the layers of every stage such that the slowest device is as fast as whole layers allow.

    Args:
        layers: of the model.
        placement: one model copy.
        head: the head's cost in layers; it stays on the last stage.
        embedding: the embedding's, on the first.

    Raises:
        UnsupportedError: a number is negative, or there is more than one model copy.
    """
    if layers < 0 or head < 0 or embedding < 0:
        raise UnsupportedError("layers, head and embedding must not be negative; give their costs in layers")
    if placement.replicas > 1:
        raise UnsupportedError("layers are redistributed over the stages of one model copy; this placement has more")
    load = [0.0] * placement.num_devices
    load[placement.devices[-1]] += head
    load[placement.devices[0]] += embedding
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


def interlaced(num_devices: int, num_microbatches: int) -> Schedule:
    """Build 1F1B with head and embedding as tensor parallelism over all devices: they join every head computation at
    once.

    Between two heads every device runs one F and one B. A forward then passes two devices in a row, which run them in
    opposite order, but a backward one, so that device 0 holds about ``1.5p`` microbatches (arXiv 2411.05288, section 5.2
    and appendix; nnScaler). As a schedule it has two barriers whose S and T stand side by side.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``.
    """
    p, m = num_devices, num_microbatches
    placement = Placement.linear(p)
    first_head = (p - 1) // 2
    lists: list[list[Action]] = [[] for _ in range(p)]

    def everywhere(kind: Kind, microbatch: int) -> None:
        if 0 <= microbatch < m:
            for device in range(p):
                lists[device].append(Action(kind, device, microbatch))

    def head(microbatch: int) -> None:
        everywhere(Kind.BCAST_X, microbatch)
        everywhere(Kind.S, microbatch)
        everywhere(Kind.STATS, microbatch)
        if 0 <= microbatch < m:
            lists[-1].append(Action(Kind.LOSS, p - 1, microbatch))
        everywhere(Kind.BCAST_G, microbatch)
        everywhere(Kind.T, microbatch)
        everywhere(Kind.REDUCE_X, microbatch)

    for interval in range(-1, m + first_head + p):
        for device in range(p):
            hops = p - 1 - device
            forward = Action(Kind.F, device, interval - first_head + hops // 2)
            backward = Action(Kind.B, device, interval - first_head - 1 - hops)
            pair = (backward, forward) if hops % 2 == 0 else (forward, backward)
            lists[device] += [action for action in pair if 0 <= action.microbatch < m]
        head(interval - first_head)
        everywhere(Kind.BCAST_E, interval - first_head - p)
        everywhere(Kind.EMBED_B, interval - first_head - p)
        coming = interval + 1 - first_head + (p - 1) // 2
        everywhere(Kind.EMBED_F, coming)
        everywhere(Kind.REDUCE_E, coming)
    return Schedule("interlaced", placement, m, tuple(map(tuple, lists)), vocabulary_barriers=2)
