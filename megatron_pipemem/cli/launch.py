"""``pipemem launch``, ``init`` and ``grid``: write a run file, start a run, or many that differ in a few keys."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from megatron_pipemem.cli.common import INTERRUPTED, console, duration, print_json, report_error, report_note, showing
from megatron_pipemem.cli.options import Json, Yes, at_least_one, check_output, check_port
from megatron_pipemem.cli.report import show
from megatron_pipemem.config import layout
from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.loading import load, settings_of, typed, write_yaml
from megatron_pipemem.config.model import Model
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_writable, write_whole
from megatron_pipemem.launch import slurm
from megatron_pipemem.launch.command import Command, Nodes, command, min_nodes, ranks_per_node
from megatron_pipemem.launch.feasibility import check_data, check_devices, feasible, refusal
from megatron_pipemem.launch.grid.local import LocalRunner
from megatron_pipemem.launch.grid.points import GridPoint, label, load_points
from megatron_pipemem.launch.grid.store import Result, Store, store_of_point
from megatron_pipemem.launch.slurm import Options, batch_file, check_here, printed
from megatron_pipemem.mcore import INSTALL, is_installed
from megatron_pipemem.planner.memory import request_of, schedule_of
from megatron_pipemem.planner.space import OF_REPLICAS
from megatron_pipemem.schedule.display import Listener, listening
from megatron_pipemem.schedule.options import STOCK

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
    """Return the options for Slurm."""
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


_MICROBATCHES = 8  # per pipeline rank
_COMMENTS = dict(
    parallelism="what pipemem plan chooses",
    schedule=f"see pipemem schedules; {STOCK} is Megatron's own",
    training="data: the prefix of a Megatron dataset (PREFIX.bin and PREFIX.idx), or mock",
    megatron="any other flag of the training script",
    output="of reports, timelines and checkpoints",
)


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model by name, as llama3-8b, or its YAML file.")],
    devices: Annotated[
        int, typer.Option("--devices", "-p", callback=at_least_one, help="Pipeline ranks; 1 for no pipeline.")
    ] = 4,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks, of the data-parallel ones.")] = 1,
    schedule: Annotated[str, typer.Option(help="One of `pipemem schedules`, or `stock`.")] = "v-half",
    cluster: Annotated[str, typer.Option(help="A cluster by name or YAML file.")] = "h100-80g",
    output: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="By default MODEL.yaml, here.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run file to begin with: a model, cut as asked, on as few nodes as its ranks fill.

    `pipemem plan` finds better cuts and schedules for it, and `pipemem launch` starts it. A run that does not fit is
    written too, with a note.

    Examples:
        # 32 devices
        pipemem init llama3-70b -p 4 --tp 8
        # a model with experts
        pipemem init qwen3-30b-a3b -p 4 --dp 4 --ep 4 --output mine.yaml
        # without a GPU
        pipemem init tiny-gpt --cluster cpu
    """
    path = output or Path(f"{Path(model).stem if model.endswith(('.yaml', '.yml')) else model}.yaml")
    check_output(path, (".yaml", ".yml"), "a run")
    if path.exists():
        raise UnsupportedError("exists-already", f"{path} is there already; choose another --output")
    cut: dict[str, Any] = {"tp": tp, "pp": devices, "dp": dp, **({"ep": ep} if ep > 1 else {}), "micro_batch": 1}
    cut |= {"global_batch": _MICROBATCHES * devices * dp, "sequence_parallel": tp > 1}
    flags: dict[str, Any] = {"lr": 1e-4}
    raw: dict[str, Any] = dict(
        model=_name(model, path),
        cluster=_name(cluster, path),
        precision="bf16",
        parallelism=cut,
        schedule={"name": schedule if devices > 1 else STOCK},
        training={"iterations": 20, "save_interval": 0, "data": "mock"},
        megatron=flags,
        output=f"out/runs/{path.stem}",
    )
    run = _completed(raw, flags, load(model, Model), load(cluster, Cluster))
    reason = feasible(run)
    write_whole(path, _text(raw, path))
    if as_json:
        print_json({"output": str(path), "run": settings_of(run), "reason": reason})
        return
    if reason is not None:
        report_note(f"{path}: {reason}")
    console().print(str(path), soft_wrap=True, markup=False)


def _name(given: str, path: Path) -> str:
    """Return the name of a model or cluster as it is written in a file at this path."""
    return os.path.relpath(given, path.parent) if given.endswith((".yaml", ".yml")) else given


