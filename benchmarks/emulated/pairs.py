"""Steps of layers with experts on devices with two lanes: with pairs, in plain order, and by stock Megatron-Core."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from emulated.measure import Row, measure
from emulated.pair_cases import DELAYED, OVERLAP, Case
from emulated.runtimes import Step
from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import peaks


def run(case: Case) -> list[Row]:
    """Run the schedules, and stock Megatron-Core's 1F1B, interleaved, and the latter with its own pairs.

    Raises:
        RuntimeError: a device did not keep to the order, or held more than is simulated.
    """
    schedules = list(case.schedules())
    stock = {
        "1f1b": build_schedule("1f1b", num_devices=case.devices, num_microbatches=case.microbatches),
        "interleaved": case.chosen("interleaved"),
        **dict.fromkeys((OVERLAP, DELAYED), case.chosen("interleaved", pairs=True)),
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.csv" for number in range(len(schedules))]
        for schedule, file in zip(schedules, files, strict=True):
            write_whole(file, schedule.to_csv())
        rows = measure(case.devices, case.repeats, partial(_steps, case, schedules, files, stock))
    for schedule, row in zip(schedules, rows, strict=False):
        if row.peak > (planned := max(peaks(schedule, case.costs()))) * (1 + 1e-9):
            raise RuntimeError(f"{schedule.name} held {row.peak:.4f} activation units, and {planned:.4f} are simulated")
    return rows


def _steps(case: Case, *others: Any) -> Iterator[Step]:
    from megatron_pipemem.tools.cpu import activate

    activate()
    from emulated.experts import expert_steps

    yield from expert_steps(case, *others)


@dataclass(frozen=True)
class Gain:
    """A schedule with pairs against others: how many times as fast it is, simulated and measured.

    Args:
        schedule: the schedule with pairs.
        peak: its memory, in activation units.
        plain: against the fastest order without pairs in no more memory.
        stock: against the fastest of stock Megatron-Core in no more memory.
        stock_pairs: against stock's interleaved schedule with pairs, whatever it holds.
    """

    schedule: str
    peak: float
    plain: tuple[float, float]
    stock: tuple[float, float]
    stock_pairs: tuple[float, float]


def gains(rows: list[Row]) -> list[Gain]:
    """Return a gain for every schedule of ours with pairs."""
    ours, stock = ([row for row in rows if row.runtime == engine] for engine in ("pipemem", "megatron"))
    plain = [row for row in ours if not row.schedule.endswith("pairs")]
    overlapped = [row for row in stock if row.schedule in (OVERLAP, DELAYED)]

    def against(others: list[Row], row: Row, memory: float) -> tuple[float, float]:
        best = min((other for other in others if other.peak <= memory + 1e-9), key=lambda row: row.seconds)
        return best.simulated / row.simulated, best.seconds / row.seconds

    return [
        Gain(
            row.schedule,
            row.peak,
            against(plain, row, row.peak),
            against(stock, row, row.peak),
            against(overlapped, row, math.inf),
        )
        for row in ours
        if row not in plain
    ]
