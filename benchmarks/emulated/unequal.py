"""Plans of steps whose microbatches are not alike, run on sleeping devices beside stock Megatron-Core in arrival order."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any

from lengths import DISTRIBUTIONS, imbalanced, weigh
from rich import box
from rich.console import Console
from rich.table import Table

from emulated.measure import LEGEND, Row, measure
from emulated.runtimes import Step, megatron_steps, our_steps
from megatron_pipemem import Costs, build_schedule
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.search.step_plan import plan_step

PLANNED = ("1f1b", "interleaved", "zb-h1", "zbv")
PLAN_SECONDS = 1.0
"""What plans find in little time is not the question here, and the machine may be busy."""


@dataclass(frozen=True)
class Case:
    """One batch on sleeping devices.

    Args:
        name: of its distribution.
        devices: pipeline ranks.
        microbatches: of the step.
        unit: seconds of F, of I and of W on average each, for a device's whole share.
        repeats: measured steps of every row.
    """

    name: str
    devices: int
    microbatches: int
    unit: float
    repeats: int

    def planned(self, names: Sequence[str], weights: MicrobatchFactors) -> list[tuple[str, Schedule, tuple[int, ...]]]:
        """Plans of the families, and their orders, in the memory of stock 1F1B in arrival order."""
        shape: dict[str, Any] = {"num_devices": self.devices, "num_microbatches": self.microbatches}
        costs = Costs(self.unit, self.unit, self.unit, microbatch=weights)
        cap = MemoryCap(max(peaks(build_schedule("1f1b", **shape), costs)), False)
        plans = [(name, plan_step(build_schedule(name, **shape), costs, cap, PLAN_SECONDS)) for name in names]
        return [(f"plan of {name}", plan.schedule, plan.order) for name, plan in plans]

    def run(self, planned: list[tuple[str, Schedule, tuple[int, ...]]], weights: MicrobatchFactors) -> list[Row]:
        """Run the plans, and stock Megatron-Core in arrival order, with these weights."""
        costs = Costs(self.unit, self.unit, self.unit, microbatch=weights)
        ours = [
            (name, schedule, Costs(self.unit, self.unit, self.unit, microbatch=weights.reordered(order)))
            for name, schedule, order in planned
        ]
        return measure(self.devices, self.repeats, partial(_steps, ours, self.microbatches, costs))


def _steps(ours: list[tuple[str, Schedule, Costs]], microbatches: int, costs: Costs) -> Iterator[Step]:
    yield from megatron_steps(microbatches, costs)
    yield from our_steps(ours)


def run_emulated(arguments: argparse.Namespace) -> list[dict]:
    """Run a batch of every distribution, and one that routing makes uneven, and print a table of each."""
    results = []
    shape = (arguments.devices, arguments.microbatches, arguments.step_ms / 1e3, arguments.repeats)
    for name in arguments.distributions:
        case, lengths = Case(name, *shape), DISTRIBUTIONS[name]
        weights = weigh(lengths.batch(case.microbatches, Random(0), packed=False))
        rows = case.run(case.planned(PLANNED, weights), weights)
        results.append(_told(case, f"{lengths.what}, one document each", rows))
    results.append(_replanned(Case("uneven experts", *shape)))
    return results


def _replanned(case: Case) -> dict:
    """Run microbatches that nobody knows to be unequal, and run them again as their own seconds tell to."""
    weights, known = imbalanced(case.microbatches, Random(0)), MicrobatchFactors((1.0,) * case.microbatches)
    first = case.run(case.planned(["1f1b", "zbv"], known), weights)
    seen = {Kind(kind): weights for kind, weights in first[0].weights.items()}
    measured = MicrobatchFactors(seen[Kind.F], None, seen)
    planned = case.planned(["1f1b", "zbv"], measured)
    plans = [(f"{name}, measured", schedule, order) for name, schedule, order in planned]
    rows = [*first, *case.run(plans, weights)[2:]]
    return _told(
        case, "microbatches made uneven by experts, planned as alike and by the seconds of a step before", rows
    )


def _told(case: Case, title: str, rows: list[Row]) -> dict:
    """Print the rows, and return them as JSON data."""
    console = Console()
    console.print(f"{title}: {case.devices} devices, {case.microbatches} microbatches", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=LEGEND, caption_justify="left")
    for heading in ("way", "peak", "planned", "measured", "ratio", "pass", "speedup"):
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.schedule if row.runtime == "pipemem" else f"{row.runtime} {row.schedule}",
            f"{row.peak:.3f}",
            f"{row.simulated:.3f}",
            f"{row.seconds:.3f}",
            f"{1 + row.off_plan:.3f}",
            f"{row.pass_error:+.2%}",
            f"{rows[0].seconds / row.seconds:.3f}",
        )
    console.print(table)
    return {
        "distribution": case.name,
        "rows": [asdict(row) | {"seconds": row.seconds, "off_plan": row.off_plan} for row in rows],
    }
