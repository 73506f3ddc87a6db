"""``pipemem launch``: start a run, or print what would start it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import check_port
from megatron_pipemem.cli.common import print_json
from megatron_pipemem.cli.options import Json, Yes
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_writable
from megatron_pipemem.launch.command import Nodes, command, min_nodes, ranks_per_node
from megatron_pipemem.launch.feasibility import feasible

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Change a key of the file, as in parallelism.pp=8; repeatable."
    ),
]


RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run; see configs/runs.")]


def unfinished(run_file: RunFile, overrides: Set = None) -> None:
    """Exit with 0 if the run has a checkpoint to go on from, with 1 if it is finished or would start over; batch files
    ask.
    """
    raise typer.Exit(0 if load(run_file, Run, overrides or ()).unfinished else 1)


def launch(
    run_file: RunFile,
    overrides: Set = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the command and start nothing.")] = False,
    nodes: Annotated[
        int | None, typer.Option(envvar="NNODES", help="Nodes of the run; by default as few as its ranks fill.")
    ] = None,
    node_rank: Annotated[int, typer.Option(envvar="NODE_RANK", help="Number of this node, from 0.")] = 0,
    master_addr: Annotated[
        str | None, typer.Option(envvar="MASTER_ADDR", help="Address of node 0; needed for several nodes.")
    ] = None,
    master_port: Annotated[int, typer.Option(envvar="MASTER_PORT", help="Port on node 0.")] = 29500,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Start this node's ranks of a run under torchrun; start the same on every node of it.

    What cannot work is refused before anything starts. The run's log goes to standard output, its report, timelines and
    checkpoints to its `output` folder.

    Examples:
        # the command that it stands for
        pipemem launch configs/runs/tiny-cpu.yaml --print
        # with other keys
        pipemem launch run.yaml --set parallelism.pp=8 --set schedule.name=v-half
        # on each of two nodes
        pipemem launch run.yaml --nodes 2 --node-rank 0 --master-addr node0
    """
    run = load(run_file, Run, overrides or ())
    if (reason := feasible(run, yes)) is not None:
        raise UnsupportedError(f"{run_file}: {reason}")
    check_script_flags(run)
    if nodes is not None and nodes < 1:
        raise UnsupportedError(f"--nodes {nodes}: give at least 1, or leave it out for as few as the ranks fill")
    check_port("--master-port", master_port)
    where = Nodes(min_nodes(run) if nodes is None else nodes, node_rank, master_addr, master_port)
    if not 0 <= where.rank < where.count:
        raise UnsupportedError(f"--node-rank {where.rank}: the run has nodes 0 to {where.count - 1}")
    started = command(run, where)
    if as_json:
        facts = {"nodes": where.count, "ranks_per_node": ranks_per_node(run, where.count), "output": run.output}
        print_json({"command": list(started.words), "environment": dict(started.environment), **facts})
    elif print_only:
        typer.echo(started.text())
    else:
        if where.rank == 0:  # which writes it, when everything is trained
            check_writable(run.report)
        sys.stdout.flush()
        os.execvpe(started.words[0], started.words, {**os.environ, **started.environment})


def check_script_flags(run: Run) -> None:
    """Raises ConfigError when Megatron would refuse a run's flags on every rank. A script of the user's own may know more."""
    if run.script is None:
        from megatron_pipemem.mcore.known_flags import check_flags

        check_flags(run.flags)
