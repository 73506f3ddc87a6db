"""Build 1F1B on slices of sequences instead of whole microbatches (arXiv 2406.03488)."""

from __future__ import annotations

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.family import PEAK_OF_SLICES, Family, Formula
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Schedule


def seq1f1b(num_devices: int, num_microbatches: int, slices: int = 2) -> Schedule:
    """Run forwards slice by slice; backwards begin with the last slice of a microbatch, to which no other attends.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``.
        slices: slices of a microbatch, ``n``; 1 is 1F1B.

    Raises:
        UnsupportedError: ``slices`` is out of range.
    """
    check_whole("seq1f1b: slices", slices, least=1)
    p, n, units = num_devices, slices, num_microbatches * slices

    def order(device: int) -> Order:
        forwards = [Action(Kind.F, device, unit) for unit in range(units)]
        backwards = [Action(Kind.B, device, unit + n - 1 - 2 * (unit % n)) for unit in range(units)]
        warm_up = min(p - device - 2 + n, units)
        steady = [each for pair in zip(forwards[warm_up:], backwards, strict=False) for each in pair]
        return (*forwards[:warm_up], *steady, *backwards[units - warm_up :])

    return Schedule("seq1f1b", Placement.linear(p), num_microbatches, tuple(map(order, range(p))), slices=n)


SEQ1F1B = Family(
    name="seq1f1b",
    build=seq1f1b,
    summary="1F1B on n slices of every sequence: about 1/n of the bubble and of the memory, for causal models.",
    peak=PEAK_OF_SLICES,
    bubble=Formula("(p-1)(F+B)/n", lambda p, n, f, b, **_: (p - 1) * (f + b) / n),
    source="arXiv 2406.03488, section 3.3",
    options={"slices": "slices of a microbatch, n (default 2)"},
)
