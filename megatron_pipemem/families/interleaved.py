"""Build interleaved 1F1B in Megatron's exact order (arXiv 2104.04473, section 2.2), and looped BFS (arXiv 2211.05953)."""

from __future__ import annotations

from megatron_pipemem.families.passes import Pass, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


def interleaved(
    num_devices: int, num_microbatches: int, chunks: int = 2, group_size: int | None = None, slices: int = 1
) -> Schedule:
    """Build Megatron's order where Megatron allows the arguments, and extend the same rule to every other number of
    microbatches, and to their sequence slices.

    With a ``group_size`` given, the order is Megatron's table to the letter whenever that table can run at all, also
    where Megatron itself refuses to run it because its last group is small.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``; need not be a multiple of anything.
        chunks: stages per device.
        group_size: microbatches that run through one chunk before the next chunk's turn, at least ``p``; default ``p``
            (Megatron's ``microbatch_group_size_per_vp_stage``). With slices it counts them; by default a group is then ``p``
            of them if the slices of a microbatch fill groups of ``p``, and else the fewest whole microbatches with ``p``.
        slices: sequence slices of a microbatch.

    Raises:
        UnsupportedError: ``chunks``, ``group_size`` or ``slices`` is out of range.
    """
    check_whole("interleaved: slices", slices, least=1)
    p, units = num_devices, num_microbatches * slices
    # Whose slices lie in more groups than they fill holds the chunks of all of them before its first backward.
    group = (p if slices % p == 0 else _group(p, slices)) if group_size is None else group_size
    check_whole("interleaved: chunks", chunks, least=1)
    check_whole("interleaved: group_size", group, least=p)
    if group_size is not None:
        sizes = [min(group, units - first) for first in range(0, units, group)]
        exact = _from_visits(p, num_microbatches, chunks, group, sizes, slices)
        if Dependencies.of_schedule(exact).stuck() is None:
            return exact
    # A last group of fewer than p leaves bubbles or deadlocks (Megatron refuses it), so it is laid out for p and loses
    # its surplus passes.
    sizes = [min(group, max(p, units - first)) for first in range(0, units, group)]
    return _from_visits(p, num_microbatches, chunks, group, sizes, slices)


def _from_visits(p: int, m: int, chunks: int, group: int, group_sizes: list[int], slices: int) -> Schedule:
    # In which order a device visits its chunks going forward; going backward it visits the mirrored chunks.
    visits = [chunk for size in group_sizes for chunk in range(chunks) for _ in range(size)]
    # How many forwards stand before the last slice's through the last chunk, less the backwards before its own.
    there = [index for index, chunk in enumerate(visits) if chunk == chunks - 1]
    back = [index for index, chunk in enumerate(visits) if chunk == 0]
    waits = [there[k + slices - 1] - back[k] for k in range(0, m * slices, slices)]
    ahead = max((chunks - 1) * group, *waits)

    def device_passes(device: int) -> list[Pass]:
        forwards = [Pass(Kind.F, chunk * p + device) for chunk in visits]
        backwards = [Pass(Kind.B, (chunks - 1 - chunk) * p + device) for chunk in visits]
        warm_up = min(len(visits), 2 * (p - device - 1) + ahead)
        steady = [each for pair in zip(forwards[warm_up:], backwards, strict=False) for each in pair]
        return forwards[:warm_up] + steady + backwards[len(visits) - warm_up :]

    return in_microbatch_order("interleaved", Placement.interleaved(p, chunks), m, map(device_passes, range(p)), slices)


def _group(p: int, n: int) -> int:
    """Return the slices of the fewest microbatches that have ``p``. Those of one that fill several groups of ``p`` wait as
    long as if they were one group.
    """
    return -(-p // n) * n


def _peak(p: int, m: int, v: int, n: int, **_: float) -> float:
    return min(2 * p - 2 + n + (v - 1) * _group(p, n), m * n * v) / (p * v * n)


def _bubble(p: int, m: int, v: int, n: int, f: float, b: float, **_: float) -> float | None:
    return None if m * n % _group(p, n) else (p - 1) * (f + b) / (v * n)


INTERLEAVED = Family(
    name="interleaved",
    build=interleaved,
    summary="Stock Megatron's virtual pipeline: a smaller bubble for more memory and v times the messages.",
    peak=Formula("(2p-2+n+(v-1)g)/(pvn), g = n ceil(p/n)", _peak),
    bubble=Formula("(p-1)(F+B)/(vn)", _bubble),
    source="arXiv 2104.04473, section 2.2",
    options={
        "chunks": "stages per device, v (default 2)",
        "group_size": "microbatches, or slices, through one chunk before the next, at least p (default p)",
        "slices": "sequence slices of a microbatch, n (default 1)",
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
