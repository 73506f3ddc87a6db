"""Families that interleave several stages per device.

Interleaved 1F1B has Megatron's exact order (arXiv 2104.04473, section 2.2). Looped BFS is from arXiv 2211.05953.
SlimPipe cuts sequences into slices, so that all devices together hold about one microbatch (arXiv 2504.14519). GIS and
GIS-H run groups of microbatches through the chunks, with split backwards (arXiv 2503.01328).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, zip_longest
from math import gcd

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.blocks import Pass, in_microbatch_order
from megatron_pipemem.families.one_f_one_b import seq1f1b
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.family import Family, Formula, built_in
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units


def interleaved(num_devices: int, units: Units, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Build Megatron's interleaved order, also for numbers of microbatches that Megatron refuses, and for parts of them.

    ``group_size`` is Megatron's ``microbatch_group_size_per_vp_stage``: the number of units that run through a chunk
    before the next chunk's turn. It is at least ``p``, and ``p`` by default. If microbatches have a number of parts
    that is not a multiple of ``p``, the default is the smallest group of whole microbatches with at least ``p`` units.

    If ``group_size`` is given, the order is exactly Megatron's whenever it has no deadlock, even if the last group has
    fewer than ``p`` microbatches.
    """
    p, total = num_devices, len(units)
    # A microbatch spread over more groups than it fills would hold all their chunks before its first backward.
    group = (p if units.parts % p == 0 else _group(p, units.parts)) if group_size is None else group_size
    check_whole("interleaved: chunks", chunks, least=1)
    check_whole("interleaved: group_size", group, least=p)
    if group_size is not None:
        sizes = [min(group, total - first) for first in range(0, total, group)]
        exact = _from_visits(p, units, chunks, group, sizes)
        if Dependencies.of_schedule(exact).stuck() is None:
            return exact
    # A last group of fewer than p leaves bubbles or deadlocks (Megatron refuses it). So it is laid out for p and loses its
    # surplus passes.
    sizes = [min(group, max(p, total - first)) for first in range(0, total, group)]
    return _from_visits(p, units, chunks, group, sizes)


def why_megatron_refuses(num_devices: int, num_microbatches: int, group_size: int | None = None) -> str | None:
    """Return the reason why Megatron's interleaved schedule cannot run so many microbatches; ``None`` if it can."""
    p, total = num_devices, num_microbatches
    group = group_size or p
    if not p <= group <= total:
        return (
            f"Megatron's interleaved schedule needs from {p} microbatches, one for each pipeline rank, to the {total} of "
            f"this run in a group, and a group has {group}"
        )
    if 0 < total % group < p:
        return (
            f"{total} microbatches in groups of {group}: the last group has {total % group}, and Megatron's interleaved "
            f"schedule needs at least {p} in it, one for each pipeline rank"
        )
    return None


def _from_visits(p: int, units: Units, chunks: int, group: int, group_sizes: list[int]) -> Schedule:
    # The order in which a device visits its chunks going forward. Going backward it visits the mirrored chunks.
    # p = 2, 2 chunks, groups of 2 microbatches: chunks 0 0 1 1 0 0 1 1, so stages 0 0 2 2 ... of device 0:
    #   0F0 0F1 2F0 2F1 | 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 | 2B2 2B3 0B2 0B3     (warm-up | steady state | cool-down)
    visits = [chunk for size in group_sizes for chunk in range(chunks) for _ in range(size)]
    # The forwards before that of a microbatch's last part on the last chunk, less the backwards before that part's own.
    there = [index for index, chunk in enumerate(visits) if chunk == chunks - 1]
    back = [index for index, chunk in enumerate(visits) if chunk == 0]
    waits = [there[end - 1] - back[units.first(end - 1)] for end in units.ends]
    ahead = max((chunks - 1) * group, *waits)

    def device_passes(device: int) -> list[Pass]:
        of_chunks = [(Pass(Kind.F, stage), Pass(Kind.B, stage)) for stage in range(device, p * chunks, p)]
        forwards = [of_chunks[chunk][0] for chunk in visits]
        backwards = [of_chunks[-1 - chunk][1] for chunk in visits]
        warm_up = min(len(visits), 2 * (p - device - 1) + ahead)
        steady = list(chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False)))
        return forwards[:warm_up] + steady + backwards[len(visits) - warm_up :]

    return in_microbatch_order("interleaved", Placement.interleaved(p, chunks), units, map(device_passes, range(p)))


