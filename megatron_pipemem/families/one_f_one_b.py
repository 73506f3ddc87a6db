"""Build 1F1B and its eager variant: some forwards, then one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Callable

from megatron_pipemem.families.passes import Pass, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.family import PEAK_OF_1F1B, Family, Formula
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


def one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """Build stock Megatron's order: device r runs p-r-1 forwards ahead."""
    return _with_warm_up("1f1b", num_devices, num_microbatches, lambda hops_to_loss: hops_to_loss)


def eager_one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """Run one more forward ahead per hop to the loss, so that messages of both directions hide behind compute."""
    return _with_warm_up("1f1b-eager", num_devices, num_microbatches, lambda hops_to_loss: 2 * hops_to_loss)


def _with_warm_up(name: str, p: int, m: int, forwards_ahead: Callable[[int], int]) -> Schedule:
    def device_passes(device: int) -> list[Pass]:
        warm_up = min(m, forwards_ahead(p - device - 1))
        forward, backward = Pass(Kind.F, device), Pass(Kind.B, device)
        return [forward] * warm_up + [forward, backward] * (m - warm_up) + [backward] * warm_up

    return in_microbatch_order(name, Placement.linear(p), m, map(device_passes, range(p)))


ONE_F_ONE_B = Family(
    name="1f1b",
    build=one_f_one_b,
    summary="Stock Megatron's schedule and the yardstick: its first device peaks at exactly 1.",
    peak=PEAK_OF_1F1B,
    bubble=Formula("(p-1)(F+B)", lambda p, f, b, **_: (p - 1) * (f + b)),
    source="arXiv 2006.09503, section 2.2 (PipeDream-Flush); arXiv 2007.01045 (DAPPLE)",
)
EAGER_ONE_F_ONE_B = Family(
    name="1f1b-eager",
    build=eager_one_f_one_b,
    summary="1F1B with up to twice the forwards ahead, which hides slow links behind compute.",
    peak=Formula("2 - 1/p", lambda p, m, **_: min(2 * p - 1, m) / p),
    bubble=Formula("(p-1)(F+B), less than 1f1b on slow links", lambda p, f, b, **_: (p - 1) * (f + b)),
    source="arXiv 2211.05322, section 4.2",
)
