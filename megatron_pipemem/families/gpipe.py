"""Build GPipe: all forwards, then all backwards (arXiv 1811.06965, section 2.3)."""

from __future__ import annotations

from megatron_pipemem.families.passes import Pass, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """Run all forwards, then all backwards, in ascending order as in 1F1B, so that gradients accumulate in the same
    order.
    """
    m = num_microbatches
    passes = ([Pass(Kind.F, r)] * m + [Pass(Kind.B, r)] * m for r in range(num_devices))
    return in_microbatch_order("gpipe", Placement.linear(num_devices), m, passes)


GPIPE = Family(
    name="gpipe",
    build=gpipe,
    summary="All forwards, then all backwards: simple, and holds every microbatch at once.",
    peak=Formula("m/p", lambda p, m, **_: m / p),
    bubble=Formula("(p-1)(F+B)", lambda p, f, b, **_: (p - 1) * (f + b)),
    source="arXiv 1811.06965, section 2.3",
)
