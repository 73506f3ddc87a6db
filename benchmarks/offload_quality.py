"""Compare the memory of pipelines that offload with published numbers, and count the cases of a grid that can be scheduled.

The published numbers are those of PipeOffload (arXiv 2503.01328) and of its scheduler with unit costs. The script prints tables
and writes ``out/benchmarks/offload_quality.json``.

    python benchmarks/offload_quality.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_pipemem.families.offload import uniform_repeating
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.validator import validate_program

# By (p, v), chunks in flight: without offload; PO-H at k = .6, 1.0; PO-F at k = .6, .9, 1.0.
PUBLISHED = {
    (4, 4): (11, (5, 5), (4, 4, 4)),
    (4, 8): (19, (7, 7), (4, 4, 4)),
    (4, 16): (35, (11, 11), (4, 4, 4)),
    (8, 2): (13, (6, 6), (3, 5, 6)),
    (8, 3): (16, (5, 6), (4, 4, 6)),
    (8, 5): (24, (7, 8), (4, 4, 6)),
    (8, 8): (39, (13, 13), (4, 4, 6)),
    (8, 16): (71, (21, 21), (4, 4, 6)),
    (16, 3): (32, (8, 8), (4, 5, 7)),
    (32, 2): (49, (18, 18), (4, 8, 11)),
}
# Chunks of 16 in flight at p=8, v=2, by k: in our prototype and, interleaved at .6 and 1.0, with the published scheduler.
EIGHT_DEVICES = {"v": {0.6: 3, 0.8: 3, 1.0: 4, 1.4: 5}, "interleaved": {0.6: 3, 0.8: 4, 1.0: 4, 1.4: 5}}
PUBLISHED_SCHEDULED = "244 of 690 (even p only; the rest refused or failed)"


CAPTION = (
    "k: seconds of copying activations / of computing them; in flight: most chunks whose activations a device holds; "
    "published: the authors' number of them; target: a prototype's; bubble: of the busiest device, in passes of a chunk"
)


def costs_of(ratio: float) -> Costs:
    return replace(Costs(), channel=Channel(ratio=ratio))


def timeline(schedule: Schedule, ratio: float) -> Timeline:
    return simulate(schedule, costs_of(ratio))


def figures(schedule: Schedule, ratio: float) -> tuple[int, float]:
    """Return the chunks in flight, and the bubble in passes of a chunk."""
    run = timeline(schedule, ratio)
    v = schedule.placement.num_chunks
    return round(run.peak * schedule.num_stages), round((run.makespan - run.ideal) * v, 2)


def in_flight(quick: bool) -> Iterator[dict[str, object]]:
    for (p, v), (without, half, full) in PUBLISHED.items():
        if quick and p * v > 16:
            continue
        m = 4 * p
        base = figures(uniform_repeating(p, m, v), 0.0)
        for name, rows in (
            ("po-h", zip((0.6, 1.0), half, strict=True)),
            ("po-f", zip((0.6, 0.9, 1.0), full, strict=True)),
        ):
            for ratio, published in rows:
                peak, bubble = figures(
                    build_schedule(name, num_devices=p, num_microbatches=m, chunks=v, k=ratio), ratio
                )
                yield {
                    "p": p,
                    "v": v,
                    "schedule": name,
                    "k": ratio,
                    "published": published,
                    "in flight": peak,
                    "published without offload": without,
                    "without offload": base[0],
                    "bubble": bubble,
                    "bubble without offload": base[1],
                    "1F1B's bubble": 3 * v * (p - 1),
                }


def eight_devices(quick: bool) -> Iterator[dict[str, object]]:
    for placement, targets in EIGHT_DEVICES.items():
        for ratio, target in targets.items():
            for name, m in product(("po-f", "v-min") if placement == "v" else ("po-f",), (16,) if quick else (32, 64)):
                if name == "po-f":
                    schedule = build_schedule(
                        name, num_devices=8, num_microbatches=m, chunks=2, k=ratio, placement=placement
                    )
                else:
                    base = build_schedule(name, num_devices=8, num_microbatches=m)
                    schedule = plan_offload(base, costs_of(ratio)).schedule
                peak, bubble = figures(schedule, ratio)
                yield {
                    "schedule": name,
                    "placement": placement,
                    "k": ratio,
                    "m": m,
                    "target": target,
                    "in flight": peak,
                    "met": "yes" if peak <= target else "no",
                    "bubble": bubble,
                }


def feasibility(quick: bool) -> dict[str, object]:
    """Build, lower and validate every case of the grid. Activations that stay on the device do not count as a failure."""
    devices, chunks = (range(2, 4), (2, 3)) if quick else (range(2, 10), (2, 3, 4))
    factors, ratios = ((1, 2), (0.4, 1.6)) if quick else ((1, 2, 4), (0.4, 1.0, 1.6, 2.0, 3.0))
    outcome: Counter[str] = Counter()
    began = time.perf_counter()
    for p, v, factor, ratio in product(devices, chunks, factors, ratios):
        for number in range(v + 1):
            schedule = build_schedule(
                "po-f", num_devices=p, num_microbatches=factor * p, chunks=v, k=ratio, offload_chunks=number
            )
            validate_program(lower(schedule))
            outcome["cases"] += 1
            outcome["with offload"] += schedule.offloads
    return {
        "scheduled": f"{outcome['cases']} of {outcome['cases']}",
        "with offload": outcome["with offload"],
        "published": PUBLISHED_SCHEDULED,
        "seconds": round(time.perf_counter() - began, 1),
    }


def show(console: Console, title: str, rows: list[dict[str, object]]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{value:g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a small part, in seconds")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/offload_quality.json"))
    arguments = parser.parse_args()
    console = Console(width=120)
    tables = {
        "chunks in flight, m=4p, F=I=W": list(in_flight(arguments.quick)),
        "chunks in flight at p=8, v=2 (of 16)": list(eight_devices(arguments.quick)),
        "grid of p, v, m, chunks offloaded, k": [feasibility(arguments.quick)],
    }
    for title, rows in tables.items():
        show(console, title, rows)
    console.print(CAPTION)
    write_whole(arguments.output, json.dumps(tables, indent=1) + "\n")
    console.print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
