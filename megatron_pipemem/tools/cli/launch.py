"""``pipemem init``, ``launch`` and ``grid``: write a run file, start a run, or start many runs with varied keys."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.exits import INTERRUPTED, report_error
from megatron_pipemem.files import check_writable, write_whole
from megatron_pipemem.mcore import INSTALL, is_installed
from megatron_pipemem.model import layout
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.display import Listener, listening
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.tools.cli.common import (
    duration,
    print_json,
    print_lines,
    report_note,
    showing,
)
from megatron_pipemem.tools.cli.options import PORT, Json, Yes, at_least_one, check_output
from megatron_pipemem.tools.cli.report import show
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER, Cluster
from megatron_pipemem.tools.config.loading import load, settings_of, typed, write_yaml
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.console import Console
from megatron_pipemem.tools.launch import kubernetes, slurm
from megatron_pipemem.tools.launch.command import Command, Nodes, command, min_nodes, ranks_per_node
from megatron_pipemem.tools.launch.feasibility import check_data, check_devices, feasible, refusal
from megatron_pipemem.tools.launch.grid.local import LocalRunner
from megatron_pipemem.tools.launch.grid.points import GridPoint, label, load_points
from megatron_pipemem.tools.launch.grid.store import Result, Store, store_of_point
from megatron_pipemem.tools.launch.slurm import Options, batch_file, check_here, printed
from megatron_pipemem.tools.planner.run_prices import request_of, schedule_of
from megatron_pipemem.tools.planner.space import OF_REPLICAS, Limits, cuts
from megatron_pipemem.tools.planner.step import least_static

Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of the file, as in pp=8; repeatable."),
]
PrintOnly = Annotated[bool, typer.Option("--print", help="Print the commands or jobs, and start nothing.")]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(metavar="OPTION", help="Option for sbatch, as in --sbatch=--partition=gpu; repeatable."),
]
Srun = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION",
        help="Option for srun, as in --srun=--container-image=IMAGE or --srun=--mpi=pmix; repeatable.",
    ),
]
BATCH_FILE = "pretrain_gpt.sbatch"

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file; see configs/runs.")]


def unfinished(run_file: RunFile, overrides: Set = None) -> None:
    """Exit with 0 if the run can resume from a checkpoint, else with 1. Batch files call this."""
    raise typer.Exit(0 if load(run_file, Run, overrides or ()).is_unfinished else 1)


def launch(
    run_file: RunFile,
    overrides: Set = None,
    launcher: Annotated[
        Literal["local", "slurm", "kubernetes"],
        typer.Option(
            metavar="WHERE",
            help="local: start this node's ranks; slurm: submit the run as a job; kubernetes: write a manifest.",
        ),
    ] = "local",
    image: Annotated[str, typer.Option(help="Image of the pods, for --launcher kubernetes.")] = "pipemem",
    print_only: PrintOnly = False,
    nodes: Annotated[
        int | None,
        typer.Option(envvar="NNODES", help="Nodes of the run. Default: as few as its ranks fill."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(envvar="NODE_RANK", help="Index of this node, from 0; needed for several nodes.")
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
    """Start this node's ranks of a run under torchrun. Call it once on every node.

    A run that cannot work is refused before anything starts. The command and the run's log go to standard output. Its
    report, timelines and checkpoints go to its `output` folder.

    Examples:
        # print the command instead of starting it
        pipemem launch configs/runs/tiny-cpu.yaml --print
        # change keys of the file
        pipemem launch run.yaml --set pp=8 --set schedule=v-half
        # start on each of two nodes
        pipemem launch run.yaml --nodes 2 --node-rank 0 --master-addr node0
        # as a PyTorchJob
        pipemem launch run.yaml --launcher kubernetes --image registry/pipemem:0.1.0 --print
        # submit as a job, in a container
        pipemem launch run.yaml --launcher slurm --sbatch=--time=4:00:00 --srun=--container-image=IMAGE.sqsh
    """
    options = slurm_options(launcher, sbatch, srun)
    run = load(run_file, Run, overrides or ())
    if (reason := refusal(run, yes)) is not None:
        raise UnsupportedError(reason.code, f"{run_file}: {reason}")
    if launcher == "kubernetes" and not print_only:
        raise UnsupportedError(
            "needs-option", "--launcher kubernetes writes a manifest; pass --print, and give it to kubectl apply -f -"
        )
    if launcher != "slurm" and not (print_only or as_json):
        check_devices(run)
        if run.script is None and not is_installed():
            raise UnsupportedError("not-installed", INSTALL)
    check_script_flags(run)
    if nodes is not None and nodes < 1:
        raise UnsupportedError(
            "bad-number",
            f"--nodes {nodes}: give at least 1, or leave --nodes out to use as few nodes as the ranks fill",
        )
    count = min_nodes(run) if nodes is None else nodes
    if nodes is None and count < run.cluster.nodes:
        report_note(f"the run uses {count} of the cluster's {run.cluster.nodes} nodes")
    if launcher == "slurm":
        sets = [word for text in overrides or () for word in ("--set", text)]
        job = slurm.job(BATCH_FILE, slurm.size(run, count), options, [str(run_file), *sets])
        _submit(job, print_only, as_json)
        return
    if launcher == "kubernetes":
        documents = kubernetes.manifest(run, count, image)
        if as_json:
            print_json(documents)
        else:
            print_lines(kubernetes.as_yaml(documents).rstrip())
        return
    check_data(run)
    PORT.read("--master-port", master_port)
    if node_rank is not None and not 0 <= node_rank < count:
        raise UnsupportedError("bad-number", f"--node-rank {node_rank}: the run has nodes 0 to {count - 1}")
    launch_nodes = Nodes(count, node_rank, master_addr, master_port)
    started = command(run, launch_nodes.with_variables() if print_only or as_json else launch_nodes)
    if as_json:
        facts = {"nodes": count, "ranks_per_node": ranks_per_node(run, count), "output": run.output}
        print_json({"command": list(started.words), "environment": dict(started.environment), **facts})
    elif print_only:
        print_lines(started.text())
    else:
        if not node_rank:  # node 0 writes the report when the training is done
            check_writable(run.report)
            print_lines(started.text())
        sys.stdout.flush()
        os.execvpe(started.words[0], started.words, {**os.environ, **started.environment})


def slurm_options(launcher: str, sbatch: Sequence[str] | None, srun: Sequence[str] | None) -> slurm.Options:
    """Return the options for sbatch and srun. Raise an ``UnsupportedError`` if they are given for another launcher."""
    for flag, values in (("--sbatch", sbatch), ("--srun", srun)):
        if values and launcher != "slurm":
            raise UnsupportedError(
                "conflicting-options",
                f"{flag}={values[0]} is for --launcher slurm, not {launcher}; leave {flag} out, or pass --launcher "
                "slurm",
            )
    return slurm.Options(sbatch or (), srun or ())


def _submit(job: Command, print_only: bool, as_json: bool) -> None:
    """Submit a run to Slurm, or print the command and the batch file if ``print_only``."""
    if as_json and print_only:
        print_json({"command": list(job.words), "script": str(slurm.batch_file(BATCH_FILE))})
    elif print_only:
        print_lines(slurm.printed([job], BATCH_FILE))
    else:
        number = slurm.submit(job)
        if as_json:
            print_json({"job": number})
        else:
            typer.echo(f"submitted as job {number}")


def check_script_flags(run: Run) -> None:
    """Raise a ConfigError if Megatron does not know a flag of the run. Runs with a script of their own are not
    checked.
    """
    if run.script is None:
        from megatron_pipemem.tools.megatron.known_flags import check_flags

        check_flags(run.flags)


_MICROBATCHES = 8  # per pipeline rank
_COMMENTS = dict(
    tp="pipemem plan finds the fastest sizes",
    schedule=f"see pipemem schedules; {STOCK} is Megatron's own",
    train_iters="tokens are made up; data_path: PREFIX trains on a Megatron dataset (PREFIX.bin and PREFIX.idx)",
    lr="any other argument of Megatron",
    output="folder of reports, timelines and checkpoints",
)
"""Comments of a new run file, each above its key."""


def init(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model by name, such as llama3-8b, or its YAML file.")
    ],
    devices: Annotated[
        int, typer.Option("--devices", "-p", callback=at_least_one, help="Pipeline ranks; 1 for no pipeline.")
    ] = 4,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks among the data-parallel ones.")] = 1,
    schedule: Annotated[str, typer.Option(help="One of `pipemem schedules`, or `stock`.")] = "v-half",
    cluster: Annotated[str, typer.Option(help="A cluster by name or YAML file.")] = DEFAULT_CLUSTER,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Run file. Default: MODEL.yaml in this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a first run file: a model, its parallelism, and as few nodes as its ranks fill.

    `pipemem plan` finds a better parallelism and schedule for it, and `pipemem launch` starts it. A run that does not fit
    is written too, with a note.

    Examples:
        # use 32 devices
        pipemem init llama3-70b -p 4 --tp 8
        # use a model with experts
        pipemem init qwen3-30b-a3b -p 4 --dp 4 --ep 4 --output mine.yaml
        # run without a GPU
        pipemem init tiny-gpt --cluster cpu
    """
    path = output or Path(f"{Path(model).stem if model.endswith(('.yaml', '.yml')) else model}.yaml")
    check_output(path, (".yaml", ".yml"), "a run")
    if path.exists():
        raise UnsupportedError("exists-already", f"{path} exists already; choose another --output")
    raw: dict[str, Any] = {
        "model": _name(model, path),
        "cluster": _name(cluster, path),
        "tp": tp,
        "pp": devices,
        "dp": dp,
        **({"ep": ep} if ep > 1 else {}),
        "micro_batch": 1,
        "global_batch": _MICROBATCHES * devices * dp,
        "sequence_parallel": tp > 1,
        "schedule": schedule if devices > 1 else STOCK,
        "train_iters": 20,
        "save_interval": 0,
        "lr": 1e-4,
        "output": f"out/runs/{path.stem}",
    }
    run = _completed(raw, load(model, Model), load(cluster, Cluster))
    reason = feasible(run)
    write_whole(path, _text(raw, path))
    if as_json:
        print_json({"output": str(path), "run": settings_of(run), "reason": reason})
        return
    if reason is not None:
        report_note(f"{path}: {reason}")
    print_lines(path)
    starts = "" if reason is not None else f"; pipemem launch {path} starts it"
    ranks = f"pipemem plan {path} ranks other parallel sizes and schedules{starts}"
    if not any(least_static(cut) <= run.cluster.memory_bytes for cut in cuts(run, Limits(), Counter())):
        ranks = f"no parallel sizes fit on {run.cluster.num_devices} devices; with more nodes in {path}, {ranks}"
    report_note(ranks)


