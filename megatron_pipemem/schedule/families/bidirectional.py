"""Two pipelines in opposite directions over the same devices, each with its own replica of the model.

Device ``r`` holds stage ``r`` of one replica and stage ``p - 1 - r`` of the other, so that one direction computes while
the other fills and drains. The replicas add up the gradients of a stage as soon as both have theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Order, Schedule
from megatron_pipemem.schedule.family import Family, Formula


def chimera(num_devices: int, num_microbatches: int, doubling: bool = False) -> Schedule:
    """Units of ``p`` microbatches, half of them in either direction, on a grid of slots without conflicts.

    The next unit starts ``2p`` slots later, within the gaps at the end of the one before. A last unit with fewer
    microbatches leaves their slots empty.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``.
        doubling: two forwards in a slot, so that it is as long as that of a backward; their backwards take two slots,
            one after the other. A unit is twice as many microbatches in ``3p`` slots, and between units is no bubble.

    Raises:
        UnsupportedError: an odd number of devices, on which the two directions would collide, or ``doubling`` is neither
            true nor false.
    """
    p, m = num_devices, num_microbatches
    _check_even("chimera", p)
    if not isinstance(doubling, bool):
        raise UnsupportedError(f"chimera: doubling must be true or false, not {doubling!r}")
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
    return Schedule("chimera", placement, m, tuple(tuple(action for _, action in sorted(row)) for row in rows))


def gems(num_devices: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time on a device: the next one, in the other direction, goes forward right behind its backward."""
    p = num_devices
    orders = (
        tuple(
            Action(kind, device if microbatch % 2 == 0 else 2 * p - 1 - device, microbatch)
            for microbatch in range(num_microbatches)
            for kind in (Kind.F, Kind.B)
        )
        for device in range(p)
    )
    return Schedule("gems", Placement.bidirectional(p), num_microbatches, tuple(orders))


def dualpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """The eight steps of DeepSeek's schedule; half of the microbatches run in either direction.

    What the source overlaps in one unit, a forward of one direction and a backward of the other, is adjacent here, and
    each of the two passes on its result as soon as it ends.

    Raises:
        UnsupportedError: an odd number of devices or of microbatches, or fewer than ``2p`` microbatches.
    """
    p, m = num_devices, num_microbatches
    _check_even("dualpipe", p)
    if m % 2 or m < 2 * p:
        raise UnsupportedError(
            f"dualpipe needs an even number of microbatches, at least 2p = {2 * p}, not {m}; use another number or "
            "'chimera', which takes any"
        )
    orders = (_named(_dualpipe_steps(p, m, device), p, m, device) for device in range(p))
    return Schedule("dualpipe", Placement.bidirectional(p), m, tuple(orders))


def _dualpipe_steps(p: int, m: int, device: int) -> Iterator[tuple[Kind, int]]:
    """Kind and phase of every action. Phase 0 is the direction whose first stages are on the device's side."""
    h, half = min(device, p - 1 - device), p // 2
    ahead = half - h - 1
    forwards, backwards = ((Kind.F, 0), (Kind.F, 1)), ((Kind.B, 0), (Kind.B, 1))
    inputs, weight = ((Kind.I, 0), (Kind.I, 1)), (Kind.W, -1)
    yield from 2 * ahead * [forwards[0]]
    yield from (h + 1) * forwards
    yield from ahead * [inputs[1], weight, forwards[1]]
    yield from (m // 2 - p + h + 1) * [forwards[0], backwards[1], forwards[1], backwards[0]]
    yield from ahead * [backwards[1], forwards[1], backwards[0]]
    # Half of these split, from the middle of an iteration where their number is odd.
    last = (h + 1) * [1, 0]
    for turn, phase in enumerate(last):
        yield (inputs if turn > h else backwards)[phase]
    yield from ahead * [weight, inputs[0]]
    yield from (h + 1) * [weight]


def _named(steps: Iterator[tuple[Kind, int]], p: int, m: int, device: int) -> Order:
    """The steps with stages and microbatches; weight gradients wait in one queue."""
    stages = (device, 2 * p - 1 - device) if device < p // 2 else (2 * p - 1 - device, device)
    counts = {(kind, phase): stages[phase] // p * (m // 2) for kind in (Kind.F, Kind.I) for phase in (0, 1)}
    waiting: deque[Action] = deque()
    order = []
    for kind, phase in steps:
        if kind is Kind.W:
            order.append(waiting.popleft()._replace(kind=Kind.W))
            continue
        counted = (Kind.F if kind is Kind.F else Kind.I, phase)
        order.append(Action(kind, stages[phase], counts[counted]))
        counts[counted] += 1
        if kind is Kind.I:
            waiting.append(order[-1])
    return tuple(order)


def _check_even(name: str, p: int) -> None:
    if p % 2:
        raise UnsupportedError(
            f"{name} needs an even number of devices, not {p}, because its two directions mirror each other; use one "
            "device more or fewer, or 'gems'"
        )


CHIMERA = Family(
    name="chimera",
    build=chimera,
    summary="Two pipelines in opposite directions: with few microbatches (m = p) a smaller bubble than 1F1B, for twice the "
    "weights.",
    peak=Formula("1", lambda p, m, **_: min(p, m) / p),
    bubble=Formula(
        "(p-2)(B + (m/p-1)(B-F))", lambda p, m, f, b, **_: None if m % p else (p - 2) * (b + (m / p - 1) * (b - f))
    ),
    source="arXiv 2107.06925, section 3",
    min_devices=2,
    options={
        "doubling": "true: forwards in pairs, for a peak of 2 and, with units of 2p and B <= 2F, a bubble of "
        "(p/2-1)(F+B) (default false)"
    },
    needs="even p",
)
GEMS = Family(
    name="gems",
    build=gems,
    summary="One microbatch at a time in alternating directions: fewest activations, hardly any overlap.",
    peak=Formula("1/p", lambda p, **_: 1 / p),
    bubble=Formula("(p-1)(F+mB)", lambda p, m, f, b, **_: (p - 1) * (f + m * b)),
    source="GEMS, SC 2020, section III",
)
DUALPIPE = Family(
    name="dualpipe",
    build=dualpipe,
    summary="DeepSeek's bidirectional zero-bubble order, made for overlapping a forward with a backward.",
    peak=Formula("(p+1)/p", lambda p, m, **_: min(p + 1, m) / p),
    bubble=Formula("at most (p/2-1)(F+2B-3W)", lambda p, f, b, w, **_: (p / 2 - 1) * (f + 2 * b - 3 * w), at_most=True),
    source="arXiv 2412.19437, section 3.2.1",
    min_devices=2,
    needs="even p, even m of at least 2p",
    fewest_microbatches=lambda num_devices: 2 * num_devices,
)
