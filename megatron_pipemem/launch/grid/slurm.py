"""Start points as elements of Slurm array jobs, through ``scripts/slurm/grid.sbatch``."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.files import write_whole
from megatron_pipemem.launch import slurm
from megatron_pipemem.launch.command import Command
from megatron_pipemem.launch.grid.results import Result
from megatron_pipemem.launch.grid.store import Store
from megatron_pipemem.launch.slurm import Options
from megatron_pipemem.reading import read_json
from megatron_pipemem.schedule.display import tell

BATCH_FILE = "grid.sbatch"
_POLL_SECONDS = 2.0
_COMPLETING, _RUNNING = "CG", "R"


def jobs(folder: Path, runs: Mapping[int, Run], max_parallel: int, options: Options) -> dict[tuple[int, ...], Command]:
    """Return the commands that submit points, one array job for every number of nodes among them, by their points.

    Args:
        folder: of the grid.
        runs: of the points, by number.
        max_parallel: elements of a job that run at a time.
        options: of sbatch and srun.

    Raises:
        UnsupportedError: an option is none.
    """
    by_size: dict[tuple[str, ...], list[int]] = {}
    for index, run in runs.items():
        by_size.setdefault(slurm.size(run), []).append(index)
    found = {}
    for size, members in by_size.items():
        array = f"--array={','.join(map(str, members))}%{max_parallel}"
        more = (array, *size, f"--output={folder}/slurm-%A_%a.log")
        found[tuple(members)] = slurm.job(BATCH_FILE, more, options, [str(folder)])
    return found


def submit(store: Store, indices: Sequence[int], max_parallel: int, options: Options) -> list[str]:
    """Submit points, and return the numbers of their jobs.

    Args:
        store: the grid; it remembers the jobs.
        indices: of the points.
        max_parallel: elements of a job that run at a time.
        options: of sbatch and srun.

    Raises:
        UnsupportedError: there is no Slurm here, or it refuses a job.
    """
    numbers = []
    for members, job in jobs(
        store.folder, {index: store.run(index) for index in indices}, max_parallel, options
    ).items():
        for index in members:
            store.begin(index)
        numbers.append(slurm.submit(job))
        _remember(store, numbers[-1])
    return numbers


def under_way(store: Store, on_wait: Callable[[list[int]], object]) -> set[int]:
    """Return the points that wait or run in jobs submitted for this grid, once those that are just ending have left: one
    that was cancelled will have no result.

    Args:
        store: the grid.
        on_wait: called once with the points that are ending, if there are any; a broken node may hold them for ever.

    Raises:
        UnsupportedError: Slurm does not answer.
    """
    elements = _elements(store)
    if ending := _ending(elements):
        on_wait(ending)
    while _ending(elements):
        time.sleep(_POLL_SECONDS)
        elements = _elements(store)
    return {index for index, _ in elements}


def wait(store: Store, indices: Sequence[int], on_event: Callable[[int, Result], object]) -> list[int]:
    """Wait until no job of the grid is left in the queue, and return the points that ended without a result.

    Args:
        store: folder of the grid.
        indices: points to wait for.
        on_event: called with point and result whenever a result is there.
    """
    open_points = set(indices)
    while open_points:
        elements = _elements(store)  # before the results: one that has just left the queue has written its own
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
    return f"in Slurm's queue {running} run and {len(elements) - running} wait"


def _elements(store: Store) -> list[tuple[int, str]]:
    """Return the points in the queue, each with Slurm's short name of its state."""
    jobs = _remembered(store)
    if not jobs:
        return []
    listed = slurm.call(["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--format", "%F %K %t"])
    elements = [line.split() for line in listed.splitlines() if line.strip()]
    return [(int(element), state) for job, element, state in elements if job in jobs and element.isdigit()]


def _ending(elements: Sequence[tuple[int, str]]) -> list[int]:
    return [index for index, state in elements if state == _COMPLETING]


def _jobs_file(store: Store) -> Path:
    return store.folder / "slurm-jobs.json"


def _remembered(store: Store) -> list[str]:
    path = _jobs_file(store)
    jobs = read_json(path, "the jobs of a grid") if path.exists() else []
    if not isinstance(jobs, list):
        raise ConfigError(
            "wrong-file", "is no list of Slurm jobs; delete it once none of the grid's is in the queue", file=path
        )
    return jobs


def _remember(store: Store, job: str) -> None:
    write_whole(_jobs_file(store), json.dumps([*_remembered(store), job]) + "\n")