def _name(name_or_path: str, path: Path) -> str:
    """Return the name of a model or cluster for the run file. A path to a YAML file is made relative to the run
    file.
    """
    return os.path.relpath(name_or_path, path.parent) if name_or_path.endswith((".yaml", ".yml")) else name_or_path


def _completed(raw: dict[str, Any], model: Model, cluster: Cluster) -> Run:
    """Add to ``raw`` the settings that follow from model and cluster, and return the whole run.

    The settings are the precision, the number of nodes, and flags such as the layout.
    """
    flags: dict[str, Any] = {"bf16": False} if cluster.backend == "gloo" else {"bf16": True} | OF_REPLICAS
    run = typed(raw | {"model": settings_of(model), "cluster": settings_of(cluster)}, Run)
    nodes = min_nodes(run)
    if nodes != cluster.nodes:
        raw["cluster"] = {"base": raw["cluster"], "nodes": nodes}
        run = replace(run, cluster=replace(cluster, nodes=nodes))
    stages = schedule_of(run, request_of(run)).placement.model_stages
    flags |= layout.flags(model, layout.even(model, stages))  # empty if Megatron cuts the model evenly itself
    raw |= {name.replace("-", "_"): value for name, value in flags.items()} | {"output": raw.pop("output")}
    return replace(run, flags=run.flags | flags)


