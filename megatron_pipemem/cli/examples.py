"""Show, after the options in a command's ``--help``, examples to copy, and for ``run`` the flags behind the script."""

from __future__ import annotations

from textwrap import indent
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand

EXAMPLES = {
    "schedules": (
        ("pipemem schedules", "all, with formulas"),
        ("pipemem schedules v-half", "one, with a picture"),
    ),
    "simulate": (
        (
            "pipemem simulate v-half -p 8 -m 32 --costs 1,1.5,.5 --p2p .05",
            "with the seconds of F, I, W and of a message",
        ),
        ("pipemem simulate auto -p 8 -m 24 --memory-cap .625", "the fastest order in so much of 1F1B's memory"),
        (
            "pipemem simulate zbv -p 8 -m 32 --offload half --offload-ratio .4",
            "half of the activations wait on the host",
        ),
        (
            "pipemem simulate 1f1b -p 8 -m 32 --vocab-parallel auto --head-cost 2.5layers --layers 32",
            "a large vocabulary",
        ),
    ),
    "show": (
        ("pipemem show v-half -p 8 -m 16", "in the terminal"),
        ("pipemem show 1f1b v-half v-min -p 8 -m 16 --output compared.html", "several on one time axis, to zoom into"),
        ("pipemem show zbv -p 8 -m 16 --output zbv.json", "for ui.perfetto.dev"),
    ),
    "pareto": (
        ("pipemem pareto -p 8 -m 24 --costs 1,1.5,.5 --output pareto.png", "which schedules are worth choosing"),
        ("pipemem pareto -p 8 -m 24 --caps .5,.75 --seconds 2", "two short searches"),
    ),
    "check": (
        ("pipemem check schedule.csv --memory-cap 1", "letters are found out"),
        ("pipemem check torch.csv --dialect torch --json", "a file of torch.distributed.pipelining"),
    ),
    "convert": (
        ("pipemem convert v-half v-half.csv -p 8 -m 16", "the orders of a family"),
        ("pipemem convert v-half.csv torch.csv --to torch", "in torch's letters"),
        ("pipemem convert v-half.csv program.txt", "with messages"),
    ),
    "plan": (
        ("pipemem plan configs/runs/98b-40xa100.yaml", "ranked, with what binds"),
        ("pipemem plan run.yaml --memory 60GiB --only tp=4,8 --only schedule=v-half,1f1b", "less to choose from"),
        ("pipemem plan run.yaml --profile profile.json --output best.yaml", "by what was measured; written for launch"),
    ),
    "profile": (
        ("pipemem profile run.yaml --output profile.json", "on this device"),
        ("pipemem profile --model llama3-8b --tp 2 --stages 8 --formulas", "without Megatron"),
    ),
    "launch": (
        ("pipemem launch configs/runs/tiny-cpu.yaml --print", "the command that it stands for"),
        ("pipemem launch run.yaml --set parallelism.pp=8 --set schedule.name=v-half", "with other keys"),
        ("pipemem launch run.yaml --nodes 2 --node-rank 0 --master-addr node0", "on each of two nodes"),
    ),
    "grid": (
        ("pipemem grid configs/grids/tiny-cpu.yaml", "every point, here"),
        ("pipemem grid grid.yaml --launcher slurm --max-parallel 4 --sbatch=--partition=gpu", "as array jobs"),
        ("pipemem grid grid.yaml --resume", "what has no result, or failed"),
    ),
    "report": (
        ("pipemem report out/grids/tiny-cpu", "also while it runs"),
        ("pipemem report out/grids/tiny-cpu --output report.svg", "the picture elsewhere"),
    ),
    "run": (
        (
            "torchrun --nproc-per-node 8 -m megatron_pipemem run pretrain_gpt.py FLAGS --pipemem-schedule v-half",
            "by name",
        ),
        (
            "torchrun ... run pretrain_gpt.py FLAGS --pipemem-schedule auto --pipemem-memory-cap 6GiB",
            "the fastest that fits",
        ),
    ),
}
"""Command -> lines and what they are for."""


_LEAST_COLUMNS = 80
"""Of Typer's panels, which cut names of options where there are fewer; then click's own plain help does."""


def markup() -> str | None:
    """Return how help is to be rendered; ``None`` is plain."""
    return "markdown" if Console().width >= _LEAST_COLUMNS else None


class CommandWithExamples(TyperCommand):
    """End a command's help with ``EXAMPLES``, each in a line that can be copied whole."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        self.rich_markup_mode = markup()
        super().format_help(ctx, formatter)
        formatter.write("\n Examples\n")  # what is written comes after panels
        for line, purpose in EXAMPLES[self.name]:
            formatter.write(f"   # {purpose}\n   {line}\n")


class RunCommand(CommandWithExamples):
    """Tell in the help also of the flags that stand behind the script."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from megatron_pipemem.launch.flags import flag_parser

        flags = flag_parser().format_help().partition(":\n")[2]  # without argparse's own heading
        formatter.write(f"\n Flags after the script\n{indent(flags, ' ')}")
