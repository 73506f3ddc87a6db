"""``pipemem launch``: start a run, or print what would start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_pipemem.cli.checks import check_port
from megatron_pipemem.cli.common import print_json
from megatron_pipemem.cli.options import Json, Yes
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_writable
from megatron_pipemem.launch import slurm
from megatron_pipemem.launch.command import Command, Nodes, command, min_nodes, ranks_per_node
from megatron_pipemem.launch.devices import check_devices
from megatron_pipemem.launch.feasibility import check_data, refusal
from megatron_pipemem.mcore import INSTALL, is_installed

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Change a key of the file, as in parallelism.pp=8; repeatable."
    ),
]
PrintOnly = Annotated[bool, typer.Option("--print", help="Print what would be started, and start nothing.")]
Sbatch = Annotated[
    list[str] | None, typer.Option(metavar="OPTION", help="For sbatch, as in --sbatch=--partition=gpu; repeatable.")
]
Srun = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION", help="For srun, as in --srun=--container-image=IMAGE or --srun=--mpi=pmix; repeatable."
    ),
]
BATCH_FILE = "pretrain_gpt.sbatch"

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run; see configs/runs.")]


def unfinished(run_file: RunFile, overrides: Set = None) -> None:
    """Exit with 0 if the run has a checkpoint to go on from, with 1 if it is finished or would start over; batch files
    ask.
    """
    raise typer.Exit(0 if load(run_file, Run, overrides or ()).unfinished else 1)


def launch(
    run_file: RunFile,
    overrides: Set = None,
    launcher: Annotated[
        Literal["local", "slurm"], typer.Option(help="Start this node's ranks, or submit the run as a job.")
    ] = "local",
    print_only: PrintOnly = False,
    nodes: Annotated[
        int | None, typer.Option(envvar="NNODES", help="Nodes of the run; by default as few as its ranks fill.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(envvar="NODE_RANK", help="Number of this node, from 0; needed for several nodes.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(envvar="MASTER_ADDR", help="Address of node 0; needed for several nodes.")
    ] = None,
    master_port: Annotated[int, typer.Option(envvar="MASTER_PORT", help="Port on node 0.")] = 29500,
    sbatch: Sbatch = None,
    srun: Srun = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Start this node's ranks of a run under torchrun; start the same on every node of it.

    What cannot work is refused before anything starts. The command and the run's log go to standard output, its report,
    timelines and checkpoints to its `output` folder.

    Examples:
        # the command that it stands for
        pipemem launch configs/runs/tiny-cpu.yaml --print
        # with other keys
        pipemem launch run.yaml --set parallelism.pp=8 --set schedule.name=v-half
        # on each of two nodes
        pipemem launch run.yaml --nodes 2 --node-rank 0 --master-addr node0
        # as a job, in a container
        pipemem launch run.yaml --launcher slurm --sbatch=--time=4:00:00 --srun=--container-image=IMAGE.sqsh
    """
    options = slurm_options(launcher, sbatch, srun)
    run = load(run_file, Run, overrides or ())
    if (reason := refusal(run, yes)) is not None:
        raise UnsupportedError(reason.code, f"{run_file}: {reason}")
    if launcher != "slurm" and not (print_only or as_json):
        check_devices(run)
        if run.script is None and not is_installed():
            raise UnsupportedError("not-installed", INSTALL)
    check_script_flags(run)
    if nodes is not None and nodes < 1:
        raise UnsupportedError(
            "bad-number", f"--nodes {nodes}: give at least 1, or leave it out for as few as the ranks fill"
        )
    count = min_nodes(run) if nodes is None else nodes
    if launcher == "slurm":
        sets = [word for each in overrides or () for word in ("--set", each)]
        job = slurm.job(BATCH_FILE, slurm.size(run, count), options, [str(run_file), *sets])
        _submit(job, print_only, as_json)
        return
    check_data(run)
    check_port("--master-port", master_port)
    if node_rank is not None and not 0 <= node_rank < count:
        raise UnsupportedError("bad-number", f"--node-rank {node_rank}: the run has nodes 0 to {count - 1}")
    where = Nodes(count, node_rank, master_addr, master_port)
    started = command(run, where.with_variables() if print_only or as_json else where)
    if as_json:
        facts = {"nodes": count, "ranks_per_node": ranks_per_node(run, count), "output": run.output}
        print_json({"command": list(started.words), "environment": dict(started.environment), **facts})
    elif print_only:
        typer.echo(started.text())
    else:
        if not node_rank:  # node 0 writes it, when everything is trained
            check_writable(run.report)
            typer.echo(started.text())
        sys.stdout.flush()
        os.execvpe(started.words[0], started.words, {**os.environ, **started.environment})


def slurm_options(launcher: str, sbatch: Sequence[str] | None, srun: Sequence[str] | None) -> slurm.Options:
    """Return the options for Slurm.

    Args:
        launcher: that starts the run.
        sbatch: options of sbatch, as typed.
        srun: options of srun, as typed.

    Raises:
        UnsupportedError: there are some, and Slurm is not what starts the run.
    """
    for flag, given in (("--sbatch", sbatch), ("--srun", srun)):
        if given and launcher != "slurm":
            raise UnsupportedError(
                "conflicting-options",
                f"{flag}={given[0]} is for --launcher slurm, not {launcher}; give both or neither",
            )
    return slurm.Options(sbatch or (), srun or ())


def _submit(job: Command, print_only: bool, as_json: bool) -> None:
    """Submit a run's job, or print the command and the batch file."""
    if as_json and print_only:
        print_json({"command": list(job.words), "script": str(slurm.batch_file(BATCH_FILE))})
    elif print_only:
        typer.echo(slurm.printed([job], BATCH_FILE))
    else:
        number = slurm.submit(job)
        if as_json:
            print_json({"job": number})
        else:
            typer.echo(f"submitted as job {number}")


def check_script_flags(run: Run) -> None:
    """Raises ConfigError when Megatron would refuse a run's flags on every rank. A script of the user's own may know more."""
    if run.script is None:
        from megatron_pipemem.mcore.known_flags import check_flags

        check_flags(run.flags)
