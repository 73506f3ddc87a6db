"""The family ``hanayo``: stages go up and down the devices several times, in so-called waves (arXiv 2308.15762)."""

from __future__ import annotations

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.blocks import SLOTS, Block, Pass, build
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate

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
    p, m = num_devices, num_microbatches
    if waves is None:
        waves = 2 if chunks is None else _waves(chunks)
    check_whole("hanayo: waves", waves, least=1)
    if chunks not in (None, 2 * waves):
        raise UnsupportedError(
            "conflicting-options",
            f"hanayo: {waves} waves need {2 * waves} chunks, not {chunks!r}; leave waves or chunks out",
        )
    placement = Placement.wave(p, 2 * waves)
    if m <= p:
        return _list_schedule(placement, m)
    block = min((_block(placement, delay) for delay in _DELAYS), key=lambda block: (max(block.peaks()), block.length))
    if max(block.peaks()) > placement.num_stages + 2 * waves:
        return _list_schedule(placement, m)
    repeated = build("hanayo", block, m)
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
    problem = Problem(m, device, ticks, change, waits, (stages,) * placement.num_devices, frozenset(range(stages)))
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


HANAYO = Family(
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
)
