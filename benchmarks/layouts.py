"""Compare layouts that recipes of Megatron-Bridge write by hand with those of ``pipemem layout``.

Claim: for the same model and ranks, our slowest rank has no more work than theirs, and a step of stock Megatron takes
no longer. The exception is a layout that must fit the memory. Balance is the slowest rank's work per microbatch. The
step is a simulated one of 1F1B, or of the interleaved schedule if a rank has several chunks.

    python benchmarks/layouts.py
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatron_pipemem.files import write_whole
from megatron_pipemem.model import layout
from megatron_pipemem.model.model import Model
from megatron_pipemem.tools.config.cluster import GIB, Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run
from megatron_pipemem.tools.planner.balance import Balance, balance
from megatron_pipemem.tools.planner.space import OF_REPLICAS
from megatron_pipemem.tools.report.terminal import FittingTable

DEVICES = 1024
MICROBATCHES = 8
"""Microbatches per pipeline rank: 128 on 16, as in the recipe of DeepSeek-V3 on 1024 devices."""


@dataclass(frozen=True)
class Recipe:
    """A layout by hand."""

    model: str  # its name in this package
    tp: int
    pp: int
    chunks: int  # stages per rank
    ep: int
    by_hand: str  # the layout
    source: str  # file of Megatron-Bridge, below src/megatron/bridge by default

    def run(self) -> Run:
        """Return its run on H100 nodes, without recompute."""
        dp = DEVICES // (self.tp * self.pp)
        cut = Parallelism(
            tp=self.tp, pp=self.pp, dp=dp, ep=self.ep, chunks=self.chunks if self.chunks > 1 else None,
            global_batch=MICROBATCHES * self.pp * dp, sequence_parallel=self.tp > 1,
        )  # fmt: skip
        cluster = replace(load("h100-80g", Cluster), nodes=DEVICES // 8)
        return Run(load(self.model, Model), cluster, cut, flags=OF_REPLICAS)


RECIPES = (
    Recipe("deepseek-v3", 2, 16, 1, 64, "Et*4|(t*4|)*14tmL", "recipes/deepseek/h100/deepseek_v3.py"),
    Recipe("deepseek-v3", 2, 16, 2, 64, "Et*3|(tt|)*29m|L", "docs/training/moe-optimization.md"),
    Recipe("deepseek-v3", 2, 8, 2, 64, "Et*4|(t*4|)*14tmL", "recipes/deepseek/h100/deepseek_v3.py"),
    Recipe("deepseek-v3", 2, 8, 4, 64, "Et|(tt|)*30mL", "perf_recipes/deepseek/h100/deepseek_v3.py"),
    Recipe("kimi-k2", 2, 16, 1, 32, "Et*4|(t*4|)*14tL", "recipes/kimi/h100/kimi_k2.py"),
    Recipe("kimi-k2", 2, 8, 4, 64, "Et|(tt|)*30L", "perf_recipes/kimi/h100/kimi_k2.py"),
    Recipe("llama3-70b", 4, 8, 5, 1, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", "perf_recipes/llama/h100/llama3.py"),
)
"""As of commit 067f987 (August 2026). The file's first layout is for 16 ranks of one chunk, and its third for 8 of two."""
CAPTION = (
    "slowest rank, step: seconds with the layout of pipemem layout / with the one by hand; step, even split: with the even "
    "split / by hand; *: without recomputation, a rank exceeds the usable memory of its GPU, and pipemem layout prefers "
    "the layout that exceeds it least"
)
COLUMNS = ("model", "ranks x chunks", "by hand", "`pipemem layout`", "slowest rank", "step", "step, even split")


def row(recipe: Recipe, layouts: Balance) -> tuple[str, ...]:
    """Return the cells of a recipe: ratios of the best layout, and of the even split, to the one by hand."""
    model, hand = load(recipe.model, Model), layouts.own
    assert hand is not None, "every recipe has a layout by hand"
    best = layout.written(layouts.best.layers, model.mtp_layers)
    same = layouts.best.layers == hand.layers
    return (
        recipe.model,
        f"{recipe.pp} x {recipe.chunks}",
        f"`{recipe.by_hand}`",
        "the same" if same else f"`{best}`",
        f"{layouts.best.slowest / hand.slowest:.3f}",
        f"{layouts.best.seconds / hand.seconds:.3f}",
        f"{layouts.even.seconds / hand.seconds:.3f}",
    )


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    console = Console(width=120, highlight=False)
    table = FittingTable(COLUMNS, text=COLUMNS[:4], caption=CAPTION)
    results = []
    for recipe in RECIPES:
        layouts = balance(recipe.run(), recipe.by_hand)
        cells = row(recipe, layouts)
        most = [way.peak / GIB for way in (layouts.best, layouts.own) if way is not None]
        exceeds = max(most) * GIB > recipe.run().cluster.memory_bytes
        table.add_row(cells[0], cells[1] + " *" * exceeds, *cells[2:])
        results.append({**dict(zip(COLUMNS, cells, strict=True)), "most_gib": most, "source": recipe.source})
    console.print(table)
    output = Path("out/benchmarks/layouts.json")
    write_whole(output, json.dumps(results, indent=1) + "\n")
    console.print(f"written to {output}")


if __name__ == "__main__":
    main()
