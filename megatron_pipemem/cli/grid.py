"""``pipemem grid``: train many runs that differ in a few keys."""

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
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from megatron_pipemem.cli.common import INTERRUPTED, print_json, report_error, report_note
from megatron_pipemem.cli.launch import PrintOnly, Sbatch, Set, Srun, check_script_flags, slurm_options
from megatron_pipemem.cli.options import Json, Yes
from megatron_pipemem.cli.progress import duration, showing
from megatron_pipemem.cli.report import show
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.grid import slurm
from megatron_pipemem.launch.grid.config import GridPoint, label, load_points
from megatron_pipemem.launch.grid.local import LocalRunner
from megatron_pipemem.launch.grid.results import Result
from megatron_pipemem.launch.grid.store import Store, store_of_point
from megatron_pipemem.launch.slurm import Options, batch_file, check_here, printed
from megatron_pipemem.schedule.display import Listener, listening

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
    """Keep the points in the grid's folder, and say which are left out.

    Raises:
        UnsupportedError: there is a grid already that is not to be resumed, or that has other points.
    """
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
            jobs = slurm.submit(store, fresh, max_parallel, options)
            console.print(
                f"submitted as job {', '.join(jobs)}; interrupting this leaves it in the queue", soft_wrap=True
            )
        with listening(standing.hear):
            return slurm.wait(store, todo, standing.take)


class _Standing:
    """Tell which points run and what is left, whenever that changes, from any thread.

    Args:
        labels: of all points.
        done: how many had ended before.
        show: takes the line that stands for all.
        console: for what becomes of every point.
    """

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
    jobs = slurm.jobs(store.folder, runs, max_parallel, options)
    left_out = {label(point.settings): point.reason for point in points if point.reason is not None}
    if as_json:
        rows = [{"points": list(members), "command": list(job.words)} for members, job in jobs.items()]
        print_json({"jobs": rows, "left_out": left_out, "script": str(batch_file(slurm.BATCH_FILE))})
        return
    for name, reason in left_out.items():
        typer.echo(f"# left out: {name}: {reason}")
    typer.echo(printed(jobs.values(), slurm.BATCH_FILE))


def _yaml(value: object) -> str:
    """Write a value as JSON, which is YAML too."""
    return value if isinstance(value, str) else json.dumps(value)
