"""Run pairs of a forward and a backward on devices with a lane for computing and a lane for the experts' tokens.

Claim: a step with pairs takes as long as the simulator predicts, within 3 %, or up to 4 % less where backwards are
whole, because their weight gradients hide exchanges too. It is faster than the plain order. In less memory than that of
stock Megatron-Core's own pairs, it is faster than stock, and in that memory as fast. The plugin and Megatron's functions
run as in a training, with Megatron's plans of layers on two streams. Only the layers are emulated: a piece of a layer
occupies its lane for a given time. The times of a layer are in the proportions that the planner predicts for the model.

    python benchmarks/pairs.py            # DeepSeek-V3 and Qwen3-235B, 30 and 50 % in exchanges
    python benchmarks/pairs.py --quick    # one of the four, one step of every row
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

from emulated.measure import Row
from emulated.pair_cases import Case
from emulated.pairs import Gain, gains, run
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_pipemem.files import write_whole

MODELS = ("deepseek-v3", "qwen3-235b-a22b")


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table whose first column is text."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for cells in rows:
        made.add_row(*cells)
    return made


def row_cells(row: Row) -> tuple[str, ...]:
    name = row.schedule if row.runtime == "pipemem" else f"{row.runtime} {row.schedule}"
    spread = (max(row.measured) - min(row.measured)) / row.seconds
    return (
        name,
        f"{row.peak:.3f}",
        f"{row.simulated:.3f}",
        f"{row.seconds:.3f}",
        f"{1 + row.off_plan:.3f}",
        f"{spread:.1%}",
    )


def gain_cells(gain: Gain) -> tuple[str, ...]:
    ratios = (f"{measured:.2f} ({simulated:.2f})" for simulated, measured in (gain.plain, gain.stock, gain.stock_pairs))
    return gain.schedule, f"{gain.peak:.3f}", *ratios


def compare(case: Case, console: Console) -> dict:
    """Run one case, print its tables, and return it as JSON data."""
    rows = run(case)
    gain_rows = gains(rows)
    sizes = f"{case.devices} devices, {case.microbatches} microbatches"
    console.print(f"{case.model}, {case.share:.0%} of F and I in exchanges, {sizes}", style="bold")
    console.print(
        table(("schedule", "peak", "simulated", "measured", "ratio", "spread"), [row_cells(row) for row in rows])
    )
    headings = ("measured (simulated)", "peak", "plain order", "stock", "stock's pairs")
    console.print(table(headings, [gain_cells(gain) for gain in gain_rows]))
    return asdict(case) | {
        "rows": [asdict(row) | {"seconds": row.seconds, "off_plan": row.off_plan} for row in rows],
        "gains": [asdict(gain) for gain in gain_rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="models whose layers are priced")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.3, 0.5],
        help="shares of F and I in exchanges (default: %(default)s)",
    )
    parser.add_argument("--devices", type=int, default=4, help="pipeline ranks (default: %(default)d)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step (default: %(default)d)")
    parser.add_argument("--layers", type=int, default=1, help="layers of a chunk (default: %(default)d)")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=320,
        help="milliseconds of F of a device's whole share, exchanges included (default: %(default)g)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of every row (default: %(default)d)")
    parser.add_argument("--quick", action="store_true", help="the first model and share, one step of every row")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/pairs.json"))
    given = parser.parse_args()
    if given.devices < 2 or given.microbatches % given.devices or given.microbatches < 2 * given.devices:
        # Megatron's interleaved schedule takes no other number, and dualpipe-v needs as many.
        parser.error("give at least 2 devices, and a multiple of their number of microbatches, at least twice as many")
    if min(given.layers, given.repeats, given.step_ms) <= 0 or not all(0 < share < 1 for share in given.shares):
        parser.error("--layers, --repeats and --step-ms must be positive, and --shares between 0 and 1")
    cases = [
        Case(model, share, given.devices, given.microbatches, given.layers, given.step_ms / 1e3, given.repeats)
        for model, share in product(given.models, given.shares)
    ]
    if given.quick:
        cases = [Case(**asdict(cases[0]) | {"repeats": 1})]
    console = Console(width=120, highlight=False)
    results = [compare(case, console) for case in cases]
    write_whole(given.output, json.dumps(results, indent=1) + "\n")
    console.print(f"written to {given.output}")


if __name__ == "__main__":
    main()
