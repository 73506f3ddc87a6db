"""Build looped BFS: a device runs one chunk for all microbatches before it turns to the next (arXiv 2211.05953)."""

from __future__ import annotations

from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.families.passes import Pass, check_whole, in_microbatch_order
from megatron_pipemem.schedule.family import Family, Formula


def looped_bfs(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Run chunk after chunk for all microbatches. Backwards run in ascending order, as in 1F1B, so that gradients
    accumulate in the same order.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``; fewer than ``p`` lengthen the bubble.
        chunks: stages per device.

    Raises:
        UnsupportedError: ``chunks`` is out of range.
    """
    check_whole("looped-bfs", "chunks", chunks, least=1)
    m, placement = num_microbatches, Placement.interleaved(num_devices, chunks)
    passes = (
        [Pass(Kind.F, stage) for stage in stages for _ in range(m)]
        + [Pass(Kind.B, stage) for stage in reversed(stages) for _ in range(m)]
        for stages in placement.stages
    )
    return in_microbatch_order("looped-bfs", placement, m, passes)


LOOPED_BFS = Family(
    name="looped-bfs",
    build=looped_bfs,
    summary="Chunk by chunk over all microbatches: touches a chunk's weights once per direction, holds what GPipe does.",
    peak=Formula("m/p", lambda p, m, **_: m / p),
    bubble=Formula("(p-1)(F+B)/v", lambda p, v, f, b, **_: (p - 1) * (f + b) / v),
    source="arXiv 2211.05953",
    options={"chunks": "stages per device, v (default 2)"},
)
