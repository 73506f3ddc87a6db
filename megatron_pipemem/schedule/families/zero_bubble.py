"""Build ZB-H1 and ZB-H2: weight gradients fill the bubble of 1F1B (arXiv 2401.10241, section 2)."""

from __future__ import annotations

from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.families.passes import Pass, in_microbatch_order
from megatron_pipemem.schedule.family import PEAK_OF_1F1B, Family, Formula


def zb_h1(num_devices: int, num_microbatches: int) -> Schedule:
    """Keep 1F1B's memory: device r runs p-r forwards ahead and keeps its weight gradients r microbatches behind."""
    p = num_devices
    passes = (_device_passes(r, num_microbatches, forwards_ahead=p - r, delay=r) for r in range(p))
    return in_microbatch_order("zb-h1", Placement.linear(p), num_microbatches, passes)


def zb_h2(num_devices: int, num_microbatches: int) -> Schedule:
    """Take twice 1F1B's memory: no device idles between its first and its last pass in unit costs (m >= 2p-1)."""
    p = num_devices
    passes = (_device_passes(r, num_microbatches, forwards_ahead=2 * (p - r) - 1, delay=2 * r) for r in range(p))
    return in_microbatch_order("zb-h2", Placement.linear(p), num_microbatches, passes)


def _device_passes(device: int, m: int, forwards_ahead: int, delay: int) -> list[Pass]:
    forward, backward, weight = Pass(Kind.F, device), Pass(Kind.I, device), Pass(Kind.W, device)
    passes = [forward] * min(m, forwards_ahead)
    for microbatch in range(m):
        passes.append(backward)
        if microbatch >= delay:
            passes.append(weight)
        if microbatch + forwards_ahead < m:
            passes.append(forward)
    return passes + [weight] * min(m, delay)


ZB_H1 = Family(
    name="zb-h1",
    build=zb_h1,
    summary="1F1B's memory with a third of its bubble: weight gradients wait until nothing else can run.",
    peak=PEAK_OF_1F1B,
    bubble=Formula("(p-1)(F+I-W)", lambda p, f, i, w, **_: (p - 1) * (f + i - w)),
    source="arXiv 2401.10241, section 2.1",
)
ZB_H2 = Family(
    name="zb-h2",
    build=zb_h2,
    summary="Twice 1F1B's memory; devices never idle between their first and last pass, but start one by one.",
    peak=Formula("2 - 1/p", lambda p, m, **_: min(2 * p - 1, m) / p),
    bubble=Formula("(p-1)(F+I-2W) per device, (p-1)F over all", lambda p, f, **_: (p - 1) * f),
    source="arXiv 2401.10241, section 2.2",
)
