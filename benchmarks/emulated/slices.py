"""Steps whose sequences are cut into slices, run on sleeping devices beside steps of whole microbatches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from emulated.measure import LEGEND, Row, measure
from emulated.runtimes import Step, megatron_steps, our_steps
from megatron_pipemem import Costs, build_schedule
from megatron_pipemem.features.slices.prices import slice_costs
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks

WHOLE = ("1f1b", "interleaved", "zbv")
SLICED = ("seq1f1b", "interleaved", "zbv", "v-half")

Priced = tuple[str, Schedule, Costs]


@dataclass(frozen=True)
class Case:
    """Steps of one number of microbatches.

    Args:
        devices: pipeline ranks.
        microbatches: of a step, each one sequence.
        counts: of slices, of equally many tokens.
        unit: seconds of F, of I and of W of a whole sequence each, for a device's whole share.
        attention: of F's seconds, the part that is causal attention.
        keys_and_values: of what F keeps, the part that is keys and values.
        repeats: measured steps of every row.
    """

    devices: int
    microbatches: int
    counts: Sequence[int]
    unit: float
    attention: float
    keys_and_values: float
    repeats: int

    def schedules(self) -> Iterator[Priced]:
        """Yield schedules of whole microbatches, and of every number of slices."""
        size: dict[str, Any] = {"num_devices": self.devices, "num_microbatches": self.microbatches}
        costs = Costs(self.unit, self.unit, self.unit)
        for name in WHOLE:
            yield name, build_schedule(name, **size), costs
        for count in self.counts:
            for name in SLICED:
                schedule = build_schedule(name, **size, slices=count)
                equal = (1,) * count
                sliced = slice_costs(costs, schedule.placement, equal, self.attention, self.keys_and_values)
                yield f"{name} / {count}", schedule, sliced

    def run(self) -> list[Row]:
        """Run them, and stock Megatron-Core's functions.

        Raises:
            RuntimeError: a device held more than is simulated.
        """
        schedules = list(self.schedules())
        steps = partial(_steps, schedules, self.microbatches, Costs(self.unit, self.unit, self.unit))
        rows = measure(self.devices, self.repeats, partial(steps, self.keys_and_values))
        for (name, schedule, costs), row in zip(schedules, rows, strict=False):
            if row.peak > (planned := max(peaks(schedule, costs))) * (1 + 1e-9):
                raise RuntimeError(f"{name} held {row.peak:.4f} activation units, and {planned:.4f} are simulated")
        return rows


def _steps(ours: list[Priced], microbatches: int, costs: Costs, keys_and_values: float) -> Iterator[Step]:
    yield from our_steps(ours, keys_and_values)
    yield from megatron_steps(microbatches, costs)


@dataclass(frozen=True)
class Gain:
    """The fastest schedule with some number of slices against one of whole microbatches that holds as much or more.

    Args:
        microbatches: of a step.
        slices: of a microbatch.
        whole: runtime and schedule of whole microbatches.
        sliced: the schedule with slices.
        memory: what it holds over what the other holds.
        simulated: how many times as fast it is by the simulator.
        measured: how many times as fast it was.
    """

    microbatches: int
    slices: int
    whole: str
    sliced: str
    memory: float
    simulated: float
    measured: float


def gains(case: Case, rows: list[Row]) -> list[Gain]:
    """Return one for every row of whole microbatches and number of slices, where some schedule holds no more."""
    gains_of_case = []
    for whole in (row for row in rows if " / " not in row.schedule):
        for count in case.counts:
            smaller = [row for row in rows if row.schedule.endswith(f" / {count}") and row.peak <= whole.peak + 1e-9]
            if not smaller:
                continue
            best = min(smaller, key=lambda row: row.simulated)
            name = whole.schedule if whole.runtime == "pipemem" else f"{whole.runtime} {whole.schedule}"
            times = whole.simulated / best.simulated, whole.seconds / best.seconds
            gains_of_case.append(Gain(case.microbatches, count, name, best.schedule, best.peak / whole.peak, *times))
    return gains_of_case


def run_emulated(arguments: argparse.Namespace) -> list[dict]:
    """Run steps of every number of microbatches, print tables of them, and return all as JSON data."""
    results, console = [], Console(width=120, highlight=False)
    for microbatches in arguments.microbatches:
        case = Case(
            arguments.devices,
            microbatches,
            arguments.slices,
            arguments.step_ms / 1e3,
            arguments.attention_share,
            arguments.keys_share,
            arguments.repeats,
        )
        rows = case.run()
        gains_of_case = gains(case, rows)
        console.print(f"{case.devices} devices, {microbatches} microbatches", style="bold")
        console.print(_rows_table(rows))
        console.print(_gains_table(gains_of_case))
        results.append(
            {
                "microbatches": microbatches,
                "rows": [asdict(row) | {"seconds": row.seconds, "off_plan": row.off_plan} for row in rows],
                "at_equal_memory": [asdict(gain) for gain in gains_of_case],
            }
        )
    return results


def _rows_table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=LEGEND, caption_justify="left")
    for heading in ("runtime", "schedule / slices", "peak", "planned", "measured", "ratio", "pass"):
        left = heading.startswith(("runtime", "schedule"))
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        measured = f"{row.simulated:.3f}", f"{row.seconds:.3f}", f"{1 + row.off_plan:.3f}", f"{row.pass_error:+.2%}"
        table.add_row(row.runtime, row.schedule, f"{row.peak:.3f}", *measured)
    return table


def _gains_table(rows: list[Gain]) -> Table:
    caption = "memory: peak / that of whole microbatches; simulated, measured: times as fast as whole microbatches"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("whole microbatches", "slices", "fastest", "memory", "simulated", "measured"):
        left = heading in ("whole microbatches", "fastest")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for gain in rows:
        times = f"{gain.memory:.2f}", f"{gain.simulated:.3f}", f"{gain.measured:.3f}"
        table.add_row(gain.whole, str(gain.slices), gain.sliced, *times)
    return table