def _completed(raw: dict[str, Any], flags: dict[str, Any], model: Model, cluster: Cluster) -> Run:
    """Add the keys and flags that depend on the model and the cluster, and return the run."""
    if cluster.backend == "gloo":
        raw["precision"] = "fp32"
    else:
        flags |= OF_REPLICAS
    run = typed(raw | {"model": settings_of(model), "cluster": settings_of(cluster)}, Run)
    nodes = min_nodes(run)
    if nodes != cluster.nodes:
        raw["cluster"] = {"base": raw["cluster"], "nodes": nodes}
        run = replace(run, cluster=replace(cluster, nodes=nodes))
    stages = schedule_of(run, request_of(run)).placement.model_stages
    flags |= layout.flags(model, layout.even(model, stages))  # where Megatron has to be told
    return replace(run, megatron=flags)


def _text(raw: dict[str, Any], path: Path) -> str:
    """Return the text of a run file, with comments for its next reader."""
    lines = [
        "# To go on (docs/launching.md has all keys):",
        f"#     pipemem plan {path}",
        f"#     pipemem launch {path} --print",
        f"#     pipemem launch {path} --launcher slurm --print",
    ]
    for key, value in raw.items():
        lines += [f"# {_COMMENTS[key]}"] if key in _COMMENTS else []
        lines.append(write_yaml({key: value}, flow=isinstance(value, dict)).rstrip())
    return "\n".join(lines) + "\n"


Launcher = Literal["local", "slurm", "print"]


