"""Build 1F1B with the head interlaced, which vocabulary parallelism is compared with."""

from __future__ import annotations

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units


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
    return Schedule("interlaced", placement, Units.equal(m), tuple(map(tuple, lists)), vocabulary_barriers=2)
