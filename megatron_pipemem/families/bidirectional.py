"""Bidirectional families, and DualPipeV: two pipelines in opposite directions over the same devices.

Device ``r`` holds stage ``r`` of one replica and stage ``p - 1 - r`` of the other. So one pipeline computes while the
other one has bubbles at the start and end of a step. The gradients of a stage are summed over both replicas when both
are complete.

DualPipeV is DualPipe (arXiv 2412.19437, section 3.2.1) with one replica, on half as many devices with a V placement, as
in deepseek-ai/DualPipe. In its steady state every forward is followed by a backward, so that each pass can overlap with
the communication of the other.
"""

from __future__ import annotations

from collections import deque
from itertools import product

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.blocks import Pass, in_microbatch_order
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.family import PEAK_OF_1F1B, Formula, built_in
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.units import Units


def dualpipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Build the schedule DualPipeV. Backwards are split only at the start and end of a step.

    A forward and the backward that is paired with it run one after the other. Each sends its result when it ends. The
    order is that of at least ``2p`` microbatches, without the passes of microbatches that do not exist.
    """
    p, n = num_devices, max(2 * num_devices, num_microbatches)
    passes = (_device_passes(device, p, n) for device in range(p))
    return in_microbatch_order("dualpipe-v", Placement.v_shape(p), Units.equal(num_microbatches), passes)


def _device_passes(device: int, p: int, n: int) -> list[Pass]:
    # p = 3, m = 7, device 1 with stages 1 and 4; its steady state is (F1 B4 F4 B1), once per microbatch:
    #   1F0 1F1 | 1F2 4F0 1F3 4F1 | 4I0 4W0 4F2 | 1F4 4B1 4F3 1B0 ... | 4B4 4F6 1B3 | 4B5 1B4 4I6 1I5 | 4W6 1I6 | 1W5 1W6
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
    # The second half of these backwards is split: their W run when nothing else can run.
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


DUALPIPE_V = built_in(
    name="dualpipe-v",
    build=dualpipe_v,
    summary="1F1B's memory and one chunk more; in the steady state every forward is followed by a B.",
    peak=Formula("1 + 1/(2p)", lambda p, m, **_: min(2 * p + 1, 2 * m) / (2 * p)),
    bubble=Formula("(p-1)F/2 if F = I = W", lambda p, f, **_: (p - 1) * f / 2),
    source="arXiv 2412.19437, section 3.2.1",
    placement="v",
    splits_backward=True,
    outclassed_by="zbv is as fast and holds less",
    has_room_for_pairs=True,
)


def chimera(num_devices: int, num_microbatches: int, doubling: bool = False) -> Schedule:
    """Build the schedule Chimera from units of ``p`` microbatches, half of them in each direction.

    Every pass of a unit has a time slot of its own on its device. The next unit starts ``2p`` slots later, in the idle
    slots at the end of the previous unit. A last unit with fewer microbatches leaves slots empty. With ``doubling`` a
    slot has two forwards, so it is as long as a backward. A unit then has ``2p`` microbatches in ``3p`` slots, and
    there is no bubble between units. The number of devices must be even, because otherwise two passes would need the
    same slot.
    """
    # p = 4, m = 4: microbatches 0 and 1 go down the devices on stages 0 to 3, 2 and 3 go up on stages 4 to 7.
    #   device 0: 0F0 0F1 .. 7F2 7B2 7F3 7B3 .. 0B0 0B1
    #   device 3: 4F2 4F3 .. 3F0 3B0 3F1 3B1 .. 4B2 4B3
    p, m = num_devices, num_microbatches
    _check_even("chimera", p)
    if not isinstance(doubling, bool):
        raise UnsupportedError("bad-choice", f"chimera: doubling must be true or false, not {shortened(doubling)}")
    placement = Placement.bidirectional(p)
    forwards = 2 if doubling else 1
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for unit, first in enumerate(range(0, m, forwards * p)):
        size = min(forwards * p, m - first)
        for k in range(size):
            replica, turn = divmod(k, (size + 1) // 2)
            begin = unit * (forwards + 1) * p
            for s in range(p):
                stage = replica * p + s
                rows[placement.devices[stage]] += [
                    (begin + s + 2 * (turn // forwards), Action(Kind.F, stage, first + k)),
                    (begin + 2 * p - 1 - s + 2 * turn, Action(Kind.B, stage, first + k)),
                ]
    return Schedule(
        "chimera", placement, Units.equal(m), tuple(tuple(action for _, action in sorted(row)) for row in rows)
    )


def gems(num_devices: int, num_microbatches: int) -> Schedule:
    """Build the schedule GEMS: one microbatch at a time, forward and backward, in alternating directions."""
    # p = 2, m = 3:
    #   device 0: 0F0 0B0 3F1 3B1 0F2 0B2
    #   device 1: 1F0 1B0 2F1 2B1 1F2 1B2
    p = num_devices

    def order(device: int) -> Order:
        stages = device, 2 * p - 1 - device  # of the replica for even microbatches, and of the one for odd ones
        kinds = product(range(num_microbatches), (Kind.F, Kind.B))
        return tuple(Action(kind, stages[microbatch % 2], microbatch) for microbatch, kind in kinds)

    return Schedule("gems", Placement.bidirectional(p), Units.equal(num_microbatches), tuple(map(order, range(p))))


def dualpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """Build DeepSeek's schedule DualPipe, with half of the microbatches in each direction.

    DeepSeek overlaps a forward of one direction with a backward of the other. Here the two run one after the other,
    and each sends its result when it ends. The schedule needs an even number of devices, and an even number of
    microbatches, at least ``2p``.
    """
    p, m = num_devices, num_microbatches
    _check_even("dualpipe", p)
    if m % 2 or m < 2 * p:
        raise UnsupportedError(
            "needs-microbatches",
            f"dualpipe needs an even number of microbatches, at least 2p = {2 * p}, not {m}; use another number or "
            "'chimera', which takes any",
        )
    # p = 2, m = 4: microbatches 0 and 1 go down on stages 0 and 1, 2 and 3 go up on stages 2 and 3.
    #   device 0: 0F0 3F2 0F1 3B2 3F3 0B0 3B3 0I1 0W1
    #   device 1: 2F2 1F0 2F3 1B0 1F1 2B2 1B1 2I3 2W3
    # Device d and its mirror image act like device d of a V of half as many devices. The V's two chunks become the stage of
    # the direction that begins on d's side, and the stage of the other direction.
    half = dualpipe_v(p // 2, m // 2).orders

    def order(device: int) -> Order:
        mirrored = device >= p // 2
        actions = []
        for kind, stage, microbatch in half[p - 1 - device if mirrored else device]:
            replica = (stage >= p // 2) != mirrored
            actions.append(Action(kind, replica * p + stage, replica * (m // 2) + microbatch))
        return tuple(actions)

    return Schedule("dualpipe", Placement.bidirectional(p), Units.equal(m), tuple(map(order, range(p))))


def _check_even(name: str, p: int) -> None:
    if p % 2:
        raise UnsupportedError(
            "needs-devices",
            f"{name} needs an even number of devices, not {p}, because its two directions mirror each other; use one "
            "device more or fewer, or 'gems'",
        )


_TWO_REPLICAS = "two replicas of the model take more memory than they save"

CHIMERA = built_in(
    name="chimera",
    build=chimera,
    summary="Two pipelines in opposite directions: with few microbatches (m = p) a smaller bubble than 1F1B, for twice the "
    "weights.",
    peak=PEAK_OF_1F1B,
    bubble=Formula(
        "(p-2)(B + (m/p-1)(B-F))", lambda p, m, f, b, **_: None if m % p else (p - 2) * (b + (m / p - 1) * (b - f))
    ),
    source="arXiv 2107.06925, section 3",
    min_devices=2,
    options={
        "doubling": "true: two forwards at a time: twice the memory and, with m a multiple of 2p and B <= 2F, a bubble of "
        "(p/2-1)(F+B) (default false)"
    },
    needs="even p",
    placement="bidirectional",
    outclassed_by=_TWO_REPLICAS,
)
GEMS = built_in(
    name="gems",
    build=gems,
    summary="One microbatch at a time in alternating directions: fewest activations, hardly any overlap.",
    peak=Formula("1/p", lambda p, **_: 1 / p),
    bubble=Formula("(p-1)(F+mB)", lambda p, m, f, b, **_: (p - 1) * (f + m * b)),
    source="GEMS, SC 2020, section III",
    placement="bidirectional",
    outclassed_by=_TWO_REPLICAS,
)
DUALPIPE = built_in(
    name="dualpipe",
    build=dualpipe,
    summary="DeepSeek's bidirectional zero-bubble order, made for overlapping a forward with a backward.",
    peak=Formula("(p+1)/p", lambda p, m, **_: min(p + 1, m) / p),
    bubble=Formula("at most (p/2-1)(F+2B-3W)", lambda p, f, b, w, **_: (p / 2 - 1) * (f + 2 * b - 3 * w), at_most=True),
    source="arXiv 2412.19437, section 3.2.1",
    min_devices=2,
    needs="even p, even m of at least 2p",
    fewest_microbatches=lambda num_devices: 2 * num_devices,
    placement="bidirectional",
    splits_backward=True,
    outclassed_by=_TWO_REPLICAS,
)
