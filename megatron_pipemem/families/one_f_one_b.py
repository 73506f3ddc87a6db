"""GPipe and the variants of 1F1B.

GPipe runs all forwards, then all backwards (arXiv 1811.06965, section 2.3). 1F1B runs some forwards, then one forward
and one backward in turn. One variant runs more forwards ahead (eager). One has a V placement with full backwards (arXiv
2405.15362, appendix I). One runs parts of microbatches (arXiv 2406.03488).

The asynchronous variants, PipeDream and PipeDream-2BW, are never flushed: weights change while microbatches are in the
pipeline. Their schedules show a part of an endless run, which begins and ends with an empty pipeline, as if training
did. In between, no device waits for the last microbatch of an update. Training differs from synchronous training,
because gradients are computed with older weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.blocks import Block, Pass, build, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.family import PEAK_OF_1F1B, PEAK_OF_PARTS, Formula, built_in
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule, WeightUpdates
from megatron_pipemem.schedule.units import Units


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """Build GPipe: all forwards, then all backwards, in microbatch order, so that gradients accumulate as in 1F1B."""
    m = num_microbatches
    passes = ([Pass(Kind.F, r)] * m + [Pass(Kind.B, r)] * m for r in range(num_devices))
    return in_microbatch_order("gpipe", Placement.linear(num_devices), Units.equal(m), passes)


GPIPE = built_in(
    name="gpipe",
    build=gpipe,
    summary="All forwards, then all backwards: simple, and holds every microbatch at once.",
    peak=Formula("m/p", lambda p, m, **_: m / p),
    bubble=Formula("(p-1)(F+B)", lambda p, f, b, **_: (p - 1) * (f + b)),
    source="arXiv 1811.06965, section 2.3",
    placement="linear",
    outclassed_by="1f1b is as fast and holds less",
)


def one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """Build stock Megatron's 1F1B: device ``r`` runs ``p - r - 1`` forwards before it alternates with backwards."""
    return _with_warm_up("1f1b", num_devices, Units.equal(num_microbatches), lambda hops_to_loss: hops_to_loss)


def eager_one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """Build 1F1B with ``2 (p - r - 1)`` forwards ahead on device ``r``, so that messages overlap with computing."""
    return _with_warm_up(
        "1f1b-eager", num_devices, Units.equal(num_microbatches), lambda hops_to_loss: 2 * hops_to_loss
    )


def _with_warm_up(name: str, p: int, units: Units, forwards_ahead: Callable[[int], int]) -> Schedule:
    # p = 3, m = 4:
    #   device 0: F0 F1 | F2 B0 F3 B1             | B2 B3     (warm-up | a forward and a backward in turn | cool-down)
    #   device 1: F0    | F1 B0 F2 B1 F3 B2       | B3
    #   device 2:       | F0 B0 F1 B1 F2 B2 F3 B3 |

    def device_passes(device: int) -> list[Pass]:
        warm_up = min(len(units), forwards_ahead(p - device - 1))
        forward, backward = Pass(Kind.F, device), Pass(Kind.B, device)
        return [forward] * warm_up + [forward, backward] * (len(units) - warm_up) + [backward] * warm_up

    return in_microbatch_order(name, Placement.linear(p), units, map(device_passes, range(p)))


ONE_F_ONE_B = built_in(
    name="1f1b",
    build=one_f_one_b,
    summary="Stock Megatron's schedule. The peak of its first device is the unit of memory: exactly 1.",
    peak=PEAK_OF_1F1B,
    bubble=Formula("(p-1)(F+B)", lambda p, f, b, **_: (p - 1) * (f + b)),
    source="arXiv 2006.09503, section 2.2 (PipeDream-Flush); arXiv 2007.01045 (DAPPLE)",
    placement="linear",
)
EAGER_ONE_F_ONE_B = built_in(
    name="1f1b-eager",
    build=eager_one_f_one_b,
    summary="1F1B with up to twice the forwards ahead, so that slow messages overlap with computing.",
    peak=Formula("2 - 1/p", lambda p, m, **_: min(2 * p - 1, m) / p),
    bubble=Formula("(p-1)(F+B), less than 1f1b on slow links", lambda p, f, b, **_: (p - 1) * (f + b)),
    source="arXiv 2211.05322, section 4.2",
    placement="linear",
)


# Slots of a device's work per microbatch: two chunks of F (1) and B (2).
_INTERVAL = 6


