"""Build 1F1B-V: the V placement with a full backward (arXiv 2405.15362, appendix I)."""

from __future__ import annotations

from megatron_pipemem.families.blocks import Block, build
from megatron_pipemem.families.passes import Pass
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule

# What a device computes for one microbatch, in slots: two chunks of F (1) and B (2).
INTERVAL = 6


def one_f_one_b_v(num_devices: int, num_microbatches: int, slices: int = 1) -> Schedule:
    """Let every pass follow its input at once, but every third backward wait for the slots to come round.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``.
        slices: sequence slices of a microbatch.

    Raises:
        UnsupportedError: ``slices`` is out of range.
    """
    p, stages = num_devices, 2 * num_devices
    starts = {Pass(Kind.F, stage): stage for stage in range(stages)}
    clock = stages + (3 if p % 3 == 0 else 0)
    in_group = -(p + 2) % 3
    for stage in reversed(range(stages)):
        starts[Pass(Kind.B, stage)] = clock
        clock += 2
        in_group += 1
        if in_group == 3:
            in_group = 0
            clock += 3
    block = Block(Placement.v_shape(p), INTERVAL, starts)
    return build("1f1b-v", block, num_microbatches, steady=True, slices=slices)


ONE_F_ONE_B_V = Family(
    name="1f1b-v",
    build=one_f_one_b_v,
    summary="Two thirds of 1F1B's memory on many devices without splitting the backward.",
    peak=Formula("(floor(2p/3)+n)/(pn)", lambda p, m, n, **_: min(2 * p // 3 + n, m * n) / (p * n)),
    bubble=Formula("a little under (p-1)(F+B)/n", lambda p, f, b, n, **_: (p - 1) * (f + b) / n, at_most=True),
    source="arXiv 2405.15362, appendix I",
    options={"slices": "sequence slices of a microbatch, n (default 1)"},
)
