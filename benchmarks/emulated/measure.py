"""Starts the ranks, runs every step on all of them in turn, and puts what they saw together."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fresh_ranks import run_ranks

from emulated.device import sharpen_timer
from emulated.runtimes import Step
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate

Passes = list[tuple[Action, float, float]]


@dataclass(frozen=True)
class Row:
    """What one runtime did with one schedule.

    Args:
        runtime: ``pipemem``, ``torch`` or ``megatron``.
        schedule: in the runtime's own spelling.
        peak: the most activations that autograd kept on any device, in activation units.
        simulated: makespan of its order in seconds, messages free of charge.
        measured: seconds from the first start to the last end of a pass on any device, one per repeat.
        pass_error: by how much a pass took longer than its price, relative, over all passes.
        weights: of F, I and W, how many times the price of a microbatch of weight 1 each microbatch took, in the order in
            which it ran them, over all stages and repeats.
    """

    runtime: str
    schedule: str
    peak: float
    simulated: float
    measured: tuple[float, ...]
    pass_error: float
    weights: dict[str, tuple[float, ...]]

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def off_plan(self) -> float:
        """By how much the run took longer than simulated, relative."""
        return self.seconds / self.simulated - 1


LEGEND = (
    "peak: activation units (1F1B's first rank holds 1); planned, measured: seconds of a step; ratio: measured / planned; "
    "spread: slowest - fastest repeat, as a share of measured; pass: by how much sleeps took longer than asked"
)
"""The meaning of columns that tables of measured rows have."""


def measure(devices: int, repeats: int, prepare: Callable[[], Iterable[Step]]) -> list[Row]:
    """Run everything on fresh ranks.

    Args:
        devices: pipeline ranks.
        repeats: measured steps of every row, after one that warms up.
        prepare: gives the steps, on every rank the same; must be picklable.

    Raises:
        RuntimeError: a runtime left out a pass or did not keep to its order.
    """
    return on_ranks(devices, partial(_measured, repeats, prepare))


def on_ranks(devices: int, work: Callable[[], object]) -> Any:
    """Call ``work``, which must be picklable, on fresh ranks, and return what it returns on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_rank, (devices, work, Path(folder)), devices)
        return torch.load(Path(folder) / "found.pt", weights_only=False)


def _rank(rank: int, devices: int, work: Callable[[], object], folder: Path) -> None:
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sharpen_timer()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=devices)
    result = work()
    if rank == 0:
        torch.save(result, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def _measured(repeats: int, prepare: Callable[[], Iterable[Step]]) -> list[Row] | None:
    """Run everything on this rank; rank 0 returns what all of them saw."""
    steps: list[Step] = []
    for step in prepare():
        # Warms up code and connections; its passes take no time.
        step.device.scale = 0.0
        step.run()
        step.device.scale = 1.0
        steps.append(step)
    ran: list[list[list[tuple[Passes, int]]]] = [[] for _ in steps]
    # Every row once, then every row again: a machine that slows down meanwhile slows all of them.
    for _ in range(repeats):
        for step, seen in zip(steps, ran, strict=True):
            step.device.reset()
            dist.barrier()
            step.run()
            gathered: list[tuple[Passes, int]] = [None] * dist.get_world_size()  # type: ignore[list-item]
            dist.all_gather_object(gathered, (step.device.passes, step.device.peak))
            seen.append(gathered)
    return [_row(step, seen) for step, seen in zip(steps, ran, strict=True)] if dist.get_rank() == 0 else None


def _row(step: Step, repeats: list[list[tuple[Passes, int]]]) -> Row:
    computes = [action for order in step.plan.orders for action in order if action.kind in COMPUTE]
    expected = sum(2 if action.kind is Kind.B else 1 for action in computes)
    makespans, took = [], 0.0
    for ranks in repeats:
        passes = [spans for passes, _ in ranks for spans in passes]
        if len(passes) != expected:
            raise RuntimeError(f"{step.runtime} {step.name} ran {len(passes)} passes of {expected}")
        # torch's runtime leaves the I of the first stage, which nobody waits for, to its W.
        if step.runtime != "torch" or not step.plan.splits_backward:
            check_order(step.plan, [[action for action, _, _ in passes] for passes, _ in ranks])
        makespans.append(max(end for _, _, end in passes) - min(start for _, start, _ in passes))
        took += sum(end - start for _, start, end in passes)
    prices = ActionPrices(step.plan, step.costs)
    priced = sum(prices.of(*action) for action in computes) * len(repeats)
    return Row(
        step.runtime,
        step.name,
        max(peak for ranks in repeats for _, peak in ranks) / step.plan.num_stages,
        simulate(step.plan, step.costs).makespan,
        tuple(makespans),
        took / priced - 1,
        _weights([spans for ranks in repeats for passes, _ in ranks for spans in passes], prices),
    )


def _weights(passes: Passes, prices: ActionPrices) -> dict[str, tuple[float, ...]]:
    """Of F, I and W, the seconds of every microbatch over those of one of weight 1."""
    took: dict[str, dict[int, float]] = {str(kind): {} for kind in (Kind.F, Kind.I, Kind.W)}
    alike: dict[str, dict[int, float]] = {str(kind): {} for kind in (Kind.F, Kind.I, Kind.W)}
    for (kind, stage, microbatch), start, end in passes:
        if kind in took:
            took[kind][microbatch] = took[kind].get(microbatch, 0.0) + end - start
            alike[kind][microbatch] = alike[kind].get(microbatch, 0.0) + prices.of(kind, stage)
    return {kind: tuple(spans[k] / alike[kind][k] for k in sorted(spans)) for kind, spans in took.items()}


def check_order(schedule: Schedule, ran: list[list[Action]]) -> None:
    """Raises RuntimeError when a device did not run the passes of the schedule in its order, a B being I then W."""
    for device, (order, actions) in enumerate(zip(schedule.orders, ran, strict=True)):
        planned = [
            Action(kind, action.stage, action.microbatch)
            for action in order
            if action.kind in COMPUTE
            for kind in ((Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,))
        ]
        begun = list(actions)
        for place in range(len(begun) - 1):  # either pass of a pair may begin first
            window = slice(place, place + 2)
            if begun[place + 1] in schedule.pairs and begun[window] == planned[window][::-1]:
                begun[window] = planned[window]
        if begun != planned:
            raise RuntimeError(f"device {device} did not run {schedule.name} in its order")
