"""What one can do with a large head, on sleeping devices: leave it, move layers away from it, cut it, or interlace it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

from rich import box
from rich.table import Table

from emulated.interlaced import interlaced
from emulated.measure import measure
from emulated.runtimes import our_steps
from megatron_pipemem import Costs, build_schedule
from megatron_pipemem.features.vocabulary.choice import head_on_last_stage, redistribute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM, VocabularyCosts

FAMILIES = ("1f1b", "v-half")
LAYERS_PER_DEVICE = 8
EMBED, EMBED_GRADIENT, LOSS = 0.05, 0.08, 0.02
"""Cost units of EMBED_F, EMBED_B and LOSS, on every device that has them. The rows that cut nothing have no embedding."""


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Args:
        devices: pipeline ranks.
        microbatches: of a step.
        head: the head in devices' shares of the layers.
        unit: seconds of F, I and W each of a device's share of the layers.
        scaling: speed of a shard of the head against linear scaling, per number of barriers.
    """

    devices: int
    microbatches: int
    head: float
    unit: float
    scaling: Mapping[int, float]


def ways(setting: Setting) -> Iterator[tuple[str, str, Schedule, Costs]]:
    """``(family, method, schedule, costs)``, of every family the baseline first."""
    p, unit = setting.devices, setting.unit
    layers = Costs(unit, unit, unit)
    head = 3 * unit * setting.head
    for family in FAMILIES:
        base = build_schedule(family, num_devices=p, num_microbatches=setting.microbatches)
        placement = base.placement
        yield family, "head on the last stage", base, head_on_last_stage(layers, placement, head)
        layout = redistribute(LAYERS_PER_DEVICE * p, placement, LAYERS_PER_DEVICE * setting.head)
        yield family, "layers redistributed", base, head_on_last_stage(layers, placement, head, layout)
        cut = {}
        for algorithm, barriers in BARRIERS_OF_ALGORITHM.items():
            shards = VocabularyCosts.of_head(head, p, barriers, scaling=setting.scaling[barriers])
            ends = {"embed": EMBED * unit, "embed_gradient": EMBED_GRADIENT * unit, "loss": LOSS * unit}
            cut[barriers] = costs = replace(layers, vocabulary=replace(shards, **ends))
            yield family, f"Algorithm {algorithm}", with_vocabulary(base, barriers, costs), costs
        if family == "1f1b":
            yield family, "interlaced", interlaced(p, setting.microbatches), cut[2]


def compare(setting: Setting, repeats: int) -> list[dict]:
    """One row for every way, as JSON data. ``speedup`` is the baseline's seconds of the same family over its own."""
    planned = list(ways(setting))
    steps = [(f"{family}, {method}", schedule, costs) for family, method, schedule, costs in planned]
    rows = measure(setting.devices, repeats, partial(our_steps, steps))
    cases: list[dict] = []
    for (family, method, _, _), row in zip(planned, rows, strict=True):
        if not cases or cases[-1]["family"] != family:
            baseline = row
        names = {
            "head": setting.head,
            "family": family,
            "method": method,
            "seconds": row.seconds,
            "off_plan": row.off_plan,
        }
        speedups = {
            "simulated_speedup": baseline.simulated / row.simulated,
            "measured_speedup": baseline.seconds / row.seconds,
        }
        cases.append(asdict(row) | names | speedups)
    return cases


def drawn(rows: list[dict]) -> Table:
    """Activation units, seconds, measured / simulated, speedups, the spread over the repeats and the passes' own error."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = {
        "shares": lambda row: f"{row['head']:g}",
        "schedule": lambda row: row["family"],
        "head": lambda row: row["method"],
        "peak": lambda row: f"{row['peak']:.3f}",
        "simulated": lambda row: f"{row['simulated']:.3f}",
        "measured": lambda row: f"{row['seconds']:.3f}",
        "ratio": lambda row: f"{1 + row['off_plan']:.3f}",
        "speedup sim.": lambda row: f"{row['simulated_speedup']:.3f}",
        "speedup meas.": lambda row: f"{row['measured_speedup']:.3f}",
        "spread": lambda row: f"{(max(row['measured']) - min(row['measured'])) / row['seconds']:.1%}",
        "pass": lambda row: f"{row['pass_error']:+.2%}",
    }
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("schedule", "head") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(text(row) for text in columns.values()))
    return table