def _text(raw: dict[str, Any], path: Path) -> str:
    """Return the text of a run file, with comments that explain its keys and the next commands."""
    lines = [
        "# Next steps (docs/launching.md has all keys):",
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
        Path, typer.Argument(metavar="GRID.yaml", help="File with a run and the keys to vary; see configs/grids.")
    ],
    launcher: Annotated[
        Launcher, typer.Option(help="Start the points here, submit them as array jobs, or print the commands.")
    ] = "local",
    max_parallel: Annotated[int, typer.Option(min=1, help="Number of points that run at the same time.")] = 1,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue with the points of the folder that have no result or have failed."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder. Default: out/grids/NAME.")] = None,
    overrides: Set = None,
    sbatch: Sbatch = None,
    srun: Srun = None,
    print_only: PrintOnly = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Train every point of a grid and compare them.

    A point is one combination of the values that GRID.yaml gives. Points that cannot run are left out before anything
    starts, with the reason. Every point has a folder with its run file, its log and its result. A point that fails does
    not stop the others. At the end, points are compared as in `pipemem report`. The exit code is 1 if a point failed or
    no point could run.

    Examples:
        # train every point on this machine
        pipemem grid configs/grids/tiny-cpu.yaml
        # submit the points as array jobs
        pipemem grid grid.yaml --launcher slurm --max-parallel 4 --sbatch=--partition=gpu
        # print those jobs instead of submitting them
        pipemem grid grid.yaml --launcher slurm --print
        # train the points that have no result or have failed
        pipemem grid grid.yaml --resume
    """
    options = slurm_options(launcher, sbatch, srun)
    print_only = print_only or launcher == "print"
    if launcher == "slurm" and not print_only:
        check_here()
    store = Store(output or Path("out") / "grids" / grid_file.stem)
    if not print_only:
        store.check_place()
    with showing("checking the points of the grid"):
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
    progress = Console(stderr=True)
    with store.claimed():
        _write_down(store, grid_file, points, resume, progress)
        typed = [word for word in context.obj if word != "--resume"]
        again = shlex.join(["pipemem", "grid", *typed, "--resume"])
        try:
            missing = _train(store, launcher, max_parallel, options, progress)
        except (KeyboardInterrupt, SystemExit) as stop:
            left = len(store.open_points())
            jobs = "; its jobs stay in Slurm's queue" if launcher == "slurm" else ""
            report_error(
                f"interrupted with {left} of {len(points)} points not finished or failed{jobs}; continue with: {again}"
            )
            code = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else INTERRUPTED
            raise typer.Exit(code) from None
    for index in missing:
        report_note(
            f"{label(store.settings()[index])}: ended without a result, cancelled or killed; restart it with: {again}"
        )
    results = show(store, store.folder / "report.png", as_json)
    statuses = {result.status for result in results if result is not None}
    if missing or "failed" in statuses or "done" not in statuses:
        raise typer.Exit(1)


def _write_down(store: Store, grid_file: Path, points: Sequence[GridPoint], resume: bool, progress: Console) -> None:
    """Write the points of a new grid to its folder. Print the points that cannot run.

    With ``resume``, the folder may have a grid. Then write only the points that could not run before.
    Without it, an existing grid raises an UnsupportedError.
    """
    if not store.exists():
        store.create(grid_file, points)
    elif resume:
        store.resume(points)
    else:
        raise UnsupportedError(
            "exists-already",
            f"{store.folder} already holds a grid; continue it with --resume, or choose another --output",
        )
    for result in store.results():
        if result is not None and result.status == "infeasible":
            progress.print(f"{label(result.settings)}: not started, {result.reason}", soft_wrap=True, markup=False)


def grid_result(
    place: Annotated[Path, typer.Argument(help="FOLDER/points/007")],
    exit_code: Annotated[int, typer.Option(help="Exit code of its training.")],
) -> None:
    """Collect the result of a grid point whose training has ended. grid.sbatch calls this."""
    store, index = store_of_point(place)
    result = store.finish(index, exit_code)
    print_lines(f"{label(result.settings)}: {result.status}{f', {result.reason}' if result.reason else ''}")


def _train(store: Store, launcher: Launcher, max_parallel: int, options: Options, console: Console) -> list[int]:
    """Start the grid points that have no result or have failed, and wait until they end.

    Return the indices of the points that ended without a result, as can happen under Slurm.
    """
    settings = store.settings()

    def tell_ending(ending: Sequence[int]) -> None:
        names = "; ".join(label(settings[index]) for index in ending)
        report_note(f"waiting for Slurm to end {names}; if squeue keeps showing CG, a node needs attention")

    # Ask Slurm first: a point that leaves its queue later has a result by then.
    there = slurm.under_way(store, tell_ending) if launcher == "slurm" else set()
    todo = store.open_points()
    with showing("starting points") as show_line:
        standing = _Standing([*map(label, settings)], len(settings) - len(todo), show_line, console)
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
    """Shows the numbers of grid points that have ended and that exist, and those that run. Threads may call it.

    ``labels`` has a text per point. ``done`` is the number of points that need not run, because they have a result.
    """

    def __init__(self, labels: Sequence[str], done: int, show: Listener, console: Console) -> None:
        self._labels, self._done, self._show, self._console = labels, done, show, console
        self._running: dict[int, str] = {}
        self._queue = ""
        self._before, self._started = done, time.monotonic()
        self._guard = threading.Lock()
        self._show(self._line())

    def take(self, index: int, result: Result | None) -> None:
        """Show that point ``index`` has started if ``result`` is None, or else has ended with this result."""
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
        elif not self._console.is_terminal:  # on a terminal, the line of progress shows the start
            self._console.print(line, soft_wrap=True, markup=False)

    def hear(self, queue: str) -> None:
        """Show ``queue``, a sentence about Slurm's queue, as it is, in the line of progress."""
        self._queue = queue
        self._show(self._line())

    def stop(self, running: int) -> None:
        """Print that this number of running points is being stopped."""
        self._console.print(f"ending {running} running points", soft_wrap=True)

    def _line(self) -> str:
        ended, left = self._done - self._before, len(self._labels) - self._done
        now = self._queue or (f"now {'; '.join(self._running.values())}" if self._running else "")
        seconds_per_point = (time.monotonic() - self._started) / ended if ended else 0.0
        rest = f"about {duration(seconds_per_point * left)} left" if ended and left else ""
        return ", ".join(filter(None, (f"{self._done} of {len(self._labels)} points have ended", now, rest)))


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise SystemExit while the block runs, so that the points are stopped as after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_commands(points: Sequence[GridPoint], store: Store, as_json: bool) -> None:
    """Print, for each point, the command that starts it without the grid; as a comment with the reason if it cannot run."""
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
        print_lines(row["command"] if row["reason"] is None else f"# {row['command']}  # {row['reason']}")


def _print_jobs(points: Sequence[GridPoint], store: Store, max_parallel: int, options: Options, as_json: bool) -> None:
    """Print the points by their index, those that cannot run, the commands that submit them, and the batch file."""
    runs = {point.index: point.run for point in points if point.run is not None and point.reason is None}
    jobs = slurm.array_jobs(store.folder, runs, max_parallel, options)
    left_out = {label(point.settings): point.reason for point in points if point.reason is not None}
    if as_json:
        rows = [{"points": list(members), "command": list(job.words)} for members, job in jobs.items()]
        print_json({"jobs": rows, "left_out": left_out, "script": str(batch_file(slurm.GRID_BATCH_FILE))})
        return
    for point in points:
        left_out_because = "" if point.reason is None else f": left out: {point.reason}"
        print_lines(f"# {point.index}: {label(point.settings)}{left_out_because}")
    print_lines(
        f"# These commands need the points' run files in {store.folder}, and --print writes none. The command without",
        "# --print writes them and submits the jobs.",
    )
    print_lines(printed(jobs.values(), slurm.GRID_BATCH_FILE))


def _yaml(value: object) -> str:
    """Return a value as YAML in one line: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
