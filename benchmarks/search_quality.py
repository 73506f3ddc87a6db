"""Measure searched schedules against the certified bound, against every family, and with wrong costs.

Claim: at every memory cap the search is at least as fast as any family in the same memory. It meets the lower bound if
costs are equal, and stays close to it otherwise, in seconds on one core.

    python benchmarks/search_quality.py            # minutes
    python benchmarks/search_quality.py --quick    # the named cases only
    python benchmarks/search_quality.py --grid 4   # four random cases per cap, and their distance to the bound
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_pipemem import Costs, search_schedule, simulate
from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.search import MAX_CHUNKS

CAPS = (0.5, 0.625, 0.75, 1.0)
EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (1.0, 1.5, 0.5)
NAMED = [
    *((p, factor * p, EQUAL, 0.0) for p in (4, 8, 16) for factor in (3, 8)),
    (8, 24, UNEQUAL, 0.0),
    (8, 64, UNEQUAL, 0.0),
    (16, 64, UNEQUAL, 0.0),
    (8, 24, EQUAL, 0.05),
    (8, 24, UNEQUAL, 0.05),
]
"""Devices, microbatches, F:I:W of a device's share, seconds of a message."""
EXTREME = [(1.9, 0.6, 0.5), (0.5, 1.7, 0.6), (2.0, 0.4, 0.4), (0.4, 2.0, 0.4), (0.4, 0.4, 2.0)]
"""F:I:W with one that takes most of the time. These are the hardest to schedule without gaps."""
GRID_CAPS = (0.4, 0.5, 0.55, 0.625, 0.75, 0.875, 1.0, 1.25)
GRID_RATIOS = (EQUAL, (1.0, 1.2, 0.8), UNEQUAL, (1.0, 1.5, 1.0), (1.0, 1.7, 0.9), (1.0, 2.0, 1.0))


CAPTION = (
    "p, m: devices, microbatches; c: time of a message; cap: memory, 1 is 1F1B's peak; found: bubble of the found order; "
    "bound: no order of a searched placement idles less; gap: found - bound; to V's: found - the bound of a V with 2 chunks; "
    "best family: the fastest in the cap, with its bubble; s: of searching"
)


@dataclass(frozen=True)
class Row:
    """One search. Rates are the idle parts of the makespan on the busiest device."""

    devices: int
    microbatches: int
    costs: tuple[float, float, float]
    p2p: float
    cap: float
    max_chunks: int  # per device, for searches and families
    bubble: float
    bound: float  # no schedule of a searched placement idles less
    v_bound: float  # no schedule of a V with two chunks idles less
    family: str | None  # the fastest family within the cap; ``None`` if none fits
    family_bubble: float | None
    placement: str
    chunks: int  # of the best schedule found
    found_by: str
    seconds: float

    @property
    def gap(self) -> float:
        return self.bubble - self.bound

    @property
    def makespan_gap(self) -> float:
        """Makespan over its lower bound, less 1."""
        return (1 - self.bound) / (1 - self.bubble) - 1

    @property
    def v_gap(self) -> float:
        """Distance to the bound of a V with two chunks; negative if the search is better than any such schedule."""
        return self.bubble - self.v_bound


@dataclass(frozen=True)
class WrongCosts:
    """The loss from planning with wrong costs: makespans with the true costs, relative to a search that knew them."""

    cap: float
    planned_for_wrong: float
    planned_for_equal: float
    family: float


def measure(
    p: int,
    m: int,
    ratio: tuple[float, float, float],
    costs: Costs,
    cap: float,
    max_chunks: int = 2,
    placements: Sequence[Placement] | None = None,
    seconds: float = 60,
    beside_families: bool = True,
) -> Row:
    """Search once, and compare with the fastest family of the same placements. ``ratio`` names the costs in the table."""
    result = search_schedule(
        num_devices=p,
        num_microbatches=m,
        costs=costs,
        memory_cap=cap,
        max_chunks=max_chunks,
        placements=placements,
        seconds=seconds,
    )
    ideal = simulate(result.schedule, costs).ideal
    fitting = fitting_families(p, m, costs, cap, max_chunks, placements) if beside_families else ()
    best = min(((simulate(schedule, costs).makespan, schedule.name) for schedule in fitting), default=None)
    return Row(
        p, m, ratio, costs.link_seconds(0, 1), cap, max_chunks,
        1 - ideal / result.makespan,
        1 - ideal / result.lower_bound,
        1 - ideal / lower_bound(Placement.v_shape(p), m, costs, cap),
        None if best is None else best[1],
        None if best is None else 1 - ideal / best[0],
        result.schedule.placement.name,
        result.schedule.placement.num_chunks,
        result.best.found_by,
        result.seconds,
    )  # fmt: skip


