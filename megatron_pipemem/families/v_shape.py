"""Families whose stages go down the devices and back up.

V families have two chunks per device, one with long-lived and one with short-lived activations (arXiv 2405.15362).
``hanayo`` goes up and down several times, in so-called waves (arXiv 2308.15762).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.blocks import SLOTS, Block, Pass, build, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.family import PEAK_OF_PARTS, Formula, built_in
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units

# Slots of a device's work per microbatch: two chunks of F, I and W.
INTERVAL = 6


def zbv(num_devices: int, units: Units) -> Schedule:
    """Build ZBV, whose order is given by a formula for equal F, I and W.

    The order is that of at least ``2p - 1`` microbatches, without the passes of microbatches that do not exist.
    """
    p, least = num_devices, max(2 * num_devices - 1 + units.lead, len(units))
    passes = (_zbv_passes(device, p, least, units.lead) for device in range(p))
    return in_microbatch_order("zbv", Placement.v_shape(p), units, passes)


def v_half(num_devices: int, units: Units) -> Schedule:
    """Build V-Half from its block."""
    return build("v-half", v_half_block(num_devices), units)


def v_half_block(num_devices: int) -> Block:
    """Return V-Half's block: forwards take two slots per device down the V, and one back. Backwards mirror them."""
    # p = 4: the slot and the stage of every pass. The next microbatch follows 6 slots later.
    #   device 0: F0 .. .. .. .. .. .. .. .. .. F7 .. .. .. I7 W7 .. .. .. .. .. .. .. .. .. I0 .. .. .. W0
    #   device 1: .. .. F1 .. .. .. .. .. .. F6 .. .. .. .. .. .. I6 W6 .. .. .. .. .. .. I1 W1 .. .. .. ..
    #   device 2: .. .. .. .. F2 .. .. .. F5 .. .. .. .. .. .. .. .. .. I5 W5 .. .. .. I2 .. .. .. W2 .. ..
    #   device 3: .. .. .. .. .. .. F3 F4 .. .. .. .. .. .. .. .. .. .. .. .. I4 W4 I3 W3 .. .. .. .. .. ..
    p, turn = num_devices, 0 if num_devices % 2 else 3
    slots = ((2 * r, 3 * p - 2 - r, 3 * p - 1 + turn + 2 * r, 6 * p - 2 + turn - r) for r in range(p))
    return _v_block(slots, p)


def v_min(num_devices: int, units: Units) -> Schedule:
    """Build V-Min: every F and I starts right after its input, so that activations live as short as possible.

    If ``p`` is divisible by 3, the first I starts two slots later.
    """
    # p = 4: the slot and the stage of every pass. The next microbatch follows 6 slots later.
    #   device 0: F0 .. .. .. .. .. .. F7 I7 .. W7 .. .. .. .. I0 .. W0
    #   device 1: .. F1 .. .. .. .. F6 .. .. I6 W6 .. .. .. I1 .. .. W1
    #   device 2: .. .. F2 .. .. F5 .. .. .. .. I5 .. W5 I2 .. W2 .. ..
    #   device 3: .. .. .. F3 F4 .. .. .. .. .. .. I4 I3 W4 W3 .. .. ..
    p, turn = num_devices, 0 if num_devices % 3 else 2
    slots = ((r, 2 * p - 1 - r, 2 * p + turn + r, 4 * p - 1 + turn - r) for r in range(p))
    return build("v-min", _v_block(slots, p), units)


def _v_block(slots: Iterable[tuple[int, ...]], p: int) -> Block:
    """Return the block with these four start slots per device, in this order: F down, F up, I up, I down.

    "Down" is the device's stage on the way to the last device, and "up" that on the way back to device 0.
    """
    starts: dict[Pass, int] = {}
    for device, own in enumerate(slots):
        down, up = device, 2 * p - 1 - device
        passes = (Pass(Kind.F, down), Pass(Kind.F, up), Pass(Kind.I, up), Pass(Kind.I, down))
        starts |= dict(zip(passes, own, strict=True))
    return Block.with_weight_gradients(Placement.v_shape(p), INTERVAL, starts)