def grid(
    context: typer.Context,
    grid_file: Annotated[
        Path, typer.Argument(metavar="GRID.yaml", help="What to vary of which run; see configs/grids.")
    ],
    launcher: Annotated[
        Launcher, typer.Option(help="Start points here, submit an array job, or print the commands.")
    ] = "local",
    max_parallel: Annotated[int, typer.Option(min=1, help="Points at a time.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the points of the folder that have no result, or failed.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder; by default out/grids/NAME.")] = None,
    overrides: Set = None,
    sbatch: Sbatch = None,
    srun: Srun = None,
    print_only: PrintOnly = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Train every point of a grid and compare them.

    Points that cannot work are left out before anything starts, with the reason. Every point has a folder with its run,
    its log and its result; one that fails does not stop the others. The comparison is that of `pipemem report`. The exit
    code is 1 when some point failed, or none could run.

    Examples:
        # every point, here
        pipemem grid configs/grids/tiny-cpu.yaml
        # as array jobs
        pipemem grid grid.yaml --launcher slurm --max-parallel 4 --sbatch=--partition=gpu
        # what that would submit
        pipemem grid grid.yaml --launcher slurm --print
        # what has no result, or failed
        pipemem grid grid.yaml --resume
    """
    options = slurm_options(launcher, sbatch, srun)
    print_only = print_only or launcher == "print"
    if launcher == "slurm" and not print_only:
        check_here()
    store = Store(output or Path("out") / "grids" / grid_file.stem)
    if not print_only:
        store.check_place()
    points = load_points(grid_file, overrides or (), yes)
    for point in points:
        if point.run is not None:
            check_script_flags(point.run)
    if print_only:
        if launcher == "slurm":
            _print_jobs(points, store, max_parallel, options, as_json)
        else:
            _print_commands(points, store, as_json)
        return
    progress = Console(stderr=True, highlight=False)
    with store.claimed():
        _write_down(store, grid_file, points, resume, progress)
        typed = [word for word in context.obj if word != "--resume"]
        again = shlex.join(["pipemem", "grid", *typed, "--resume"])
        try:
            missing = _train(store, launcher, max_parallel, options, progress)
        except (KeyboardInterrupt, SystemExit) as stop:
            left = len(store.open_points())
            jobs = "; its jobs stay in Slurm's queue" if launcher == "slurm" else ""
            report_error(f"interrupted with {left} of {len(points)} points left or failed{jobs}; go on with: {again}")
            code = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else INTERRUPTED
            raise typer.Exit(code) from None
    for index in missing:
        report_note(
            f"{label(store.settings()[index])}: ended without a result, cancelled or killed; start it again with: {again}"
        )
    results = show(store, store.folder / "report.png", as_json)
    statuses = {result.status for result in results if result is not None}
    if missing or "failed" in statuses or "done" not in statuses:
        raise typer.Exit(1)


def _write_down(store: Store, grid_file: Path, points: Sequence[GridPoint], resume: bool, progress: Console) -> None:
    """Keep the points in the grid's folder, and say which are left out."""
    if not store.exists():
        store.create(grid_file, points)
    elif resume:
        store.resume(points)
    else:
        raise UnsupportedError(
            "exists-already",
            f"{store.folder} holds a grid already; --resume goes on with it, or choose another --output",
        )
    for result in store.results():
        if result is not None and result.status == "infeasible":
            progress.print(f"{label(result.settings)}: not started, {result.reason}", soft_wrap=True, markup=False)


def grid_result(
    place: Annotated[Path, typer.Argument(help="FOLDER/points/007")],
    exit_code: Annotated[int, typer.Option(help="Of its training.")],
) -> None:
    """Collect the result of a grid's point whose training has ended; grid.sbatch calls this."""
    store, index = store_of_point(place)
    result = store.finish(index, exit_code)
    typer.echo(f"{label(result.settings)}: {result.status}{f', {result.reason}' if result.reason else ''}")


def _train(store: Store, launcher: Launcher, max_parallel: int, options: Options, console: Console) -> list[int]:
    """Start what is open. Returns points without a result."""
    settings = store.settings()

    def tell_ending(ending: Sequence[int]) -> None:
        names = "; ".join(label(settings[index]) for index in ending)
        report_note(f"waiting for Slurm to end {names}; if it never does (squeue shows CG), a node needs attention")

    there = slurm.under_way(store, tell_ending) if launcher == "slurm" else set()  # first: who leaves has a result
    todo = store.open_points()
    with showing("starting points") as show_line:
        standing = _Standing([label(each) for each in settings], len(settings) - len(todo), show_line, console)
        if launcher == "local":
            with _terminated_as_interrupt():
                LocalRunner(store, standing.take).train(todo, max_parallel, standing.stop)
            return []
        fresh = [index for index in todo if index not in there]
        if fresh:
            jobs = slurm.submit_points(store, fresh, max_parallel, options)
            console.print(
                f"submitted as job {', '.join(jobs)}; interrupting this leaves it in the queue", soft_wrap=True
            )
        with listening(standing.hear):
            return slurm.wait_for(store, todo, standing.take)


class _Standing:
    """Tell which points run and what is left, whenever that changes, from any thread; ``done`` had ended before."""

    def __init__(self, labels: Sequence[str], done: int, show: Listener, console: Console) -> None:
        self._labels, self._done, self._show, self._console = labels, done, show, console
        self._running: dict[int, str] = {}
        self._queue = ""
        self._before, self._started = done, time.monotonic()
        self._guard = threading.Lock()
        self._show(self._line())

    def take(self, index: int, result: Result | None) -> None:
        """Take note that a point has started, or ended with a result."""
        name = self._labels[index]
        with self._guard:
            if result is None:
                self._running[index] = name
            else:
                self._running.pop(index, None)
                self._done += 1
            line = self._line()
            self._show(line)
        if result is not None:
            reached = f"{result.tokens_per_second:,.0f} tokens/s" if result.tokens_per_second else result.reason
            self._console.print(f"{name}: {result.status}, {reached}", soft_wrap=True, markup=False)
        elif not self._console.is_terminal:  # there, the line says so
            self._console.print(line, soft_wrap=True, markup=False)

    def hear(self, queue: str) -> None:
        """Take note of what Slurm says of its queue, and show it."""
        self._queue = queue
        self._show(self._line())

    def stop(self, running: int) -> None:
        """Take note that all is being ended."""
        self._console.print(f"ending {running} points that run", soft_wrap=True)

    def _line(self) -> str:
        ended, left = self._done - self._before, len(self._labels) - self._done
        now = self._queue or (f"now {'; '.join(self._running.values())}" if self._running else "")
        pace = (time.monotonic() - self._started) / ended if ended else 0.0
        rest = f"about {duration(pace * left)} left" if ended and left else ""
        return ", ".join(filter(None, (f"{self._done} of {len(self._labels)} points have ended", now, rest)))


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Let a polite kill end the points too, as an interrupt does."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_commands(points: Sequence[GridPoint], store: Store, as_json: bool) -> None:
    """Print the commands that would start each point by hand."""
    rows = []
    for point in points:
        changes = point.changes | {"output": os.path.relpath(store.place(point.index))}
        sets = [word for key, value in changes.items() for word in ("--set", f"{key}={_yaml(value)}")]
        words = ["pipemem", "launch", str(point.base), *sets]
        rows.append({"settings": point.settings, "reason": point.reason, "command": shlex.join(words)})
    if as_json:
        print_json(rows)
        return
    for row in rows:
        typer.echo(row["command"] if row["reason"] is None else f"# {row['command']}  # {row['reason']}")


def _print_jobs(points: Sequence[GridPoint], store: Store, max_parallel: int, options: Options, as_json: bool) -> None:
    """Print the commands that would submit the points, and the batch file."""
    runs = {point.index: point.run for point in points if point.run is not None and point.reason is None}
    jobs = slurm.array_jobs(store.folder, runs, max_parallel, options)
    left_out = {label(point.settings): point.reason for point in points if point.reason is not None}
    if as_json:
        rows = [{"points": list(members), "command": list(job.words)} for members, job in jobs.items()]
        print_json({"jobs": rows, "left_out": left_out, "script": str(batch_file(slurm.GRID_BATCH_FILE))})
        return
    for name, reason in left_out.items():
        typer.echo(f"# left out: {name}: {reason}")
    typer.echo(printed(jobs.values(), slurm.GRID_BATCH_FILE))


def _yaml(value: object) -> str:
    """Write a value as JSON, which is YAML too."""
    return value if isinstance(value, str) else json.dumps(value)