def _group(p: int, n: int) -> int:
    """Return the number of parts in the smallest group of whole microbatches (``n`` each) with at least ``p``."""
    return -(-p // n) * n


def _peak(p: int, m: int, v: int, n: int, **_: float) -> float:
    return min(2 * p - 2 + n + (v - 1) * _group(p, n), m * n * v) / (p * v * n)


def _bubble(p: int, m: int, v: int, n: int, f: float, b: float, **_: float) -> float | None:
    return None if m * n % _group(p, n) else (p - 1) * (f + b) / (v * n)


INTERLEAVED = built_in(
    name="interleaved",
    build=interleaved,
    summary="Stock Megatron's virtual pipeline: a smaller bubble than 1F1B, more memory and v times the messages.",
    peak=Formula("(2p-2+n+(v-1)g)/(pvn) with g = n ceil(p/n)", _peak),
    bubble=Formula("(p-1)(F+B)/(vn)", _bubble),
    source="arXiv 2104.04473, section 2.2",
    options={
        "chunks": "stages per device, v (default 2)",
        "group_size": "microbatches (or slices) that run through a chunk before the next one, at least p (default p)",
    },
    in_parts=True,
    placement="interleaved",
)


def looped_bfs(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Build the schedule in which every device runs all microbatches through one chunk, then through the next.

    Backwards run in microbatch order, so that gradients accumulate as in 1F1B. With fewer than ``p`` microbatches the
    bubble is longer.
    """
    # p = 2, m = 2, 2 chunks:
    #   device 0: 0F0 0F1 2F0 2F1 | 2B0 2B1 0B0 0B1
    #   device 1: 1F0 1F1 3F0 3F1 | 3B0 3B1 1B0 1B1
    check_whole("looped-bfs: chunks", chunks, least=1)
    m, placement = num_microbatches, Placement.interleaved(num_devices, chunks)
    passes = []
    for stages in placement.stages:
        visits = [stage for stage in stages for _ in range(m)]
        passes.append([Pass(Kind.F, stage) for stage in visits] + [Pass(Kind.B, stage) for stage in reversed(visits)])
    return in_microbatch_order("looped-bfs", placement, Units.equal(m), passes)


LOOPED_BFS = built_in(
    name="looped-bfs",
    build=looped_bfs,
    summary="All microbatches through one chunk, then the next: few uses of a chunk's weights, GPipe's memory.",
    peak=Formula("m/p", lambda p, m, **_: m / p),
    bubble=Formula("(p-1)(F+B)/v", lambda p, v, f, b, **_: (p - 1) * (f + b) / v),
    source="arXiv 2211.05953",
    outclassed_by="interleaved is as fast and holds less",
    options={"chunks": "stages per device, v (default 2)"},
    placement="interleaved",
)


def slimpipe(num_devices: int, num_microbatches: int, chunks: int = 2, slices: int | None = None) -> Schedule:
    """Build interleaved 1F1B of sequence slices: groups of ``p`` slices run through the chunks.

    A device runs the forwards of a whole microbatch before its first backward. At its peak, it holds that microbatch
    on all its stages, and up to ``2 (p - 1)`` further slices of one stage. With one chunk the schedule is
    ``seq1f1b``. The number of slices must be a multiple of ``p``.
    """
    p, n = num_devices, num_devices if slices is None else slices
    check_whole("slimpipe: chunks", chunks, least=1)
    check_whole("slimpipe: slices", n, least=1)
    if n % p:
        raise UnsupportedError(
            "slices-do-not-fit",
            f"slimpipe: slices must be a multiple of the {p} devices, not {n}; give {-(-n // p) * p}, or use 'seq1f1b' "
            "or 'interleaved', which take any number",
        )
    # With one chunk, the warm-up of interleaved 1F1B would be up to p - 1 slices longer than needed.
    units = Units.equal(num_microbatches, n)
    built = seq1f1b(p, units) if chunks == 1 else interleaved(p, units, chunks)
    return replace(built, name="slimpipe")


def _peak_of_slimpipe(p: int, m: int, v: int, n: int, **_: float) -> float:
    on_the_way = p - 1 if v == 1 else 2 * (p - 1)
    return min(n * v + on_the_way, m * n * v) / (p * n * v)


SLIMPIPE = Family(
    name="slimpipe",
    build=slimpipe,
    summary="More slices bring all devices together closer to one microbatch, and shrink the bubble. For causal models.",
    peak=Formula("(1 + 2(p-1)/(vn))/p; for v = 1 (1 + (p-1)/n)/p", _peak_of_slimpipe),
    bubble=Formula("(p-1)(F+B)/(vn)", lambda p, v, n, f, b, **_: (p - 1) * (f + b) / (v * n)),
    source="arXiv 2504.14519",
    outclassed_by="interleaved runs the same slices in the same order",
    options={
        "chunks": "stages per device, v (default 2)",
        "slices": "sequence slices of a microbatch, n, a multiple of p (default p)",
    },
)


# Slots of F, I and W of one chunk.
_SLOTS = 3


def gis(num_devices: int, num_microbatches: int, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Build GIS: by default groups of ``p`` microbatches, 1F1B's memory, and 2/3 of interleaved 1F1B's bubble if F = I = W."""
    return _gis("gis", num_devices, num_microbatches, chunks, num_devices if group_size is None else group_size)


def gis_h(num_devices: int, num_microbatches: int, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Build GIS-H: by default groups of ``p / 2`` microbatches. With many chunks it needs half of ``gis``'s memory."""
    p = num_devices
    return _gis("gis-h", p, num_microbatches, chunks, (p + 1) // 2 if group_size is None else group_size)


def grouped_slots(num_devices: int, chunks: int, group_size: int) -> tuple[list[int], list[int]]:
    """Return two lists of start slots, with one slot per chunk: of F on device 0, and of I on the last device.

    They are those of a group's first microbatch, counted from its first F. F, I and W of a chunk take one slot each.
    """
    p, v, g = num_devices, chunks, group_size
    turns = -(-((p + 1) // 2) // g)
    distinct = v // gcd(v, turns)
    since_first = [_SLOTS * g * (turns * chunk + chunk // distinct) for chunk in range(v)]
    first_backward = since_first[-1] + p
    return since_first, [first_backward + since for since in reversed(since_first)]


def _gis(name: str, p: int, m: int, v: int, group: int) -> Schedule:
    check_whole(f"{name}: chunks", v, least=1)
    check_whole(f"{name}: group_size", group, least=1)
    few, larger = divmod(m, -(-m // group))
    sizes = [few + 1] * larger + [few] * (-(-m // group) - larger)
    # Groups of different sizes keep the rhythm only if each fills half of the pipeline.
    if len(sizes) == 1 or few >= (p + 1) // 2:
        passes = (_balanced(device, p, v, sizes) for device in range(p))
    else:
        passes = (_in_slots(device, p, v, group, m) for device in range(p))
    return in_microbatch_order(name, Placement.interleaved(p, v), Units.equal(m), passes)


def _balanced(device: int, p: int, v: int, sizes: list[int]) -> list[Pass]:
    """Return the passes of a device: first some forwards, then I, W and F in turn.

    ``sizes`` has the number of microbatches of every group. For groups of equal size, each at least half of the devices,
    the order is that of ``_in_slots``.
    """
    # p = 2, 2 chunks, groups of 2 microbatches:
    #   device 0: 0F0 0F1 2F0 2F1 | 2I0 2W0 0F2  2I1 2W1 0F3  0I0 0W0 2F2  0I1 0W1 2F3  2I2 2W2 ...
    #   device 1: 1F0 1F1 3F0     | 3I0 3W0 3F1  3I1 3W1 1F2  1I0 1W0 1F3  1I1 1W1 3F2  3I2 3W2 ...
    visits = [chunk for size in sizes for chunk in range(v) for _ in range(size)]
    of_chunks = [tuple(Pass(kind, stage) for kind in (Kind.F, Kind.I, Kind.W)) for stage in range(device, p * v, p)]
    forwards = [of_chunks[chunk][0] for chunk in visits]
    warm_up = max(sizes) * (v - 1) + p - device
    passes = forwards[:warm_up]
    for chunk, forward in zip_longest(visits, forwards[warm_up:]):
        passes += of_chunks[-1 - chunk][1:]
        if forward is not None:
            passes.append(forward)
    return passes


def _in_slots(device: int, p: int, v: int, group: int, m: int) -> list[Pass]:
    """Return the passes of a device in the order of their slots."""
    # p = 2, 2 chunks, groups of 1 microbatch, m = 2:
    #   device 0: 0F0 2F0 0F1  2I0 2W0 2F1  0I0 0W0  2I1 2W1  0I1 0W1
    #   device 1: 1F0 3F0      3I0 3W0 1F1  1I0 1W0 3F1  3I1 3W1  1I1 1W1
    forward, backward = grouped_slots(p, v, group)
    timetable = []
    for microbatch in range(m):
        begin = _SLOTS * (microbatch // group * group * v + microbatch % group)
        for chunk in range(v):
            stage = chunk * p + device
            timetable.append((begin + forward[chunk] + device, Pass(Kind.F, stage)))
            input_gradient = begin + backward[chunk] + 2 * (p - 1 - device)
            timetable.append((input_gradient, Pass(Kind.I, stage)))
            timetable.append((input_gradient + 1, Pass(Kind.W, stage)))
    return [pass_ for _, pass_ in sorted(timetable)]


def _bubble_of_halves(p: int, m: int, v: int, f: float, i: float, w: float, **_: float) -> float | None:
    return None if m % ((p + 1) // 2) else ((p - 1) * (f + i) + (v - 1) * (p // 2) * (f + i - w)) / v


_GIS_OPTIONS = {"chunks": "stages per device, v (default 2)"}

GIS = built_in(
    name="gis",
    build=gis,
    summary="1F1B's memory; if F, I and W are equally long, two thirds of interleaved 1F1B's bubble.",
    peak=Formula("1", lambda p, m, **_: min(p, m) / p, at_most=True),
    bubble=Formula("(p-1)(F+I)/v", lambda p, m, v, f, i, **_: None if m % p else (p - 1) * (f + i) / v),
    source="arXiv 2503.01328",
    options={
        **_GIS_OPTIONS,
        "group_size": "microbatches through a chunk before the next chunk (default p); fewer hold less and idle more",
    },
    placement="interleaved",
    splits_backward=True,
)
GIS_H = built_in(
    name="gis-h",
    build=gis_h,
    summary="With many chunks half of GIS's memory, and a bubble that grows with the number of chunks.",
    peak=Formula(
        "(p + (v-1) floor((p+1)/2)) / (pv)", lambda p, m, v, **_: min((p + 1) // 2 * (v - 1) + p, m * v) / (p * v)
    ),
    bubble=Formula("(p-1)(F+I)/v + (p/2)(F+I-W)(v-1)/v", _bubble_of_halves),
    source="arXiv 2503.01328",
    options={**_GIS_OPTIONS, "group_size": "microbatches through a chunk before the next chunk (default ceil(p/2))"},
    placement="interleaved",
    splits_backward=True,
)
