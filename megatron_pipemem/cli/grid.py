"""``pipemem grid``: many runs that differ in a few keys."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_pipemem.cli.common import Json, print_json, report_note
from megatron_pipemem.cli.launch import Set
from megatron_pipemem.cli.report import show
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.planner.grid import slurm
from megatron_pipemem.planner.grid.config import Point, label, load_points
from megatron_pipemem.planner.grid.local import LocalRunner
from megatron_pipemem.planner.grid.results import Result
from megatron_pipemem.planner.grid.store import Store, store_of_point

Launcher = Literal["local", "slurm", "print"]
_ROOT = Path(__file__).parents[2]


def grid(
    grid_file: Annotated[
        Path, typer.Argument(metavar="GRID.yaml", help="What to vary of which run; see configs/grids.")
    ],
    launcher: Annotated[
        Launcher, typer.Option("--launcher", help="Start points here, submit an array job, or print the commands.")
    ] = "local",
    max_parallel: Annotated[int, typer.Option("--max-parallel", min=1, help="Points at a time.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the points of the folder that have no result, or failed.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Folder; by default out/grids/NAME.")] = None,
    overrides: Set = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="For sbatch, as in --sbatch=--partition=gpu; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train every point of a grid and compare them.

    Points that cannot work are left out before anything starts, with the reason. Every point has a folder with its run,
    its log and its result; one that fails does not stop the others. The comparison is that of `pipemem report`. The exit
    code is 1 when some point failed, or none could run.
    """
    points = load_points(grid_file, overrides or ())
    store = Store(output or Path("out") / "grids" / grid_file.stem)
    if launcher == "print":
        _print_commands(points, store, as_json)
        return
    progress = Console(stderr=True, highlight=False)
    with store.claimed():
        if store.exists():
            if not resume:
                raise UnsupportedError(
                    f"{store.folder} holds a grid already; --resume goes on with it, or choose another --output"
                )
            store.resume(points)
        else:
            store.create(grid_file, points)
        for result in store.results():
            if result is not None and result.status == "infeasible":
                progress.print(f"{label(result.settings)}: not started, {result.reason}", soft_wrap=True, markup=False)
        missing = _train(store, launcher, max_parallel, sbatch or (), progress)
    for index in missing:
        report_note(
            f"{label(store.settings()[index])}: ended without a result, cancelled or killed; --resume starts it again"
        )
    results = show(store, store.folder / "report.png", as_json)
    statuses = {result.status for result in results if result is not None}
    if missing or "failed" in statuses or "done" not in statuses:
        raise typer.Exit(1)


def grid_result(
    place: Annotated[Path, typer.Argument(help="FOLDER/points/007")],
    exit_code: Annotated[int, typer.Option("--exit-code", help="Of its training.")],
) -> None:
    """Collect the result of a grid's point whose training has ended; grid.sbatch calls this."""
    store, index = store_of_point(place)
    result = store.finish(index, exit_code)
    typer.echo(f"{label(result.settings)}: {result.status}{f', {result.reason}' if result.reason else ''}")


def _train(store: Store, launcher: Launcher, max_parallel: int, sbatch: Sequence[str], console: Console) -> list[int]:
    """Start what is open. Returns points without a result."""
    settings = store.settings()

    def tell_ending(ending: Sequence[int]) -> None:
        names = "; ".join(label(settings[index]) for index in ending)
        report_note(f"waiting for Slurm to end {names}; if it never does (squeue shows CG), a node needs attention")

    there = slurm.under_way(store, tell_ending) if launcher == "slurm" else set()  # first: who leaves has a result
    todo = store.open_points()
    with _progress(console, len(settings), len(settings) - len(todo)) as bar:

        def tell(index: int, result: Result | None) -> None:
            if result is None:
                return
            bar.advance(bar.task_ids[0])
            reached = f"{result.tokens_per_second:,.0f} tokens/s" if result.tokens_per_second else result.reason
            bar.console.print(f"{label(settings[index])}: {result.status}, {reached}", soft_wrap=True, markup=False)

        if launcher == "local":
            with _terminated_as_interrupt():
                LocalRunner(store, tell).train(todo, max_parallel)
            return []
        fresh = [index for index in todo if index not in there]
        if fresh:
            jobs = slurm.submit(store, fresh, max_parallel, _ROOT / "scripts" / "slurm" / "grid.sbatch", sbatch)
            bar.console.print(
                f"submitted as job {', '.join(jobs)}; interrupting this leaves it in the queue", soft_wrap=True
            )
        return slurm.wait(store, todo, tell)


@contextmanager
def _progress(console: Console, total: int, completed: int) -> Iterator[Progress]:
    columns = (TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        bar.add_task("points", total=total, completed=completed)
        yield bar


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """A polite kill ends the points too, as an interrupt does."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_commands(points: Sequence[Point], store: Store, as_json: bool) -> None:
    """What would start each point by hand."""
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


def _yaml(value: object) -> str:
    """JSON is YAML too."""
    return value if isinstance(value, str) else json.dumps(value)
