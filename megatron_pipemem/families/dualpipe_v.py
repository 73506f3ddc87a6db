"""Cut DualPipe (arXiv 2412.19437, section 3.2.1) in half and fold it onto a V, as DualPipeV of deepseek-ai/DualPipe does.

Its steady state pairs a forward with a backward, which can hide each other's communication.
"""

from __future__ import annotations

from collections import deque

from megatron_pipemem.families.passes import Pass, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


def dualpipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Build DualPipeV's eight steps; backwards are split only where the pipeline fills and drains.

    A forward and the backward it is paired with run one after the other, each handing on its result when it ends. Passes
    beyond the last microbatch are dropped.
    """
    p, n = num_devices, max(2 * num_devices, num_microbatches)
    passes = (_device_passes(device, p, n) for device in range(p))
    return in_microbatch_order("dualpipe-v", Placement.v_shape(p), num_microbatches, passes)


def _device_passes(device: int, p: int, n: int) -> list[Pass]:
    first, second = device, 2 * p - 1 - device
    below = p - 1 - device  # devices between this one and the turn of the V
    f0, f1 = Pass(Kind.F, first), Pass(Kind.F, second)
    b0, b1 = Pass(Kind.B, first), Pass(Kind.B, second)
    waiting: deque[int] = deque()
    passes = [f0] * (2 * below) + [f0, f1] * (device + 1)

    def input_gradient(stage: int) -> None:
        passes.append(Pass(Kind.I, stage))
        waiting.append(stage)

    def weight_gradient() -> None:
        passes.append(Pass(Kind.W, waiting.popleft()))

    for _ in range(below):
        input_gradient(second)
        weight_gradient()
        passes.append(f1)
    passes += [f0, b1, f1, b0] * (n - 2 * p + device + 1)
    passes += [b1, f1, b0] * below
    # The other half of these backwards waits until nothing else can run.
    split_from = device + 1
    for index in range(2 * (device + 1)):
        stage = first if index % 2 else second
        if index >= split_from:
            input_gradient(stage)
        else:
            passes.append(Pass(Kind.B, stage))
    for _ in range(below):
        weight_gradient()
        input_gradient(first)
    while waiting:
        weight_gradient()
    return passes


DUALPIPE_V = Family(
    name="dualpipe-v",
    build=dualpipe_v,
    summary="1F1B's memory and one chunk more; steady pairs of forward and backward on every device.",
    peak=Formula("1 + 1/(2p)", lambda p, m, **_: min(2 * p + 1, 2 * m) / (2 * p)),
    bubble=Formula("(p-1)F/2", lambda p, f, **_: (p - 1) * f / 2),
    source="arXiv 2412.19437, section 3.2.1",
)
