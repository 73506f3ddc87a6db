"""Compute the peak bytes of 1F1B for the model of another schedule, and memory as a share of that peak.

A memory share such as "60 % of 1F1B" is the peak of a schedule divided by the peak of 1F1B.

If the costs have prices of layers, embedding and head, the stages of 1F1B are priced from these. If the costs are
those of another placement's stages, neighbouring stages are added up to the stages of 1F1B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_pipemem.schedule.action import MESSAGES, RECOMPUTE, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import Several
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, held_after, peaks
from megatron_pipemem.schedule.units import Units, as_units

_Changes = Mapping[Kind, Sequence[float]]


def share_of_1f1b(timeline: Timeline) -> float | None:
    """Return the highest peak of all devices in a run, divided by that of 1F1B. Every text and picture takes this share.

    The bytes of 1F1B are those that a training run counted, if it also counted the peaks, and else computed from the
    costs. The result is ``None`` if they are unknown: if the vocabulary is cut, and in the cases of ``bytes_of_1f1b``.
    """
    schedule, measured = timeline.schedule, timeline.measured
    if measured.has_counted_peaks:
        return timeline.peak / measured.bytes_of_1f1b if measured.bytes_of_1f1b else None
    if schedule.vocabulary_barriers:
        return None
    bytes_under_1f1b = bytes_of_1f1b(timeline.costs, schedule.placement, schedule.units)
    return timeline.peak / bytes_under_1f1b if bytes_under_1f1b else None


def planned_share_of_1f1b(schedule: Schedule, costs: Costs) -> tuple[float, str]:
    """Return the highest peak of a planned step divided by that of 1F1B, and on what the share is based.

    If no bytes are known, it is based on the order alone, in activation units.
    """
    if not schedule.vocabulary_barriers:
        bytes_under_1f1b = bytes_of_1f1b(costs, schedule.placement, schedule.units)
        if bytes_under_1f1b:
            return max(peaks(schedule, costs)) / bytes_under_1f1b, "by predicted bytes"
    under_1f1b = min(1.0, schedule.num_microbatches / schedule.num_devices)
    return max(peaks(schedule)) / under_1f1b, "by the order alone: equal stages, inputs kept for W not counted"


def bytes_of_1f1b(costs: Costs, placement: Placement, units: Units | int) -> float | None:
    """Return the highest peak in bytes of any device under 1F1B.

    ``costs`` are prices of the model's parts, of a device's whole share, or of the stages of ``placement`` with the LM
    head on the last one. The result is ``None`` if the costs have no bytes, or if they are not of parts and the number
    of stages of a replica is not a multiple of that of devices.
    """
    if costs.memory is None:
        return None
    units = as_units(units)
    num_microbatches = units.num_microbatches
    # If microbatches are equal, 1F1B never holds more than one per device.
    needed = min(num_microbatches, 2 * placement.num_devices) if costs.microbatch is None else num_microbatches
    same = _as_1f1b(placement.num_devices, needed)
    if not any(isinstance(change, Sequence) for change in costs.memory.values()):  # they are for any placement
        return max(peaks(same, costs))
    if not _can_join(placement):
        return None
    changes = costs.memory_changes(placement, units=units)
    memory: dict[Kind, Several] = {
        kind: tuple(_joined(changes[kind], placement)) for kind in (Kind.F, Kind.B) if kind in changes
    }
    return max(peaks(same, Costs(memory=memory, microbatch=costs.microbatch)))


def in_shares_of_1f1b(costs: Costs, num_devices: int, num_microbatches: int) -> Costs:
    """Return the costs with every memory value divided by the peak bytes of 1F1B; without memory if they have no bytes.

    Memory values per stage must be those of one stage per device. Otherwise a CostsError is raised.
    """
    bytes_under_1f1b = bytes_of_1f1b(costs, Placement.linear(num_devices), num_microbatches)
    return costs.with_scaled_memory(1 / bytes_under_1f1b) if bytes_under_1f1b else replace(costs, memory=None)


def counted_bytes_of_1f1b(
    schedule: Schedule, changes: _Changes, peak: int, layers: Sequence[int] | None = None
) -> int | None:
    """Return the highest peak in bytes of any rank under 1F1B, from bytes that were counted under another schedule.

    ``changes`` has the counted bytes per kind and stage, messages included; a positive value takes memory. ``peak`` is
    the counted peak in bytes of the fullest rank, which is the result if the schedule is 1F1B itself. ``layers`` has
    the number of layers of every stage. The result is ``None`` in these cases: the LM head is cut over ranks,
    microbatches run in parts, messages were not counted, the stages do not join into one per rank, or joined
    stages have numbers of layers that differ by more than one and by more than 10 %.
    """
    inner, same = schedule.num_devices - 1, _as_1f1b(schedule.num_devices, schedule.num_microbatches)
    if schedule.orders == same.orders:
        return peak
    needed = {Kind.F, *MESSAGES} if inner else {Kind.F}
    is_known = changes.keys() >= needed and _can_join(schedule.placement)
    if schedule.vocabulary_barriers or not schedule.units.are_whole or not is_known:
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
    stages[Kind.B] = [-sum(changes_of_stage) for changes_of_stage in zip(*stages.values(), strict=True)]
    return int(max(max(held_after(actions, stages)) for actions in lower(same).actions))


_UNEVEN = 0.1
"""The largest accepted difference between the layers of 1F1B's stages, as a share of the largest stage's layers."""
_MESSAGES = ((Kind.RECV_F, True, 1), (Kind.SEND_F, False, -1), (Kind.RECV_I, False, 1), (Kind.SEND_I, True, -1))
"""Kind, whether the message is at the start of a stage, and whether its rank then holds more (1) or less (-1)."""


@lru_cache(maxsize=64)
def _as_1f1b(num_devices: int, num_microbatches: int) -> Schedule:
    return build_schedule("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)


def _can_join(placement: Placement) -> bool:
    """Return whether the stages of one replica are a multiple of the devices, so that they join into one per device."""
    return placement.model_stages % placement.num_devices == 0


def _joined(values: Sequence[float], placement: Placement) -> list[float]:
    """Add up the values of the neighbouring stages, and of their parts, that make up each stage of 1F1B.

    ``values`` has one value per stage and part. Only the first replica counts.
    """
    # The stages of the first replica come first.
    one_replica = values[: len(values) // placement.replicas]
    size = len(one_replica) // placement.num_devices
    return [sum(one_replica[at : at + size]) for at in range(0, len(one_replica), size)]
