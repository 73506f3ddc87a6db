"""Activations that wait on the host, as a variant of any schedule (arXiv 2503.01328).

The copies are planned within the memory of each device, the longest-lived activations first. What the host holds is not
limited here.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.planner.activations import moved_bytes
from megatron_pipemem.planner.runs import Run, ScheduleChoice
from megatron_pipemem.planner.search.prices import Pace
from megatron_pipemem.planner.search.step import Step, price
from megatron_pipemem.planner.search.variants import Variant, register_variant
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel
from megatron_pipemem.schedule.offload import plan_offload
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


def _choice(choice: ScheduleChoice) -> ScheduleChoice:
    return replace(choice, offload="auto")


def _prepare(run: Run, placement: Placement, pace: Pace | None) -> Step:
    step = price(run, placement, pace=pace)
    host, sharing = run.cluster.host, run.cluster.sharing(0)
    per_layer = moved_bytes(run.model, run.execution)
    moved = tuple(per_layer * count for count in step.layers)
    # Devices that share a switch take turns, so that one sends while another receives.
    channel = Channel(
        offload=tuple(nbytes / (host.d2h_gb_per_s * host.duplex * 1e9) for nbytes in moved),
        reload=tuple(nbytes / (host.h2d_gb_per_s * host.duplex * 1e9) for nbytes in moved),
        duplex=sharing == 1,
    )
    away = {Kind.WAIT_OFFLOAD: tuple(-nbytes for nbytes in moved), Kind.RELOAD: moved}
    costs = replace(step.costs, channel=channel, memory={**(step.costs.memory or {}), **away})
    return replace(step, costs=costs)


def _apply(schedule: Schedule, step: Step, room: tuple[float, ...]) -> Schedule:
    return plan_offload(schedule, step.costs, memory_cap=room).schedule


register_variant(Variant("offload", choice=_choice, prepare=_prepare, apply=_apply))
