"""Predictions of the bytes that 1F1B holds for the same model, which shares of 1F1B refer to.

Prices of a model's parts price 1F1B's own stages. If only the stages of another placement are known, stages are
joined into those of 1F1B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_pipemem.schedule.action import MESSAGES, RECOMPUTE, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import PartPrices, Price
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, held_after, peaks

_Changes = Mapping[Kind, Sequence[float]]


def share_of_1f1b(timeline: Timeline) -> float | None:
    """Return the peak of a simulated run as a share of 1F1B's bytes; ``None`` if its costs have no bytes."""
    schedule = timeline.schedule
    if schedule.vocabulary_barriers:
        return None
    whole = bytes_of_1f1b(timeline.costs, schedule.placement, schedule.num_microbatches, schedule.slices)
    return timeline.peak / whole if whole else None


def bytes_of_1f1b(costs: Costs, placement: Placement, num_microbatches: int, slices: int = 1) -> float | None:
    """Return the most bytes that a device of 1F1B holds; ``None`` if the costs are in activation units.

    ``costs`` are of the stages of a placement, with the LM head on the last one.
    """
    if costs.memory is None:
        return None
    # If microbatches are equal, 1F1B never holds more than one per device.
    needed = min(num_microbatches, 2 * placement.num_devices) if costs.microbatch is None else num_microbatches
    same = _as_1f1b(placement.num_devices, needed)
    if any(isinstance(each, PartPrices) for each in costs.memory.values()):
        return max(peaks(same, costs))
    if not _can_join(placement):
        return None
    changes = costs.memory_changes(placement, slices=slices)
    memory: dict[Kind, Price] = {
        kind: tuple(_joined(changes[kind], placement)) for kind in (Kind.F, Kind.B) if kind in changes
    }
    return max(peaks(same, Costs(memory=memory, microbatch=costs.microbatch)))


def in_shares_of_1f1b(costs: Costs, num_devices: int, num_microbatches: int) -> Costs:
    """Return the costs with memory in shares of 1F1B's bytes; in activation units if they have no bytes.

    Raise a CostsError if their bytes are per stage, and not for one stage per device.
    """
    whole = bytes_of_1f1b(costs, Placement.linear(num_devices), num_microbatches)
    if costs.memory is None or not whole:
        return replace(costs, memory=None)
    shares: dict[Kind, Price] = {}
    for kind, each in costs.memory.items():
        if isinstance(each, PartPrices):
            shares[kind] = each * (1 / whole)
        else:
            shares[kind] = tuple(value / whole for value in each) if isinstance(each, Sequence) else each / whole
    return replace(costs, memory=shares)


def counted_bytes_of_1f1b(
    schedule: Schedule, changes: _Changes, peak: int, layers: Sequence[int] | None = None
) -> int | None:
    """Return the most bytes that a rank of 1F1B holds after any action, messages included, from counted ``changes`` per stage.

    The result is ``None`` in these cases: the LM head is cut over ranks, sequences are cut into slices, messages were
    not counted, or 1F1B's stages would have unequal layers.
    """
    inner, same = schedule.num_devices - 1, _as_1f1b(schedule.num_devices, schedule.num_microbatches)
    if schedule.orders == same.orders:
        return peak
    needed = {Kind.F, *MESSAGES} if inner else {Kind.F}
    is_known = changes.keys() >= needed and _can_join(schedule.placement)
    if schedule.vocabulary_barriers or schedule.slices > 1 or not is_known:
        return None
    is_joined = schedule.placement.model_stages > schedule.num_devices
    counts = _joined(layers, schedule.placement) if layers is not None and is_joined else [0]
    if max(counts) - min(counts) > max(1, _UNEVEN * max(counts)):
        return None
    kept = [changes[kind] for kind in (Kind.F, *RECOMPUTE) if kind in changes]
    stages = {Kind.F: _joined([*map(sum, zip(*kept, strict=True))], schedule.placement)}
    for kind, is_at_start, sign in _MESSAGES:
        message = sign * max(map(abs, changes.get(kind, (0,))))
        stages[kind] = [0, *[message] * inner] if is_at_start else [*[message] * inner, 0]
    # The backward gives everything back.
    stages[Kind.B] = [-sum(each) for each in zip(*stages.values(), strict=True)]
    return int(max(max(held_after(actions, stages)) for actions in lower(same).actions))


_UNEVEN = 0.1
"""Largest difference between stages of 1F1B, as a share of their layers."""
_MESSAGES = ((Kind.RECV_F, True, 1), (Kind.SEND_F, False, -1), (Kind.RECV_I, False, 1), (Kind.SEND_I, True, -1))
"""Kind, whether the message is at the start of a stage, and whether its rank then holds more (1) or less (-1)."""


def _as_1f1b(num_devices: int, num_microbatches: int) -> Schedule:
    return build_schedule("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)


def _can_join(placement: Placement) -> bool:
    """Return whether the stages of a placement can be joined into one stage per device."""
    return placement.model_stages % placement.num_devices == 0


def _joined(values: Sequence[float], placement: Placement) -> list[float]:
    """Return the values of 1F1B's stages, with the slices of a microbatch added up."""
    # The stages of the first replica come first.
    one_replica = values[: len(values) // placement.replicas]
    size = len(one_replica) // placement.num_devices
    return [sum(one_replica[at : at + size]) for at in range(0, len(one_replica), size)]
