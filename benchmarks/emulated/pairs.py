"""Steps of layers with experts on devices with two lanes: with pairs, in plain order, and by stock Megatron-Core."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from emulated.measure import Row, measure
from emulated.runtimes import Step
from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.conflicts import requested
from megatron_pipemem.files import write_whole
from megatron_pipemem.model.model import Execution, Model, Passes
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.planner import prices

CHUNKS = 2
SCHEDULES = ("zbv", "dualpipe-v")
CAPS = (1.25, 1.5)
"""Memory caps of searched orders, in activation units. Stock's interleaved schedule with pairs needs 1.5."""
OVERLAP, DELAYED = "interleaved, pairs", "interleaved, pairs, late W"


@dataclass(frozen=True)
class Block:
    """The seconds of one layer: of attention with the shared expert, of its experts, and of one exchange of tokens.

    A layer exchanges tokens twice in F and twice in I.
    """

    attention: Passes
    experts: Passes
    exchange: float


@dataclass(frozen=True)
class Case:
    """Steps of one model with one share of exchanges.

    Args:
        model: name of the model whose layers are priced.
        share: the part of F and I in which tokens travel. F and I send as many.
        devices: pipeline ranks.
        microbatches: of a step.
        layers: of a chunk.
        unit: seconds of F of a device's whole share.
        repeats: measured steps of every row.
    """

    model: str
    share: float
    devices: int
    microbatches: int
    layers: int
    unit: float
    repeats: int

    def block(self) -> Block:
        """Return the seconds of a layer: computing in the proportions that the planner predicts on an H100."""
        model, cluster = load(self.model, Model), load("h100-80g", Cluster)
        routed = replace(model, shared_expert_ffn=0)
        everything, attention, experts = (
            prices.layer(each, Execution(), cluster, kind).seconds
            for each, kind in ((model, model.main_kind), (model, model.main_kind[0]), (routed, model.main_kind[1]))
        )
        shared = everything + (attention + experts) * -1
        attention += shared
        exchange = self.share / (1 - self.share) * (everything.forward + everything.input) / 4
        scale = self.unit / (CHUNKS * self.layers) / (everything.forward + 2 * exchange)
        return Block(attention * scale, experts * scale, exchange * scale)

    def costs(self) -> Costs:
        """Return the costs of a device's whole share, as a run's costs file has them."""
        block, layers = self.block(), CHUNKS * self.layers
        computing, exchanges = (block.attention + block.experts) * layers, 2 * block.exchange * layers
        return Costs(
            computing.forward + exchanges,
            computing.input + exchanges,
            computing.weight,
            forward_exchange=exchanges,
            backward_exchange=exchanges,
        )

    def schedules(self) -> Iterator[Schedule]:
        """Yield every schedule without and with pairs, and the orders with pairs that a search finds under each cap."""
        for name in SCHEDULES:
            yield self.chosen(name)
            yield replace(self.chosen(name, pairs=True), name=f"{name}, pairs")
        for cap in CAPS:
            yield replace(self.chosen("auto", memory_cap=cap, pairs=True), name=f"auto {cap:g}, pairs")

    def chosen(self, name: str, **settings: Any) -> Schedule:
        """Return the schedule that a run with these settings takes."""
        shape = Shape(self.devices, CHUNKS, self.microbatches)
        return choose(requested(name, **settings), shape, Knowledge(self.costs())).schedule

    def run(self) -> list[Row]:
        """Run the schedules, and stock Megatron-Core's 1F1B, interleaved, and the latter with its own pairs.

        Raises:
            RuntimeError: a device did not keep to the order, or held more than is simulated.
        """
        schedules = list(self.schedules())
        stock = {
            "1f1b": build_schedule("1f1b", num_devices=self.devices, num_microbatches=self.microbatches),
            "interleaved": self.chosen("interleaved"),
            **dict.fromkeys((OVERLAP, DELAYED), self.chosen("interleaved", pairs=True)),
        }
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{number}.csv" for number in range(len(schedules))]
            for schedule, file in zip(schedules, files, strict=True):
                write_whole(file, schedule.to_csv())
            rows = measure(self.devices, self.repeats, partial(_steps, self, schedules, files, stock))
        for schedule, row in zip(schedules, rows, strict=False):
            if row.peak > (planned := max(peaks(schedule, self.costs()))) * (1 + 1e-9):
                raise RuntimeError(
                    f"{schedule.name} held {row.peak:.4f} activation units, and {planned:.4f} are simulated"
                )
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
    ours, stock = ([row for row in rows if row.runtime == each] for each in ("pipemem", "megatron"))
    plain = [row for row in ours if not row.schedule.endswith("pairs")]
    overlapped = [row for row in stock if row.schedule in (OVERLAP, DELAYED)]

    def against(others: list[Row], row: Row, memory: float) -> tuple[float, float]:
        best = min((each for each in others if each.peak <= memory + 1e-9), key=lambda each: each.seconds)
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
