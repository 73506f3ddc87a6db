"""Interleave in groups with a split backward: GIS, GIS-H and everything between (arXiv 2503.01328)."""

from __future__ import annotations

from itertools import zip_longest
from math import gcd

from megatron_pipemem.families.passes import Pass, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule

# F, I and W of one chunk.
_SLOTS = 3


def gis(num_devices: int, num_microbatches: int, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Run groups of ``p`` microbatches: 1F1B's memory with two thirds of interleaved 1F1B's bubble.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``; need not be a multiple of anything.
        chunks: stages per device.
        group_size: microbatches that run through one chunk before the next chunk's turn; default ``p``.

    Raises:
        UnsupportedError: ``chunks`` or ``group_size`` is out of range.
    """
    return _gis("gis", num_devices, num_microbatches, chunks, num_devices if group_size is None else group_size)


def gis_h(num_devices: int, num_microbatches: int, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Run groups of half as many microbatches as devices: towards half of the memory, the more chunks there are.

    Args:
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        chunks: stages per device.
        group_size: microbatches of a group; ``ceil(p/2)`` by default.
    """
    p = num_devices
    return _gis("gis-h", p, num_microbatches, chunks, (p + 1) // 2 if group_size is None else group_size)


def grouped_slots(num_devices: int, chunks: int, group_size: int) -> tuple[list[int], list[int]]:
    """Return when the first microbatch of a group starts: the slots of its F on device 0 and of its I on the last, by
    chunk.

    Args:
        num_devices: pipeline ranks.
        chunks: stages per device.
        group_size: microbatches of a group.
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
    # Groups of different sizes keep the rhythm only while each fills half of the pipeline.
    if len(sizes) == 1 or few >= (p + 1) // 2:
        passes = (_balanced(device, p, v, sizes) for device in range(p))
    else:
        passes = (_in_slots(device, p, v, group, m) for device in range(p))
    return in_microbatch_order(name, Placement.interleaved(p, v), m, passes)


def _balanced(device: int, p: int, v: int, sizes: list[int]) -> list[Pass]:
    """Run forwards ahead, then I, W and F in turn, which is the order of the slots for groups of one size."""
    visits = [chunk for size in sizes for chunk in range(v) for _ in range(size)]
    forwards = [Pass(Kind.F, chunk * p + device) for chunk in visits]
    warm_up = max(sizes) * (v - 1) + p - device
    passes = forwards[:warm_up]
    for chunk, forward in zip_longest(visits, forwards[warm_up:]):
        stage = (v - 1 - chunk) * p + device
        passes += [Pass(Kind.I, stage), Pass(Kind.W, stage)]
        if forward is not None:
            passes.append(forward)
    return passes


def _in_slots(device: int, p: int, v: int, group: int, m: int) -> list[Pass]:
    """Build full groups and, at the end, what is left of one: without some of its microbatches an order stays valid."""
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
    return [each for _, each in sorted(timetable)]


def _bubble_of_halves(p: int, m: int, v: int, f: float, i: float, w: float, **_: float) -> float | None:
    return None if m % ((p + 1) // 2) else ((p - 1) * (f + i) + (v - 1) * (p // 2) * (f + i - w)) / v


_OPTIONS = {"chunks": "stages per device, v (default 2)"}

GIS = Family(
    name="gis",
    build=gis,
    summary="Interleaved 1F1B within 1F1B's memory and with two thirds of its own bubble.",
    peak=Formula("1", lambda p, m, **_: min(p, m) / p, at_most=True),
    bubble=Formula("(p-1)(F+I)/v", lambda p, m, v, f, i, **_: None if m % p else (p - 1) * (f + i) / v),
    source="arXiv 2503.01328",
    options={
        **_OPTIONS,
        "group_size": "microbatches through one chunk before the next (default p); fewer hold less and idle longer",
    },
)
GIS_H = Family(
    name="gis-h",
    build=gis_h,
    summary="Half of GIS's memory with many chunks, for a bubble that grows with them.",
    peak=Formula("(floor((p+1)/2)(v-1)+p)/(pv)", lambda p, m, v, **_: min((p + 1) // 2 * (v - 1) + p, m * v) / (p * v)),
    bubble=Formula("((p-1)(F+I) + (v-1)p/2(F+I-W))/v", _bubble_of_halves),
    source="arXiv 2503.01328",
    options={**_OPTIONS, "group_size": "microbatches through one chunk before the next (default ceil(p/2))"},
)
