"""Writes the tables of README.md: of schedules under two cost vectors, of all schedules, and of the quickstart's last run.

    python scripts/readme_tables.py [--quickstart out/quickstart]

Without ``--quickstart`` the quickstart's table stays as it is.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path

import quickstart
from rich.console import Console

from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.simulator import Timeline, simulate
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.search import search_schedule

README = Path(__file__).resolve().parents[1] / "README.md"
DEVICES, MICROBATCHES = 8, 32
COSTS = {"1 : 1 : 1": Costs(1, 1, 1), "1 : 1.5 : 0.5": Costs(1, 1.5, 0.5)}
COMPARED = ("1f1b", "v-half", "v-min", "zbv")
SEARCHES = {"`auto`, cap 0.625, two chunks as `v-half`": 2, "`auto`, cap 0.625, up to eight chunks": 8}
CAP = 0.625


def table_of_costs() -> str:
    rows = {f"`{name}`": [_family(name, costs) for costs in COSTS.values()] for name in COMPARED}
    rows |= {what: [_found(chunks, costs) for costs in COSTS.values()] for what, chunks in SEARCHES.items()}
    return "\n".join(
        [
            f"| schedule | peak memory | {' | '.join(f'bubble at F : I : W = {ratio}' for ratio in COSTS)} |",
            f"|---|---|{'---|' * len(COSTS)}",
            *(
                f"| {name} | {max(run.peak for run in runs):.3f} | {' | '.join(f'{run.bubble_rate:.1%}' for run in runs)} |"
                for name, runs in rows.items()
            ),
        ]
    )


def _family(name: str, costs: Costs) -> Timeline:
    return simulate(build_schedule(name, num_devices=DEVICES, num_microbatches=MICROBATCHES, costs=costs), costs)


def _found(chunks: int, costs: Costs) -> Timeline:
    found = search_schedule(
        num_devices=DEVICES, num_microbatches=MICROBATCHES, costs=costs, memory_cap=CAP, max_chunks=chunks, seconds=60
    )
    return simulate(found.schedule, costs)


def table_of_schedules() -> str:
    rows = ["| name | placement | peak | bubble | messages | from |", "|---|---|---|---|---|---|"]
    for family in families():
        mark, run = " \\*" if family.simulated_only else "", _family(family.name, Costs())
        rows.append(
            f"| `{family.name}`{mark} | {family.placement} | {run.peak:.3f} | {run.bubble_rate:.1%} "
            f"| {run.messages} | {family.source.split(';')[0]} |"
        )
    return "\n".join(rows)


def table_of_quickstart(output: Path) -> str:
    """The rows of the last run, without what the README says around them."""
    text, table = io.StringIO(), quickstart.table(json.loads((output / "summary.json").read_text(encoding="utf-8")))
    table.title = table.caption = ""
    Console(file=text, width=100).print(table)
    lines = [line[1:].rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(["```", *(line for line in lines if line), "```"])


def written(text: str, blocks: Mapping[str, str]) -> str:
    """The text with new blocks between ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""
    for name, block in blocks.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, count = mark.subn(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text)
        if count != 1:
            raise SystemExit(f"{README} needs one block <!-- {name} -->, it has {count}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, metavar="FOLDER", help="what the quickstart wrote")
    arguments = parser.parse_args()
    blocks = {"costs": table_of_costs(), "schedules": table_of_schedules()}
    if arguments.quickstart:
        blocks["quickstart"] = table_of_quickstart(arguments.quickstart)
    write_whole(README, written(README.read_text(encoding="utf-8"), blocks))


if __name__ == "__main__":
    main()
