"""Submit runs, and the points of a grid, to Slurm with the batch files in ``scripts/slurm``."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.display import shortened, tell
from megatron_pipemem.tools.config.runs import SCRIPTS, Run
from megatron_pipemem.tools.launch.command import Command, min_nodes, ranks_per_node
from megatron_pipemem.tools.launch.grid.store import Result, Store

GRID_BATCH_FILE = "grid.sbatch"
_POLL_SECONDS = 2.0
_COMPLETING, _RUNNING = "CG", "R"
_CONTAINER = "--container-image"


@dataclass(frozen=True)
class Options:
    """A user's own options for Slurm's commands, for example ``--partition=gpu``."""

    sbatch: Sequence[str] = ()  # for the job; they override those in the batch file
    srun: Sequence[str] = ()  # for the training; --container-image runs it in a container


def size(run: Run, nodes: int | None = None) -> tuple[str, ...]:
    """Return the options of sbatch that request the nodes and GPUs of a run.

    ``nodes`` is the number of nodes, by default the smallest number on which the ranks fit. Raise a ConfigError if the
    ranks cannot be shared evenly by the nodes.
    """
    count = nodes or min_nodes(run)
    gpus = ranks_per_node(run, count)
    return (f"--nodes={count}", *(() if run.on_cpu else (f"--gpus-per-node={gpus}",)))


def job(file_name: str, more: Sequence[str], options: Options, arguments: Sequence[str]) -> Command:
    """Return the sbatch command for a batch file of ``scripts/slurm`` with arguments, without running it.

    ``more`` are options of sbatch, which the user's ``options`` override.
    """
    for option in (*options.sbatch, *options.srun):
        if not option.startswith("-"):  # it would become an argument
            raise UnsupportedError(
                "bad-syntax", f"{shortened(option)} is not an option of sbatch or srun; write it as in --partition=gpu"
            )
    surroundings = ["ALL", f"PIPEMEM_ROOT={SCRIPTS.parent}"]
    if not any(option.startswith(_CONTAINER) for option in options.srun):  # a container has an interpreter of its own
        surroundings.append(f"PYTHON={os.environ.get('PYTHON', sys.executable)}")
    words = ["sbatch", *more, f"--export={','.join(surroundings)}", *options.sbatch]
    return Command((*words, str(batch_file(file_name)), *options.srun, *arguments), {})


def batch_file(file_name: str) -> Path:
    """Return the path of a batch file in ``scripts/slurm``."""
    return SCRIPTS / "slurm" / file_name


def printed(jobs: Iterable[Command], file_name: str) -> str:
    """Return the text that ``--print`` shows: the commands, and their batch file as comments."""
    path = batch_file(file_name)
    comments = (f"# {line}".rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    return "\n".join([*(f"{submission.text()}\n" for submission in jobs), f"# {path}:", *comments])


def submit(job: Command) -> str:
    """Submit a job to Slurm, and return the number of the job."""
    sbatch, *words = job.words
    return call([sbatch, "--parsable", *words]).strip().split(";")[0]


def check_here() -> None:
    """Raise an UnsupportedError if Slurm's commands are not installed."""
    for command in ("sbatch", "squeue"):
        if shutil.which(command) is None:
            raise UnsupportedError(
                "not-installed", f"there is no {command} here; run this command where Slurm is installed"
            )


def call(words: Sequence[str]) -> str:
    """Run one of Slurm's commands and return its output. Raise an UnsupportedError if the command fails."""
    check_here()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            "slurm-failed",
            f"{words[0]} failed: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}; correct the cause, and "
            "run this command again",
        )
    return done.stdout


def array_jobs(
    folder: Path, runs: Mapping[int, Run], max_parallel: int, options: Options
) -> dict[tuple[int, ...], Command]:
    """Return the commands that submit the points of a grid, by the numbers of the points that each submits.

    ``runs`` has the runs of the points to submit, by number of the point. Points with equally many nodes and GPUs are
    one array job, of which ``max_parallel`` elements run at a time.
    """
    by_size: dict[tuple[str, ...], list[int]] = {}
    for index, run in runs.items():
        by_size.setdefault(size(run), []).append(index)
    commands = {}
    for nodes, members in by_size.items():
        array = f"--array={','.join(map(str, members))}%{max_parallel}"
        more = (array, *nodes, f"--output={folder}/slurm-%A_%a.log")
        commands[tuple(members)] = job(GRID_BATCH_FILE, more, options, [os.path.realpath(folder)])
    return commands


def submit_points(store: Store, indices: Sequence[int], max_parallel: int, options: Options) -> list[str]:
    """Submit points of a grid, and return the numbers of their jobs."""
    numbers = []
    runs = {index: store.run(index) for index in indices}
    for members, submission in array_jobs(store.folder, runs, max_parallel, options).items():
        for index in members:
            store.discard_result(index)
        numbers.append(submit(submission))
    return numbers


def under_way(store: Store, on_wait: Callable[[list[int]], object]) -> set[int]:
    """Return the numbers of the grid's points that are waiting or running in Slurm's queue.

    First wait until points that Slurm is just ending have left the queue, because a cancelled point has no result. On a broken
    node they may stay for long, so ``on_wait`` is called with their numbers.
    """
    elements = _elements(store)
    if ending := _ending(elements):
        on_wait(ending)
    while _ending(elements):
        time.sleep(_POLL_SECONDS)
        elements = _elements(store)
    return {index for index, _ in elements}


def wait_for(store: Store, indices: Sequence[int], on_event: Callable[[int, Result], object]) -> list[int]:
    """Wait until all jobs of the grid have left Slurm's queue, and return the points that ended without a result.

    ``indices`` has the numbers of the points to wait for, and the result has numbers of these. ``on_event`` is called
    with the number of every point that has left the queue, and its result, as soon as there is one.
    """
    open_points = set(indices)
    while open_points:
        elements = _elements(store)  # before the results: a point writes its result before it leaves the queue
        there = {index for index, _ in elements}
        tell(partial(_standing, elements))
        results = store.results()
        for index in sorted(open_points - there):
            result = results[index]
            if result is not None:
                on_event(index, result)
                open_points.discard(index)
        if not there:
            break
        if open_points:
            time.sleep(_POLL_SECONDS)
    return sorted(open_points)


def _standing(elements: Sequence[tuple[int, str]]) -> str:
    running = sum(state == _RUNNING for _, state in elements)
    return f"in Slurm's queue, {running} points run and {len(elements) - running} wait"


def _elements(store: Store) -> list[tuple[int, str]]:
    """Return ``(number, state)`` of the grid's points in Slurm's queue, with Slurm's short names (``R``, ``CG``).

    The last argument of their command is the grid's folder, so a job is found even if ``pipemem grid`` was killed while it
    submitted it.
    """
    listed = call(["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--format", "%K %t %o"])
    elements = [line.split(maxsplit=2) for line in listed.splitlines()]
    folder = f" {os.path.realpath(store.folder)}"
    return [
        (int(element), state)
        for element, state, command in (parts for parts in elements if len(parts) == 3)
        if element.isdigit() and GRID_BATCH_FILE in command and command.rstrip().endswith(folder)
    ]


def _ending(elements: Sequence[tuple[int, str]]) -> list[int]:
    return [index for index, state in elements if state == _COMPLETING]
