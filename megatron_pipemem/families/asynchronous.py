"""Asynchronous families: pipelines that are never flushed, so that weights change while microbatches are in them.

A schedule of these families shows a part of an endless run. It begins and ends with an empty pipeline, as if training
did. In between, no device waits for the last microbatch of an update. Training differs from synchronous training,
because gradients are computed with older weights.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.one_f_one_b import one_f_one_b
from megatron_pipemem.schedule.family import PEAK_OF_1F1B, Family, Formula
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.schedule import Schedule, WeightUpdates


def pipedream(num_devices: int, num_microbatches: int, vertical_sync: bool = False) -> Schedule:
    """Build 1F1B with an update after every backward. A backward uses the weight version of its own forward.

    With ``vertical_sync`` all stages use the version that the first stage used for the microbatch. So the microbatch
    uses one version of the whole model.
    """
    if not isinstance(vertical_sync, bool):
        raise UnsupportedError("bad-choice", f"pipedream: vertical_sync must be true or false, not {vertical_sync!r}")
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

PIPEDREAM = Family(
    name="pipedream",
    build=pipedream,
    summary="1F1B without flushes, an update after every backward: device r keeps p-r versions of its weights.",
    peak=PEAK_OF_1F1B,
    bubble=_BUBBLE,
    source="arXiv 1806.03377, section 3.3",
    options={"vertical_sync": "true: a microbatch uses one version on all stages (default false)"},
)
PIPEDREAM_2BW = Family(
    name="pipedream-2bw",
    build=pipedream_2bw,
    summary="1F1B without flushes, an update after every group of microbatches: keeps two versions of the weights.",
    peak=PEAK_OF_1F1B,
    bubble=_BUBBLE,
    source="arXiv 2006.09503, section 3.1",
    options={"update_every": "microbatches per update, at least p (default p)"},
)