def _zbv_passes(device: int, p: int, num_units: int, ahead: int) -> list[Pass]:
    """Return ZBV's passes of a device, with ``ahead`` more forwards of both stages before the first backward."""
    r, first, second = device, device, 2 * p - 1 - device
    f0, i0, w0 = (Pass(kind, first) for kind in (Kind.F, Kind.I, Kind.W))
    f1, i1, w1 = (Pass(kind, second) for kind in (Kind.F, Kind.I, Kind.W))
    # p = 4: the warm-up of every device, and the begin of its steady state.
    #   device 0: F0 F0 F0 F0 F0 F0 F0 |                   | F1 I1 W1  F1 I1 W1  F1 I1 W1  F1 I1 W1 | F0 I0 W0 F1 I1 W1 ...
    #   device 1: F0 F0 F0 F0 F0       | F1 F0             | F1 I1 W1  F1 I1 W1  F1 I1 W1           | F0 I0 W0 F1 I1 W1 ...
    #   device 2: F0 F0 F0             | F1 F0 F1 F0       | F1 I1 W1  F1 I1 W1                     | F0 I0 W0 F1 I1 W1 ...
    #   device 3: F0                   | F1 F0 F1 F0 F1 F0 | F1 I1 W1                               | F0 I0 W0 F1 I1 W1 ...
    warm_up = [f0] * (2 * (p - r) - 1) + [f1, f0] * (r + ahead) + [f1, i1, w1] * (p - r)
    # 2p-1-r+ahead of all F0 and p+ahead of all F1 have run.
    round_without_f0 = [i0, w0, f1, i1, w1]
    steady = [f0, *round_without_f0] * (num_units - 2 * p + 1 + r - ahead) + round_without_f0 * (p - 1 - r)
    cool_down = [i0, w0, i1, w1] * ahead + [i0, i1] * r + [i0, w0] * (p - r) + [w1] * r + [w0] * r
    return warm_up + steady + cool_down


def _bubble_of_v_half(p: int, f: float, n: int, **_: float) -> float:
    # Every further part of a microbatch adds memory with which the warm-up runs two slots faster, up to a limit.
    slots = max(3 * p - 2 - 2 * n, 2 * p - 2) if p % 2 else max(3 * p - 5 - 2 * n, 2 * p - 3)
    return slots * f / (2 * n)


def _bubble_of_v_min(p: int, f: float, n: int, **_: float) -> float:
    slots = max(4 * p - 3 - 2 * n, 3 * p - 3) if p % 3 else max(4 * p - 5 - 2 * n, 3 * p - 5)
    return slots * f / (2 * n)


