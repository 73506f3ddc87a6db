"""Compare context parallelism with sequence slices for Llama-3-70B on long sequences, by the planner's prices.

For every length, the table has the fastest plan with each number of context-parallel ranks and whole microbatches, and
with each number of slices and no context parallelism. All use the same H100s, the same tokens per step, tensor
parallelism within the node and at most 16 pipeline ranks. The planner chooses everything else: data parallelism,
schedule, chunks, recompute.

Context parallelism is priced as a ring (arXiv 2310.01889, Megatron's p2p exchange). Every rank has 1/cp of the tokens.
Keys and values pass ``cp - 1`` times in F, with their gradients in I, hidden behind attention if that takes longer. In
Megatron a rank has two halves of a sequence that balance causal attention, so all ranks take equally long. Slices have
equal tokens, and the last attends longest, or equal FLOPs (see ``tools/planner/slices.py``). Attention counts in full for
both, as in MFU. ``pipemem plan`` names the priced features that cannot run yet. Takes some minutes.

With ``--jobs``, typical jobs are planned with everything free: without slices, without slices and context parallelism,
in slices without context parallelism, and with both. A rank has at least 4096 tokens of a slice.

With ``--emulated``, steps with slices and steps of whole microbatches run on devices that sleep instead of computing.
Their times are those of the simulation, and so is the speedup at equal memory.

    python benchmarks/long_sequences.py                  # 32K, 128K and 512K tokens on 128 H100-80GB
    python benchmarks/long_sequences.py --sequence 131072 --nodes 8
    python benchmarks/long_sequences.py --jobs           # a table in Markdown, in some minutes
    python benchmarks/long_sequences.py --emulated       # on sleeping ranks: p = 4, m = 1, 2 and 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatron_pipemem.files import write_whole
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.options import FLOPS, SLICE_CUTS
from megatron_pipemem.schedule.options import TOKENS as EQUAL_TOKENS
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.slices import SHORTEST_SLICE
from megatron_pipemem.tools.planner.space import Limits
from megatron_pipemem.tools.planner.variants import PLAIN
from megatron_pipemem.tools.planner.ways import Way as Planned
from megatron_pipemem.tools.planner.ways import gibibytes
from megatron_pipemem.tools.report.terminal import FittingTable

TOKENS = 2**22
"""Tokens of a step."""
SEQUENCES = (2**15, 2**17, 2**19)
PIPELINES = (1, 2, 4, 8, 16)
COUNTS = (1, 2, 4, 8, 16, 32)
CAPTION = (
    "tokens: of a sequence; m: microbatches; v: chunks per rank; peak: all memory of the fullest rank; bubble: idle share of "
    "the busiest rank; binds: largest loss, as a share of the step"
)
COLUMNS = ("tokens", "cut", "pp", "dp", "m", "schedule", "recompute", "s/step", "MFU", "peak GiB", "bubble", "binds")


@dataclass(frozen=True)
class Way:
    """One way to cut sequences."""

    sequence: int  # tokens of a sequence
    cp: int = 1  # context-parallel ranks
    slices: int = 1  # slices of a microbatch
    slice_cut: str = "tokens"

    def __str__(self) -> str:
        if self.slices == 1:
            return f"cp {self.cp}"
        return f"{self.slices} slices" + " by FLOPs" * (self.slice_cut == FLOPS)

    def run(self, nodes: int, model: str = "llama3-70b", tp: int = 8) -> Run:
        """Return the run that the planner starts from, on ``nodes`` of eight H100."""
        cluster = replace(load("h100-80g", Cluster), nodes=nodes)
        batch = max(1, TOKENS // self.sequence)
        cut = Parallelism(tp=tp, cp=self.cp, global_batch=batch, sequence_parallel=tp > 1)
        return Run(replace(load(model, Model), sequence=self.sequence), cluster, cut)

    def best(self, nodes: int, **settings: object) -> Planned | None:
        """Return the fastest plan without searched orders, or ``None`` if nothing fits. ``settings`` go to ``run``."""
        run = self.run(nodes, **settings)  # type: ignore[arg-type]
        limits = Limits(
            {
                "tp": [run.parallelism.tp],
                "pp": [pp for pp in PIPELINES if run.cluster.num_devices % (pp * run.parallelism.tp * self.cp) == 0],
                "micro_batch": [1],
                "variant": [PLAIN],
                "slices": [self.slices],
                "slice_cut": [self.slice_cut],
            }
        )
        return next(iter(plan(run, limits=limits, top=1, search_seconds=0.0).plans), None)


@dataclass(frozen=True)
class Job:
    """A training job on nodes of eight H100."""

    model: str
    sequence: int  # tokens of a sequence
    nodes: int
    batch: int  # sequences of a step
    ep: int = 1  # expert-parallel ranks

    def __str__(self) -> str:
        return f"{self.model} {self.batch} x {self.sequence // 1024}K, {8 * self.nodes} GPUs"

    def best(self, cps: Sequence[int], slices: Sequence[int]) -> Planned | None:
        """Return the fastest plan with these degrees of context parallelism and numbers of slices; ``None`` if none fits."""
        cluster = replace(load("h100-80g", Cluster), nodes=self.nodes)
        model = replace(load(self.model, Model), sequence=self.sequence)
        limits: dict[str, Sequence[object]] = {
            "tp": [1, 2, 4, 8],
            "pp": [pp for pp in (*PIPELINES, 32) if cluster.num_devices % pp == 0],
            "cp": [cp for cp in cps if cluster.num_devices % cp == 0],
            "micro_batch": [1],
            "variant": [PLAIN],
            "slices": slices,
            "slice_cut": SLICE_CUTS if max(slices) > 1 else [EQUAL_TOKENS],
        }
        run = Run(model, cluster, Parallelism(global_batch=self.batch, ep=self.ep))
        return next(iter(plan(run, limits=Limits(limits), top=1, search_seconds=0.0).plans), None)

    def row(self) -> str:
        """Return a row of a Markdown table: the job, and seconds a step and sizes of each of its ways."""
        whole = [_in_short([self.best(cps, [1])]) for cps in (COUNTS, [1])]
        sliced = [
            _in_short([self.best([cp], self._slices(cp)) for cp in cps if self._slices(cp)])
            for cps in ([1], COUNTS[1:])
        ]
        return f"| {' | '.join([str(self), *whole, *sliced])} |"

    def _slices(self, cp: int) -> list[int]:
        """Return the numbers of slices of which each of ``cp`` ranks has enough tokens."""
        return [count for count in COUNTS if count > 1 and self.sequence // (count * cp) >= SHORTEST_SLICE]


def _in_short(plans: Sequence[Planned | None]) -> str:
    """Return seconds and sizes of the fastest of these plans. A plan is ``None`` if nothing fits."""
    planned = min(filter(None, plans), key=lambda planned: planned.seconds, default=None)
    if planned is None:
        return "nothing fits" if plans else "too short"
    cut = planned.run.parallelism
    sizes = [f"{key}{getattr(cut, key)}" for key in ("tp", "pp", "cp") if getattr(cut, key) > 1]
    sliced = [f"n={planned.units.parts}"] if planned.units.parts > 1 else []
    return f"{planned.seconds:.3g}: {' '.join(sizes + sliced)}"


JOB_HEADER = ("| job | without slices | nor context parallelism | in slices | both |", f"|{'---|' * 5}")
JOBS = (
    Job("llama3-8b", 2**13, 4, 64),
    Job("llama3-8b", 2**17, 4, 16),
    Job("qwen3-32b", 2**14, 8, 64),
    Job("llama3-70b", 2**15, 8, 32),
    Job("llama3-70b", 2**17, 16, 32),
    Job("qwen3-235b-a22b", 2**15, 32, 64, ep=8),
    Job("qwen3-235b-a22b", 2**17, 32, 32, ep=8),
)


def ways(sequence: int, counts: Sequence[int] = COUNTS) -> Iterator[Way]:
    """Yield every degree of context parallelism, then every number of slices with each cut."""
    yield from (Way(sequence, cp=count) for count in counts)
    yield from (Way(sequence, slices=count, slice_cut=cut) for cut in SLICE_CUTS for count in counts if count > 1)


def row(way: Way, planned: Planned | None) -> tuple[str, ...]:
    """Return the cells of a way: its best plan, and the limit of that plan."""
    tokens = f"{way.sequence // 1024}K"
    if planned is None:
        return (tokens, str(way), *[""] * (len(COLUMNS) - 3), "nothing fits")
    cut, run = planned.run.parallelism, planned.run
    return (
        tokens,
        str(way),
        *map(str, (cut.pp, cut.dp, cut.microbatches)),
        planned.schedule if cut.chunks is None else f"{planned.schedule} v={cut.chunks}",
        run.schedule.recompute,
        f"{planned.seconds:.1f}",
        f"{planned.mfu:.1%}",
        gibibytes(planned.peak),
        f"{planned.bubble_rate:.1%}",
        planned.binds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, action="append", help="tokens; by default 32K, 128K and 512K")
    parser.add_argument("--nodes", type=int, default=16, help="nodes of eight H100 each (default: %(default)d)")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/long_sequences.json"))
    parser.add_argument("--jobs", action="store_true", help="plan typical jobs, with everything free")
    asleep = parser.add_argument_group("--emulated")
    asleep.add_argument("--emulated", action="store_true", help="run steps on sleeping devices in place of planning")
    asleep.add_argument("--devices", type=int, default=4, help="pipeline ranks (default: %(default)d)")
    asleep.add_argument(
        "--microbatches", type=int, nargs="+", help="microbatches of a step (default: 1, 2 and one per device)"
    )
    asleep.add_argument(
        "--slices", type=int, nargs="+", default=[2, 4, 8, 16], help="slices of a microbatch (default: %(default)s)"
    )
    asleep.add_argument(
        "--step-ms",
        type=float,
        default=320,
        help="milliseconds of F, I and W each, for a device's whole share (default: %(default)g)",
    )
    asleep.add_argument(
        "--attention-share",
        type=float,
        default=0.25,
        help="share of causal attention in F's time (default: %(default)g)",
    )
    asleep.add_argument(
        "--keys-share",
        type=float,
        default=0.05,
        help="share of keys and values in F's memory (default: %(default)g)",
    )
    asleep.add_argument("--repeats", type=int, default=3, help="measured steps of every row (default: %(default)d)")
    given = parser.parse_args()
    given.microbatches = given.microbatches or [1, 2, given.devices]
    if min((*given.microbatches, given.repeats, given.step_ms)) <= 0 or min((*given.slices, given.devices)) < 2:
        parser.error("microbatches, repeats and --step-ms must be positive, and devices and slices at least 2")
    console = Console(width=170, highlight=False)
    if given.emulated:
        from emulated.slices import run_emulated

        results = run_emulated(given)
    elif given.jobs:
        rows = [job.row() for job in JOBS]
        console.print(*JOB_HEADER, *rows, sep="\n", soft_wrap=True)
        results = [{"row": text} for text in rows]
    else:
        results = plan_ways(given, console)
    write_whole(given.output, json.dumps(results, indent=1) + "\n")
    console.print(f"written to {given.output}")


def plan_ways(given: argparse.Namespace, console: Console) -> list[dict]:
    """Plan every way to cut sequences, print the table, and return it as JSON data."""
    table = FittingTable(COLUMNS, text=("cut", "schedule", "recompute", "binds"), caption=CAPTION)
    results = []
    for sequence in given.sequence or SEQUENCES:
        for way in ways(sequence):
            cells = row(way, way.best(given.nodes))
            table.add_row(*cells)
            results.append(dict(zip(COLUMNS, cells, strict=True)))
    console.print(table)
    return results


if __name__ == "__main__":
    main()