def fitting_families(
    p: int, m: int, costs: Costs, cap: float, max_chunks: int, placements: Sequence[Placement] | None = None
) -> Iterator[Schedule]:
    """Yield the families within the cap, of the given placements or of all with so many chunks per device."""
    for schedule in synchronous_schedules(p, m, costs, max_chunks):
        considered = placements is None or schedule.placement in placements
        if considered and simulate(schedule).peak <= cap + 1e-9:
            yield schedule


def unequal_costs(p: int, ratio: Sequence[float], rng: random.Random, p2p: float) -> Costs:
    """Return costs of a V with every pass of every stage off by up to a fifth."""
    forward, inputs, weights = [tuple(part / 2 * rng.uniform(0.8, 1.2) for _ in range(2 * p)) for part in ratio]
    return Costs(forward, inputs, weights, p2p)


def with_wrong_costs(p: int, m: int, cap: float, rng: random.Random) -> WrongCosts:
    """Plan with costs that are each off by up to 20 %, and run with the true costs."""
    ratio = tuple(rng.uniform(0.4, 2) for _ in range(3))
    forward, inputs, weights = ((part / 2,) * (2 * p) for part in ratio)
    true = Costs(forward, inputs, weights)
    guessed = unequal_costs(p, ratio, rng, 0.0)
    search = partial(
        search_schedule, num_devices=p, num_microbatches=m, memory_cap=cap, placements=[Placement.v_shape(p)]
    )
    known = search(costs=true).makespan
    fitting = fitting_families(p, m, true, cap, 2, [Placement.v_shape(p)])
    return WrongCosts(
        cap,
        simulate(search(costs=guessed).schedule, true).makespan / known,
        simulate(search().schedule, true).makespan / known,
        min(simulate(schedule, true).makespan for schedule in fitting) / known,
    )


def table(rows: Sequence[Row]) -> Table:
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=CAPTION, caption_justify="left")
    headings = "p, m|F:I:W|c|cap|chunks|found|bound|gap|to V's|best family|placement|found by|s".split("|")
    for heading in headings:
        left = heading in ("p, m", "F:I:W", "best family", "placement", "found by")
        result.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        result.add_row(
            f"{row.devices}, {row.microbatches}",
            ":".join(f"{part:.3g}" for part in row.costs),
            f"{row.p2p:g}",
            f"{row.cap:g}",
            f"{row.chunks} of {row.max_chunks}",
            f"{row.bubble:.4f}",
            f"{row.bound:.4f}",
            "optimal" if row.gap < 1e-6 else f"{row.gap:.4f}",
            f"{row.v_gap:+.4f}",
            "-" if row.family is None else f"{row.family_bubble:.4f} {row.family}",
            row.placement,
            row.found_by,
            f"{row.seconds:.1f}",
        )
    return result


def summary(rows: Sequence[Row]) -> dict[str, float]:
    gaps = sorted(row.gap for row in rows)
    return {
        "searches": len(rows),
        "optimal": sum(gap < 1e-6 for gap in gaps),
        "within_one_point": sum(gap <= 0.01 for gap in gaps),
        "mean_gap": sum(gaps) / len(gaps),
        "worst_gap": gaps[-1],
        "within_one_point_of_v_bound": sum(row.v_gap <= 0.01 for row in rows),
        "worst_gap_to_v_bound": max(row.v_gap for row in rows),
        "worse_than_a_family": sum(r.family_bubble is not None and r.bubble > r.family_bubble + 1e-9 for r in rows),
        "mean_seconds": sum(row.seconds for row in rows) / len(rows),
        "worst_seconds": max(row.seconds for row in rows),
    }


def random_searches(count: int, rng: random.Random) -> dict[str, list[Row]]:
    """Search for so many random costs, by the kind of randomness, and for extreme costs."""
    groups: dict[str, list[Row]] = {"any costs": [], "any costs, more chunks": [], "unequal stages": [], "messages": []}
    groups["extreme costs, more chunks"] = [
        measure(8, 24, ratio, Costs(*ratio), cap, MAX_CHUNKS)
        for ratio in track(EXTREME, "extreme costs", transient=True)
        for cap in (0.625, 0.75)
    ]
    for _ in track(range(count), "random inputs", transient=True):
        f, i, w = ratio = (round(rng.uniform(0.4, 2), 2), round(rng.uniform(0.4, 2), 2), round(rng.uniform(0.4, 2), 2))
        p2p = round(rng.uniform(0, 0.2) * ratio[0] / 2, 3)
        for cap in (0.625, 0.75):
            groups["any costs"].append(measure(8, 24, ratio, Costs(f, i, w), cap))
            groups["any costs, more chunks"].append(measure(8, 24, ratio, Costs(f, i, w), cap, MAX_CHUNKS))
            costs = unequal_costs(8, ratio, rng, 0.0)
            groups["unequal stages"].append(measure(8, 24, ratio, costs, cap, placements=[Placement.v_shape(8)]))
            groups["messages"].append(measure(8, 24, ratio, Costs(f, i, w, p2p), cap))
    return groups


