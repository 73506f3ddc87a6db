"""The V family: two chunks per device, one with long-lived and one with short-lived activations (arXiv 2405.15362)."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_pipemem.families.blocks import Block, Pass, build, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.family import PEAK_OF_SLICES, SLICES, Family, Formula
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule

# Slots of a device's work per microbatch: two chunks of F, I and W.
INTERVAL = 6


def zbv(num_devices: int, num_microbatches: int, slices: int = 1) -> Schedule:
    """Build ZBV, whose order is given by a formula for equal F, I and W.

    The order is that of at least ``2p - 1`` microbatches, without the passes of microbatches that do not exist.
    """
    check_whole("zbv: slices", slices, least=1)
    p, units = num_devices, max(2 * num_devices + slices - 2, num_microbatches * slices)
    passes = (_zbv_passes(device, p, units, slices - 1) for device in range(p))
    return in_microbatch_order("zbv", Placement.v_shape(p), num_microbatches, passes, slices)


def v_half(num_devices: int, num_microbatches: int, slices: int = 1) -> Schedule:
    """Build V-Half: forwards take two slots per device down the V, and one per device back. Backwards mirror them."""
    p, turn = num_devices, 0 if num_devices % 2 else 3
    slots = ((2 * r, 3 * p - 2 - r, 3 * p - 1 + turn + 2 * r, 6 * p - 2 + turn - r) for r in range(p))
    return _repeated("v-half", slots, p, num_microbatches, slices)


def v_min(num_devices: int, num_microbatches: int, slices: int = 1) -> Schedule:
    """Build V-Min: every F and I starts right after its input, so that activations live as short as possible.

    If ``p`` is divisible by 3, the first I starts two slots later.
    """
    p, turn = num_devices, 0 if num_devices % 3 else 2
    slots = ((r, 2 * p - 1 - r, 2 * p + turn + r, 4 * p - 1 + turn - r) for r in range(p))
    return _repeated("v-min", slots, p, num_microbatches, slices)


def _repeated(name: str, slots: Iterable[tuple[int, ...]], p: int, num_microbatches: int, slices: int) -> Schedule:
    """Return the schedule of a block, given four start slots per device in this order: F down, F up, I up, I down.

    "Down" is the device's stage on the way to the last device, and "up" that on the way back to device 0.
    """
    starts: dict[Pass, int] = {}
    for device, own in enumerate(slots):
        down, up = device, 2 * p - 1 - device
        passes = (Pass(Kind.F, down), Pass(Kind.F, up), Pass(Kind.I, up), Pass(Kind.I, down))
        starts |= dict(zip(passes, own, strict=True))
    block = Block.with_weight_gradients(Placement.v_shape(p), INTERVAL, starts)
    return build(name, block, num_microbatches, slices=slices)


def _zbv_passes(device: int, p: int, units: int, ahead: int) -> list[Pass]:
    """Return ZBV's passes of a device, with ``ahead`` more forwards of both stages before the first backward.

    ``units`` is the number of slices of all microbatches.
    """
    r, first, second = device, device, 2 * p - 1 - device
    f0, i0, w0 = (Pass(kind, first) for kind in (Kind.F, Kind.I, Kind.W))
    f1, i1, w1 = (Pass(kind, second) for kind in (Kind.F, Kind.I, Kind.W))
    warm_up = [f0] * (2 * (p - r) - 1) + [f1, f0] * (r + ahead) + [f1, i1, w1] * (p - r)
    # 2p-1-r+ahead of all F0 and p+ahead of all F1 have run.
    round_without_f0 = [i0, w0, f1, i1, w1]
    steady = [f0, *round_without_f0] * (units - 2 * p + 1 + r - ahead) + round_without_f0 * (p - 1 - r)
    cool_down = [i0, w0, i1, w1] * ahead + [i0, i1] * r + [i0, w0] * (p - r) + [w1] * r + [w0] * r
    return warm_up + steady + cool_down


def _bubble_of_v_half(p: int, f: float, n: int, **_: float) -> float:
    # Every further slice adds memory with which the warm-up runs two slots faster, up to a limit.
    slots = max(3 * p - 2 - 2 * n, 2 * p - 2) if p % 2 else max(3 * p - 5 - 2 * n, 2 * p - 3)
    return slots * f / (2 * n)


def _bubble_of_v_min(p: int, f: float, n: int, **_: float) -> float:
    slots = max(4 * p - 3 - 2 * n, 3 * p - 3) if p % 3 else max(4 * p - 5 - 2 * n, 3 * p - 5)
    return slots * f / (2 * n)


ZBV = Family(
    name="zbv",
    build=zbv,
    summary="1F1B's memory and no bubble between a device's first and last pass in unit costs.",
    peak=PEAK_OF_SLICES,
    bubble=Formula("0 per device, (p-1)F/(2n) over all", lambda p, f, n, **_: (p - 1) * f / (2 * n)),
    source="arXiv 2405.15362, section 3; arXiv 2401.10241, section 6",
    options=SLICES,
)
V_HALF = Family(
    name="v-half",
    build=v_half,
    summary="On many devices half of 1F1B's memory and half of its bubble.",
    peak=Formula("(floor((p+2)/2)+n-1)/(pn)", lambda p, m, n, **_: min((p + 2) // 2 + n - 1, m * n) / (p * n)),
    bubble=Formula("max(3p-5-2n, 2p-3)F/(2n), p odd: max(3p-2-2n, 2p-2)F/(2n)", _bubble_of_v_half),
    source="arXiv 2405.15362, section 3 and appendix",
    options=SLICES,
)
V_MIN = Family(
    name="v-min",
    build=v_min,
    summary="On many devices a third of 1F1B's memory; if F, I and W are unequal, a bubble in every microbatch.",
    peak=Formula("(floor((p+4)/3)+n-1)/(pn)", lambda p, m, n, **_: min((p + 4) // 3 + n - 1, m * n) / (p * n)),
    bubble=Formula("max(4p-3-2n, 3p-3)F/(2n), p divisible by 3: max(4p-5-2n, 3p-5)F/(2n)", _bubble_of_v_min),
    source="arXiv 2405.15362, section 3 and appendix",
    options=SLICES,
)
