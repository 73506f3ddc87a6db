"""Build interleaved 1F1B in Megatron's exact order (arXiv 2104.04473, section 2.2), and looped BFS (arXiv 2211.05953)."""

from __future__ import annotations

from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.dependencies import Dependencies
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.families.passes import Pass, in_microbatch_order
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.options import check_whole


def interleaved(num_devices: int, num_microbatches: int, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Build Megatron's order where Megatron allows the arguments, and extend the same rule to every other number of
    microbatches.

    With a ``group_size`` given, the order is Megatron's table to the letter whenever that table can run at all, also
    where Megatron itself refuses to run it because its last group is small.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``; need not be a multiple of anything.
        chunks: stages per device.
        group_size: microbatches that run through one chunk before the next chunk's turn, at least ``p``; default ``p``
            (Megatron's ``microbatch_group_size_per_vp_stage``).

    Raises:
        UnsupportedError: ``chunks`` or ``group_size`` is out of range.
    """
    p, m = num_devices, num_microbatches
    group = p if group_size is None else group_size
    check_whole("interleaved: chunks", chunks, least=1)
    check_whole("interleaved: group_size", group, least=p)
    if group_size is not None:
        exact = _from_visits(p, m, chunks, group, [min(group, m - first) for first in range(0, m, group)])
        if Dependencies.of_schedule(exact).stuck() is None:
            return exact
    # A last group of fewer than p leaves bubbles or deadlocks (Megatron refuses it), so it is laid out for p and loses
    # its surplus passes.
    return _from_visits(p, m, chunks, group, [min(group, max(p, m - first)) for first in range(0, m, group)])


def _from_visits(p: int, m: int, chunks: int, group: int, group_sizes: list[int]) -> Schedule:
    # In which order a device visits its chunks going forward; going backward it visits the mirrored chunks.
    visits = [chunk for size in group_sizes for chunk in range(chunks) for _ in range(size)]

    def device_passes(device: int) -> list[Pass]:
        forwards = [Pass(Kind.F, chunk * p + device) for chunk in visits]
        backwards = [Pass(Kind.B, (chunks - 1 - chunk) * p + device) for chunk in visits]
        warm_up = min(len(visits), 2 * (p - device - 1) + (chunks - 1) * group)
        steady = [each for pair in zip(forwards[warm_up:], backwards, strict=False) for each in pair]
        return forwards[:warm_up] + steady + backwards[len(visits) - warm_up :]

    return in_microbatch_order("interleaved", Placement.interleaved(p, chunks), m, map(device_passes, range(p)))


INTERLEAVED = Family(
    name="interleaved",
    build=interleaved,
    summary="Stock Megatron's virtual pipeline: a smaller bubble for more memory and v times the messages.",
    peak=Formula("1 + (p-1)/(pv)", lambda p, m, v, **_: min(p * v + p - 1, m * v) / (p * v)),
    bubble=Formula("(p-1)(F+B)/v", lambda p, m, v, f, b, **_: None if m % p else (p - 1) * (f + b) / v),
    source="arXiv 2104.04473, section 2.2",
    options={
        "chunks": "stages per device, v (default 2)",
        "group_size": "microbatches through one chunk before the next, at least p (default p)",
    },
)


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
    check_whole("looped-bfs: chunks", chunks, least=1)
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
