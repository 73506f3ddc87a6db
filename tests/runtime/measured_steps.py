"""Measured steps for tests: simulated runs, taken for real ones."""

from __future__ import annotations

from megatron_pipemem.schedule.action import COMPUTE
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
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


SLOW_LAST = (0.01, 0.01, 0.01, 0.02)


def report(**changes) -> dict:
    """What ``--pipemem-report`` wrote of 1F1B on four ranks, the last of them slow."""
    schedule = build_schedule("1f1b", num_devices=4, num_microbatches=8)
    step = as_measured(schedule, Costs(SLOW_LAST, SLOW_LAST, SLOW_LAST))
    last = {
        "schedule": "1f1b",
        "microbatches": 8,
        "orders": schedule.to_csv(),
        "spans": [" ".join(f"{start}-{end}" for start, end in spans) for spans in step.spans],
        "layers": [2] * 4,
        "memory": {"F": [1 << 20] * 4, "B": [-(1 << 20)] * 4},
        "iteration_seconds": step.length_ns / 1e9 + 0.1,
    }
    prices = {name: [1.0] * 4 for name in ("forward", "backward_input", "backward_weight")}
    ranks = [{"measured_bubble_rate": rate} for rate in (0.5, 0.25, None, 0.375)]
    plans = [{"costs": prices, "priced_by": "unit"}]
    return {"plans": plans, "last_step": last | changes, "ranks": ranks, "bytes_of_1f1b": 4 << 20}