ZBV = built_in(
    name="zbv",
    build=zbv,
    summary="1F1B's memory; if F, I and W are equally long, no bubble between a device's first and last pass.",
    peak=PEAK_OF_PARTS,
    bubble=Formula(
        "(p-1)F/(2n) if F = I = W, all of it outside of a device's first and last pass",
        lambda p, f, n, **_: (p - 1) * f / (2 * n),
    ),
    source="arXiv 2405.15362, section 3; arXiv 2401.10241, section 6",
    in_parts=True,
    placement="v",
    splits_backward=True,
)
V_HALF = built_in(
    name="v-half",
    build=v_half,
    summary="About 1/2 + 1/p of 1F1B's memory, and at most half of its bubble if F, I and W are equally long and m >= p; if "
    "W is short and microbatches are many, a longer bubble than 1F1B's.",
    peak=Formula("(floor((p+2)/2)+n-1)/(pn)", lambda p, m, n, **_: min((p + 2) // 2 + n - 1, m * n) / (p * n)),
    bubble=Formula("if F = I = W: max(3p-5-2n, 2p-3) F/(2n); for odd p max(3p-2-2n, 2p-2) F/(2n)", _bubble_of_v_half),
    source="arXiv 2405.15362, section 3 and appendix",
    in_parts=True,
    placement="v",
    splits_backward=True,
)
V_MIN = built_in(
    name="v-min",
    build=v_min,
    summary="On many devices a third of 1F1B's memory; if F, I and W are unequal, a bubble in every microbatch.",
    peak=Formula("(floor((p+4)/3)+n-1)/(pn)", lambda p, m, n, **_: min((p + 4) // 3 + n - 1, m * n) / (p * n)),
    bubble=Formula(
        "if F = I = W: max(4p-3-2n, 3p-3) F/(2n); for p divisible by 3 max(4p-5-2n, 3p-5) F/(2n)", _bubble_of_v_min
    ),
    source="arXiv 2405.15362, section 3 and appendix",
    in_parts=True,
    placement="v",
    splits_backward=True,
)


# Least numbers of slots that a chunk's forwards wait after those of the previous chunk. The best number gives the lowest
# peak, and of those with an equal peak, the shortest block.
_DELAYS = range(6)


def hanayo(num_devices: int, num_microbatches: int, waves: int | None = None, chunks: int | None = None) -> Schedule:
    """Return a greedy schedule for ``m <= p``, a repeated block for ``m > 3p``, and the faster of both in between.

    The greedy schedule runs backwards first, as in the paper. It holds no more than 1F1B, but its bubble grows with
    the number of microbatches. The bubble of the repeated block does not grow. A block is not used if a device would
    hold more than one microbatch of all its stages in addition to 1F1B. ``waves`` (default 2) is how often the stages
    go up and down the devices, and ``chunks`` is twice that number.
    """
    # p = 2, m = 2, one wave:
    #   device 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    #   device 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    p, m = num_devices, num_microbatches
    if waves is None:
        waves = 2 if chunks is None else _waves(chunks)
    check_whole("hanayo: waves", waves, least=1)
    if chunks not in (None, 2 * waves):
        raise UnsupportedError(
            "conflicting-options",
            f"hanayo: {waves} waves need {2 * waves} chunks, not {shortened(chunks)}; leave waves or chunks out",
        )
    placement = Placement.wave(p, 2 * waves)
    if m <= p:
        return _list_schedule(placement, m)
    block = min((_block(placement, delay) for delay in _DELAYS), key=lambda block: (max(block.peaks()), block.length))
    if max(block.peaks()) > placement.num_stages + 2 * waves:
        return _list_schedule(placement, m)
    repeated = build("hanayo", block, Units.equal(m))
    if m > 3 * p:
        return repeated
    return min(_list_schedule(placement, m), repeated, key=lambda schedule: simulate(schedule).makespan)


def _waves(chunks: int) -> int:
    check_whole("hanayo: chunks", chunks, least=2)
    if chunks % 2:
        raise UnsupportedError("needs-chunks", f"hanayo: chunks must be even, two for each wave, not {chunks}")
    return chunks // 2


def _list_schedule(placement: Placement, num_microbatches: int) -> Schedule:
    """Return the greedy schedule: a free device runs a ready backward, or else a forward, of the oldest microbatch.

    A device holds at most the memory of 1F1B's first device. A forward runs only if there is also room for the same
    microbatch on all later chunks of the device. So the oldest microbatch can always go on, and there is no deadlock.
    """
    from megatron_pipemem.search.improve import dispatch  # only here, because it loads the search
    from megatron_pipemem.search.problem import FORWARD, INPUT, KINDS, WEIGHT, Problem, to_schedule, waits_of

    m, stages = num_microbatches, placement.num_stages
    device = tuple(device for device in placement.devices for _ in KINDS)
    # I stands for the whole backward. Its W takes no time and has priority.
    ticks, change = (SLOTS[Kind.F], SLOTS[Kind.B], 0) * stages, (1, -1, 0) * stages
    waits = waits_of(placement, lambda source, destination: 0)
    problem = Problem(
        Units.equal(m), device, ticks, change, waits, (stages,) * placement.num_devices, frozenset(range(stages))
    )
    rank = {FORWARD: m, INPUT: 0, WEIGHT: -m}
    urgency = [(k + rank[c % 3]) * stages - c // 3 for c in range(len(ticks)) for k in range(m)]
    table = dispatch(problem, urgency)
    assert table is not None, "without caps no pass is blocked"
    return to_schedule("hanayo", placement, problem, table.orders, problem.full_backwards)


def _block(placement: Placement, delay: int) -> Block:
    """Return the block whose passes start in the first slots after their input is ready that ``_Rhythm`` allows.

    Only the first forward of every later chunk waits longer: at least ``delay`` slots after the end of the previous
    chunk's last forward.
    """
    p, chunks = placement.num_devices, placement.num_chunks
    interval = chunks * (SLOTS[Kind.F] + SLOTS[Kind.B])
    rhythms = [_Rhythm(interval, chunks) for _ in range(p)]
    starts: dict[Pass, int] = {}
    clock = -delay
    for stage, device in enumerate(placement.devices):
        clock += delay if stage % p == 0 else 0
        starts[Pass(Kind.F, stage)] = rhythms[device].take(clock, Kind.F)
        clock = starts[Pass(Kind.F, stage)] + SLOTS[Kind.F]
    for stage in reversed(range(placement.num_stages)):
        starts[Pass(Kind.B, stage)] = rhythms[placement.devices[stage]].take(clock, Kind.B)
        clock = starts[Pass(Kind.B, stage)] + SLOTS[Kind.B]
    return Block(placement, interval, starts)


class _Rhythm:
    """The taken slots of one device within an interval. For each remaining B, two adjacent slots stay free."""

    def __init__(self, interval: int, forwards: int) -> None:
        self._interval = interval
        self._taken: set[int] = set()
        self._forwards = forwards  # still to come; each can close one odd gap

    def take(self, earliest: int, kind: Kind) -> int:
        """Take the slots of a pass in every interval, and return the first of them.

        It is the earliest slot from ``earliest`` on that leaves room for the passes still to come.
        """
        self._forwards -= kind is Kind.F
        for start in range(earliest, earliest + self._interval):
            slots = {slot % self._interval for slot in range(start, start + SLOTS[kind])}
            if not slots & self._taken and self._odd_gaps(self._taken | slots) <= self._forwards:
                self._taken |= slots
                return start
        raise AssertionError("even gaps always have room for the remaining passes")

    def _odd_gaps(self, taken: set[int]) -> int:
        ordered = sorted(taken)
        following = [*ordered[1:], ordered[0] + self._interval]
        return sum((after - slot - 1) % 2 for slot, after in zip(ordered, following, strict=True))


HANAYO = built_in(
    name="hanayo",
    build=hanayo,
    summary="Stages go up and down the devices in waves; about 1F1B's memory. For as many microbatches as devices.",
    peak=Formula("up to 1 + 1/p", lambda p, m, **_: min(p + 1, m) / p, at_most=True),
    bubble="m = p: about 4(p-1)(F+B)/(3v)",
    source="arXiv 2308.15762",
    options={
        "waves": "how often the stages go up and down the devices (default 2)",
        "chunks": "stages per device, v: twice the waves (default 4)",
    },
    placement="wave",
)
