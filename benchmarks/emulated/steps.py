"""Runs consecutive steps on sleeping devices, with and without the barrier between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from emulated.measure import on_ranks
from emulated.runtimes import Step, megatron_steps, our_steps
from megatron_pipemem.features.overlap_steps.orders import validation_cut
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.stream import consecutive_steps

BARRIER, OVERLAPPED, DROPPED = "waits", "none", "all dropped"
"""All ranks wait for the norm behind every step; in the middle of the next one; there, and begin that one again."""
_SETTLING = 1
"""Steps until they repeat."""


@dataclass(frozen=True)
class StepsRow:
    """What came of consecutive steps.

    Args:
        runtime: ``pipemem`` or ``megatron``.
        schedule: in the runtime's own spelling.
        way: how ranks wait for each other.
        planned: seconds from step to step by the simulator, messages and norms free of charge; ``None``: it does not say.
        measured: seconds from step to step, one per repeat.
    """

    runtime: str
    schedule: str
    way: str
    planned: float | None
    measured: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)


def measure_steps(
    devices: int, microbatches: int, costs: Costs, schedules: tuple[str, ...], steps: int, repeats: int
) -> list[StepsRow]:
    """Run steps of every schedule in every way, and of stock Megatron-Core's functions with the barrier.

    Args:
        devices: pipeline ranks.
        microbatches: of one step.
        costs: what passes take, in seconds.
        schedules: families.
        steps: that follow each other.
        repeats: how often all of that is measured.
    """
    return on_ranks(devices, partial(_measured, microbatches, costs, schedules, steps, repeats))


def _measured(
    microbatches: int, costs: Costs, schedules: Iterable[str], count: int, repeats: int
) -> list[StepsRow] | None:
    norms = dist.new_group()
    rows = list(_rows(microbatches, costs, schedules))
    for step, way in rows:
        # Warms up code and connections; its passes take no time.
        step.device.scale = 0.0
        _run(step, way, 2, norms)
        step.device.scale = 1.0
    seen: list[list[float]] = [[] for _ in rows]
    for _ in range(repeats):
        for (step, way), measured in zip(rows, seen, strict=True):
            step.device.reset()
            dist.barrier()
            ends = torch.tensor(_run(step, way, count, norms), dtype=torch.float64)
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
            measured.append(float(ends[-1] - ends[_SETTLING]) / (count - 1 - _SETTLING))
    return [
        StepsRow(step.runtime, step.name, way, _planned(step, way), tuple(measured))
        for (step, way), measured in zip(rows, seen, strict=True)
    ]


def _rows(microbatches: int, costs: Costs, schedules: Iterable[str]) -> Iterator[tuple[Step, str]]:
    size: dict[str, Any] = {"num_devices": dist.get_world_size(), "num_microbatches": microbatches}
    for step in our_steps((name, build_schedule(name, **size), costs) for name in schedules):
        for way in (BARRIER, OVERLAPPED, DROPPED):
            yield step, way
    for step in megatron_steps(microbatches, costs):
        yield step, BARRIER


def _planned(step: Step, way: str) -> float | None:
    steps = consecutive_steps(step.plan, step.costs)
    return {BARRIER: steps.synchronous, OVERLAPPED: steps.period}.get(way)


def _run(step: Step, way: str, count: int, norms: dist.ProcessGroup) -> list[float]:
    """Run steps, and return when this rank ended each of them."""
    cut = None if way == BARRIER else validation_cut(lower(step.plan))
    ends: list[float] = []
    norm: Any = None
    for _ in range(count):
        if norm is None or cut is None or step.executor is None:
            step.run()
        else:
            executor, rank = step.executor(), dist.get_rank()
            executor.run(cut.lengths[rank])
            norm.wait()
            if way == DROPPED:
                executor.drop(cut.drains[rank])
                executor = step.executor()
            executor.run()
        ends.append(time.perf_counter())
        norm = dist.all_reduce(torch.ones(1), group=norms, async_op=True)
        if way == BARRIER:
            norm.wait()
    norm.wait()
    return ends
