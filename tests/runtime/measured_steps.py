"""Measured steps for tests: simulated runs, taken for real ones."""

from __future__ import annotations

from megatron_pipemem.schedule.action import COMPUTE
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.tools.report.measured_step import NANOSECONDS, MeasuredStep


def as_measured(schedule: Schedule, costs: Costs | None = None) -> MeasuredStep:
    """Return a step that ran as it is simulated."""
    timeline = simulate(schedule, costs)
    spans = tuple(
        tuple(
            (round(start * NANOSECONDS), round(end * NANOSECONDS))
            for (start, end), action in zip(spans, order, strict=True)
            if action.kind in COMPUTE
        )
        for spans, order in zip(timeline.spans, schedule.orders, strict=True)
    )
    return MeasuredStep(schedule, spans)
