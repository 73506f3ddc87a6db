"""Keep round trips that hold somebody up on their device after all.

A plan says when transfers run. Where devices share a channel it serves whoever asks first, and devices that are ahead of the
plan ask earlier than planned: a transfer may then end later than the plan says, and its device waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_pipemem.schedule.core.action import MEMORY
from megatron_pipemem.schedule.features.offload.plan import OffloadPlan
from megatron_pipemem.schedule.features.offload.transfers import CHANNEL_FULL, Key

if TYPE_CHECKING:
    from megatron_pipemem.schedule.features.offload.timetable import Timetable

_AT_ONCE = 1 / 16
_EXACT = 1 + 1e-9


def in_time(plan: OffloadPlan, timetable: Timetable) -> OffloadPlan:
    """Return the plan without round trips that make the step longer than the timetable, or the schedule without
    transfers, is.

    Whatever first runs late does so because its device waits for a transfer: everything else was in time. So the round trips
    go whose transfers are late first, until the step is no longer; at the latest when nothing leaves any more. With a cap,
    as many go as keep it.

    Args:
        plan: of any schedule.
        timetable: when the plan has everything run at the latest.
    """
    latest = max((float(ends[-1]) for ends in timetable.ends if len(ends)), default=0.0)
    allowed = max(latest, plan.base_timeline.makespan) * _EXACT
    best = plan
    while plan.keeps_cap and plan.makespan > allowed:
        late = _late(plan, timetable, allowed * (_EXACT - 1))
        plan = _without(plan, set(late[: max(1, int(len(late) * _AT_ONCE))]))
        if plan.keeps_cap and plan.makespan < best.makespan:
            best = plan
    return best


def _late(plan: OffloadPlan, timetable: Timetable, exact: float) -> list[Key]:
    """Return the round trips that some device has waited for beyond the timetable, the earliest first."""
    late: list[tuple[float, Key]] = []
    for device, (order, spans) in enumerate(zip(plan.schedule.orders, plan.timeline.spans, strict=True)):
        starts, position = timetable.starts[device], 0
        waited = {stall.action for stall in plan.timeline.stalls[device]}
        for action, (_, end) in zip(order, spans, strict=True):
            if action.kind not in MEMORY:
                position += 1
            elif action in waited and position < len(starts) and end > starts[position] + exact:
                late.append((end, (action.stage, action.microbatch)))
    return [key for _, key in sorted(late)]


def _without(plan: OffloadPlan, keys: set[Key]) -> OffloadPlan:
    orders = tuple(
        tuple(a for a in order if a.kind not in MEMORY or (a.stage, a.microbatch) not in keys)
        for order in plan.schedule.orders
    )
    kept = {**plan.kept, **dict.fromkeys(keys, CHANNEL_FULL)}
    return replace(plan, schedule=replace(plan.schedule, orders=orders), kept=kept)