def one_f_one_b_v(num_devices: int, units: Units) -> Schedule:
    """Build 1F1B over a V: passes start right after their input, and only every third backward waits for a slot."""
    # p = 4: the slots of every pass, two for each B. The next microbatch follows 6 slots later.
    #   device 0: F0 .. .. .. .. .. .. F7 B7 -- .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. B0 --
    #   device 1: .. F1 .. .. .. .. F6 .. .. .. B6 -- .. .. .. .. .. .. .. .. .. .. .. .. .. B1 -- .. ..
    #   device 2: .. .. F2 .. .. F5 .. .. .. .. .. .. B5 -- .. .. .. .. .. .. B2 -- .. .. .. .. .. .. ..
    #   device 3: .. .. .. F3 F4 .. .. .. .. .. .. .. .. .. .. .. B4 -- B3 -- .. .. .. .. .. .. .. .. ..
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
    block = Block(Placement.v_shape(p), _INTERVAL, starts)
    return build("1f1b-v", block, units, steady=True)


ONE_F_ONE_B_V = built_in(
    name="1f1b-v",
    build=one_f_one_b_v,
    summary="Two thirds of 1F1B's memory on many devices without splitting the backward.",
    peak=Formula("(floor(2p/3)+n)/(pn)", lambda p, m, n, **_: min(2 * p // 3 + n, m * n) / (p * n)),
    bubble=Formula("a little under (p-1)(F+B)/n", lambda p, f, b, n, **_: (p - 1) * (f + b) / n, at_most=True),
    source="arXiv 2405.15362, appendix I",
    in_parts=True,
    placement="v",
)


def seq1f1b(num_devices: int, units: Units) -> Schedule:
    """Build 1F1B of parts of microbatches, which run backward from the last to the first.

    The last part comes first, because no other part attends to its keys and values. With whole microbatches this is
    1F1B.
    """
    return _with_warm_up("seq1f1b", num_devices, units, lambda hops: hops + units.lead)


SEQ1F1B = built_in(
    name="seq1f1b",
    build=seq1f1b,
    summary="1F1B on n slices of every sequence: about 1/n of the bubble and of the memory, for causal models.",
    peak=PEAK_OF_PARTS,
    bubble=Formula("(p-1)(F+B)/n", lambda p, n, f, b, **_: (p - 1) * (f + b) / n),
    source="arXiv 2406.03488, section 3.3",
    placement="linear",
    in_parts=True,
    slices=2,
)


def pipedream(num_devices: int, num_microbatches: int, vertical_sync: bool = False) -> Schedule:
    """Build 1F1B with an update after every backward. A backward uses the weight version of its own forward.

    With ``vertical_sync`` all stages use the version that the first stage used for the microbatch. So the microbatch
    uses one version of the whole model.
    """
    if not isinstance(vertical_sync, bool):
        raise UnsupportedError(
            "bad-choice", f"pipedream: vertical_sync must be true or false, not {shortened(vertical_sync)}"
        )
    delay = num_devices - 1 if vertical_sync else None
    return _updating("pipedream", num_devices, num_microbatches, WeightUpdates(every=1, kept=num_devices, delay=delay))


def pipedream_2bw(num_devices: int, num_microbatches: int, update_every: int | None = None) -> Schedule:
    """Build 1F1B with an update after every ``update_every`` microbatches: ``p`` by default, and never fewer.

    On all stages, such a group uses the weights as they were before the update of the previous group. The last group may
    be smaller.
    """
    every = num_devices if update_every is None else update_every
    check_whole("pipedream-2bw: update_every", every, least=num_devices)
    return _updating("pipedream-2bw", num_devices, num_microbatches, WeightUpdates(every=every, kept=2, delay=1))


def _updating(name: str, p: int, m: int, updates: WeightUpdates) -> Schedule:
    return replace(one_f_one_b(p, m), name=name, updates=updates)


_BUBBLE = Formula("0, after (p-1)(F+B) once", lambda p, f, b, **_: (p - 1) * (f + b))

PIPEDREAM = built_in(
    name="pipedream",
    build=pipedream,
    summary="1F1B without flushes, an update after every backward: device r keeps p-r versions of its weights.",
    peak=PEAK_OF_1F1B,
    bubble=_BUBBLE,
    source="arXiv 1806.03377, section 3.3",
    options={"vertical_sync": "true: a microbatch uses one version on all stages (default false)"},
    placement="linear",
    asynchronous=True,
)
PIPEDREAM_2BW = built_in(
    name="pipedream-2bw",
    build=pipedream_2bw,
    summary="1F1B without flushes, an update after every group of microbatches: keeps two versions of the weights.",
    peak=PEAK_OF_1F1B,
    bubble=_BUBBLE,
    source="arXiv 2006.09503, section 3.1",
    options={"update_every": "microbatches per update, at least p (default p)"},
    placement="linear",
    asynchronous=True,
)