def grid_searches(count: int, rng: random.Random) -> Iterator[tuple[float, list[Row]]]:
    """Yield each cap of the grid with the searches of so many random cases."""
    for cap in track(GRID_CAPS, "grid", transient=True):
        rows = []
        for _ in range(count):
            p, ratio, chunks = rng.choice((4, 6, 8, 12, 16)), rng.choice(GRID_RATIOS), rng.choice((2, 4, 8))
            costs = Costs(*ratio, p2p=round(rng.uniform(0, 0.2), 2))
            size = p, p * rng.choice((2, 3, 4))
            rows.append(measure(*size, ratio, costs, cap, chunks, seconds=10, beside_families=False))
        yield cap, rows


def grid_table(grid: Iterable[tuple[float, Sequence[Row]]]) -> Table:
    headings = ("cap", "cases", "optimal", "median, %", "mean, %", "largest, %")
    caption = "cap: memory, 1 is 1F1B's peak; %: how much longer a step is than its lower bound"
    result = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for cap, rows in grid:
        gaps = [100 * row.makespan_gap for row in rows]
        spread = (f"{value:.1f}" for value in (median(gaps), mean(gaps), max(gaps)))
        result.add_row(f"{cap:g}", str(len(rows)), str(sum(row.gap < 1e-6 for row in rows)), *spread)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="the named cases only")
    parser.add_argument("--grid", type=int, default=0, metavar="N", help="only N random cases for each of eight caps")
    parser.add_argument("--inputs", type=int, default=20, help="random cost vectors (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument("--large", action="store_true", help="add p = 64, m = 512, 30 s each")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/search_quality.json"))
    arguments = parser.parse_args()
    console, rng = Console(), random.Random(arguments.seed)
    results: dict[str, object] = {}
    if arguments.grid:
        grid = dict(grid_searches(arguments.grid, rng))
        console.print("makespan over its lower bound, less 1", grid_table(grid.items()))
        results = {f"{cap:g}": [asdict(row) for row in rows] for cap, rows in grid.items()}
        write_whole(arguments.output, json.dumps(results, indent=1) + "\n")
        return

    named = [
        measure(p, m, ratio, Costs(*ratio, p2p=p2p), cap, max_chunks)
        for p, m, ratio, p2p in track(NAMED, "named cases", transient=True)
        for max_chunks in (2, MAX_CHUNKS)
        for cap in CAPS
    ]
    console.print(table(named))
    results["named"] = [asdict(row) for row in named]
    if arguments.large:
        large = [
            measure(64, 512, ratio, Costs(*ratio), cap, seconds=30, beside_families=False)
            for ratio in (EQUAL, UNEQUAL)
            for cap in CAPS
        ]
        console.print(table(large))
        results["large"] = [asdict(row) for row in large]
    if not arguments.quick:
        for name, rows in random_searches(arguments.inputs, rng).items():
            console.print(f"{name}: p = 8, m = 24, caps .625 and .75", style="bold")
            console.print(table(rows))
            console.print(summary(rows))
            results[name] = {"rows": [asdict(row) for row in rows], "summary": summary(rows)}
        wrong = [
            with_wrong_costs(8, 24, cap, rng)
            for _ in track(range(max(1, arguments.inputs // 2)), "wrong costs", transient=True)
            for cap in (0.625, 1.0)
        ]
        losses = {
            key: (sum(getattr(w, key) for w in wrong) / len(wrong), max(getattr(w, key) for w in wrong))
            for key in ("planned_for_wrong", "planned_for_equal", "family")
        }
        console.print("wrong costs: mean and worst makespan over that of a plan for the true ones", style="bold")
        console.print(losses)
        results["wrong costs"] = {"rows": [asdict(w) for w in wrong], "mean and worst": losses}
    write_whole(arguments.output, json.dumps(results, indent=1) + "\n")
    console.print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
