"""Plan steps whose microbatches differ, and compare with other ways to run them at equal memory.

Claim: for p = 8, m = 32 and the lengths of public SFT and RL data, ``plan_step`` finds in 50 milliseconds an order of
microbatches and actions that is faster than stock 1F1B in arrival order, in no more memory. The geometric means over eight
batches are 1.08 to 1.92 times. Plans of repacked documents are not part of the claim. With ``--emulated`` the plans run on
devices that sleep. They take as long as planned, and the speedup over stock Megatron-Core is the planned one.

    python benchmarks/unequal.py              # plans: p = 8, m = 32, minutes
    python benchmarks/unequal.py --quick      # one batch of every distribution
    python benchmarks/unequal.py --emulated   # on sleeping ranks, minutes
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from lengths import DISTRIBUTIONS, Batch, first_fit_decreasing, weigh
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_pipemem import Costs, build_schedule
from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.search.step_plan import Dispatcher, plan_step

PLANNED = ("1f1b", "interleaved", "zb-h1", "zbv")
"""The families whose steps are planned. A plan has the placement and the kinds of backward of its family."""


@dataclass(frozen=True)
class Way:
    """One way to run a batch."""

    name: str
    speedup: float  # over stock 1F1B in arrival order, in simulated seconds
    memory: float  # relative to stock 1F1B in arrival order
    over_bound: float | None = None  # makespan over the bound of its placement and memory; ``None`` if not computed
    seconds: float = 0.0  # processor time of the planning


def ways(batch: Batch, devices: int, seconds: float, longer: float) -> Iterator[Way]:
    """Yield all ways to run a batch, stock 1F1B first. Plans take ``seconds``, or ``longer`` in the last ones."""
    m, weights = len(batch), weigh(batch)
    costs, stock = Costs(microbatch=weights), build_schedule("1f1b", num_devices=devices, num_microbatches=len(batch))
    makespan, held = simulate(stock, costs).makespan, max(peaks(stock, costs))
    cap = MemoryCap(held, False)

    def way(name: str, schedule=stock, ordered: MicrobatchFactors = weights) -> Way:
        own = Costs(microbatch=ordered)
        return Way(name, makespan / simulate(schedule, own).makespan, max(peaks(schedule, own)) / held)

    def planned(name: str, base, of: MicrobatchFactors, seconds: float) -> Way:
        started = time.process_time()
        plan = plan_step(base, Costs(microbatch=of), cap, seconds)
        took = time.process_time() - started
        planned = way(name, plan.schedule, of.reordered(plan.order))
        return replace(planned, over_bound=plan.makespan / plan.bound, seconds=took)

    yield way("1F1B, arrival order")
    yield way("interleaved, arrival order", build_schedule("interleaved", num_devices=devices, num_microbatches=m))
    rising = sorted(range(m), key=weights.time.__getitem__)
    yield way("1F1B, ascending", stock, weights.reordered(rising))
    yield way("1F1B, descending", stock, weights.reordered(rising[::-1]))
    packed = first_fit_decreasing(batch)
    fewer = build_schedule("1f1b", num_devices=devices, num_microbatches=len(packed))
    repacked = weigh(packed, m)
    yield way("1F1B, repacked (first fit)", fewer, repacked)
    yield planned("plan of 1f1b, repacked", fewer, repacked, seconds)
    for name in PLANNED:
        yield planned(
            f"plan of {name}", build_schedule(name, num_devices=devices, num_microbatches=m), weights, seconds
        )
    if longer:
        yield greedy(stock, costs, held, makespan, longer)
        yield planned(f"plan of 1f1b, {longer:g} s", stock, weights, longer)


def greedy(stock, costs: Costs, held: float, makespan: float, seconds: float) -> Way:
    """Return a way as in PipeWeaver (arXiv 2504.14145), for one model: search the order of segments, interleave greedily.

    The paper searches the ranks of segments by a tree search, and lets every device run any ready segment within its memory.
    Its program is not public. This function therefore climbs over orders with our own greedy interleaving, for as long as
    the longer plan.
    """
    dispatcher, random = Dispatcher(stock, costs, [held] * stock.num_devices), Random(0)
    order = tuple(range(stock.num_microbatches))
    started, best = time.process_time(), dispatcher.run(order)
    while time.process_time() - started < seconds:
        tried = list(order)
        tried.insert(random.randrange(len(tried)), tried.pop(random.randrange(len(tried))))
        dispatched = dispatcher.run(tried)
        if dispatched is not None and (best is None or dispatched.makespan <= best.makespan):
            best, order = dispatched, tuple(tried)
    took = time.process_time() - started
    assert best is not None and costs.microbatch is not None, "stock's memory holds the step"
    schedule, own = dispatcher.schedule(best), Costs(microbatch=costs.microbatch.reordered(order))
    peak = max(peaks(schedule, own)) / held
    return Way("PipeWeaver's idea on 1f1b", makespan / simulate(schedule, own).makespan, peak, None, took)


def compare(name: str, packed: bool, arguments: argparse.Namespace) -> dict:
    """Compare every way on several batches of one distribution. Print the table, and return it as JSON data."""
    lengths, m, console = DISTRIBUTIONS[name], arguments.microbatches, Console()
    batches = [lengths.batch(m, Random(seed), packed) for seed in range(arguments.batches)]
    spread = statistics.mean(max(weigh(batch).time) for batch in batches)
    how = "packed" if packed else "one document each"
    size = f"p = {arguments.devices}, m = {m}, batches: {len(batches)}"
    console.print(
        f"{lengths.what}, {how}: the largest microbatch is {spread:.2f} times the average; {size}", style="bold"
    )
    columns = [list(ways(batch, arguments.devices, arguments.seconds, arguments.longer)) for batch in batches]
    rows = [list(row) for row in zip(*columns, strict=True)]
    leasts = ("least",) if len(batches) > 1 else ()
    caption = (
        f"speedup: {'mean over the batches, ' if leasts else ''}against 1F1B in arrival order; "
        f"{'least: of the batches; ' if leasts else ''}memory: largest peak / that 1F1B's; over bound: time / its lower "
        "bound; ms: longest planning; repacked: the same documents in fewer, fuller microbatches (first-fit decreasing)"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("way", "speedup", *leasts, "memory", "over bound", "ms"):
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for row in rows:
        bounds = [gain.over_bound for gain in row if gain.over_bound is not None]
        table.add_row(
            row[0].name,
            f"{math.exp(statistics.mean(math.log(gain.speedup) for gain in row)):.3f}",
            *[f"{min(gain.speedup for gain in row):.3f}" for _ in leasts],
            f"{max(gain.memory for gain in row):.2f}",
            f"{statistics.mean(bounds):.3f}" if bounds else "",
            f"{1e3 * max(gain.seconds for gain in row):.0f}" if bounds else "",
        )
    console.print(table)
    return {"distribution": name, "packed": packed, "rows": [[asdict(gain) for gain in row] for row in rows]}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--devices", type=int, default=8, help="pipeline ranks (default: %(default)d)")
    parser.add_argument("--microbatches", type=int, default=32, help="microbatches of a step (default: %(default)d)")
    parser.add_argument(
        "--distributions",
        nargs="+",
        choices=DISTRIBUTIONS,
        default=list(DISTRIBUTIONS),
        help="distributions of lengths (default: all)",
    )
    parser.add_argument("--batches", type=int, default=8, help="batches of every distribution (default: %(default)d)")
    parser.add_argument("--seconds", type=float, default=0.05, help="seconds of a plan (default: %(default)g)")
    parser.add_argument(
        "--longer",
        type=float,
        default=1.0,
        help="seconds of a plan with more time; 0 for none (default: %(default)g)",
    )
    parser.add_argument("--emulated", action="store_true", help="run the plans on ranks that sleep")
    parser.add_argument(
        "--step-ms", type=float, default=40, help="milliseconds of an average forward (default: %(default)g)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of every row (default: %(default)d)")
    parser.add_argument("--quick", action="store_true", help="one batch, one measured step, no longer plans")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/unequal.json"))
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.batches, parsed.longer, parsed.repeats = 1, 0.0, 1
    if min(parsed.devices, parsed.microbatches, parsed.batches, parsed.repeats) < 1 or parsed.step_ms <= 0:
        parser.error("devices, microbatches, batches, repeats and --step-ms must be positive")
    return parsed


def main() -> None:
    arguments = parse_arguments()
    if arguments.emulated:
        from emulated.unequal import run_emulated

        results = run_emulated(arguments)
    else:
        results = [compare(name, packed, arguments) for name in arguments.distributions for packed in (False, True)]
    write_whole(arguments.output, json.dumps(results, indent=1) + "\n")
    Console().print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
