"""Start points as elements of Slurm array jobs, through ``scripts/slurm/grid.sbatch``."""

from __future__ import annotations

import getpass
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.files import write_whole
from megatron_pipemem.launch.command import min_nodes, ranks_per_node
from megatron_pipemem.launch.grid.results import Result
from megatron_pipemem.launch.grid.store import Store
from megatron_pipemem.reading import read_json
from megatron_pipemem.schedule.core.progress import tell

_POLL_SECONDS = 2.0
_COMPLETING, _RUNNING = "CG", "R"


def check_here() -> None:
    """Raises UnsupportedError where Slurm's commands are not."""
    for command in ("sbatch", "squeue"):
        if shutil.which(command) is None:
            raise UnsupportedError(f"there is no {command} here; start this where Slurm's commands are")


def submit(
    store: Store, indices: Sequence[int], max_parallel: int, script: Path, options: Sequence[str] = ()
) -> list[str]:
    """Submit points, in one array job for every number of nodes among them, and return the jobs' numbers.

    Args:
        store: the grid; it remembers the jobs.
        indices: of the points.
        max_parallel: elements of a job that run at a time.
        script: ``grid.sbatch``, in a repository that all nodes see.
        options: of sbatch, for example ``--partition=gpu``; they win over the file's.

    Raises:
        UnsupportedError: there is no script, no Slurm, or Slurm refuses the job.
    """
    if not script.is_file():
        raise UnsupportedError(f"there is no {script}; submit from a checkout of the repository that all nodes see")
    by_size: dict[tuple[int, int | None], list[int]] = {}
    for index in indices:
        run = store.run(index)
        nodes = min_nodes(run)
        gpus = None if run.on_cpu else ranks_per_node(run, nodes)
        by_size.setdefault((nodes, gpus), []).append(index)
    jobs = []
    for (nodes, gpus), members in by_size.items():
        size = [f"--nodes={nodes}", *([] if gpus is None else [f"--gpus-per-node={gpus}"])]
        array = f"--array={','.join(map(str, members))}%{max_parallel}"
        logs = f"--output={store.folder}/slurm-%A_%a.log"
        root = f"--export=ALL,PIPEMEM_ROOT={script.absolute().parents[2]}"
        for index in members:
            store.begin(index)
        words = ["sbatch", "--parsable", array, *size, logs, root, *options, str(script), str(store.folder)]
        job = _slurm(words).strip().split(";")[0]
        jobs.append(job)
        _remember(store, job)
    return jobs


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
    listed = _slurm(["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--format", "%F %K %t"])
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
        raise ConfigError("is no list of Slurm jobs; delete it once none of the grid's is in the queue", file=path)
    return jobs


def _remember(store: Store, job: str) -> None:
    write_whole(_jobs_file(store), json.dumps([*_remembered(store), job]) + "\n")


def _slurm(words: Sequence[str]) -> str:
    check_here()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(f"{words[0]} failed: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
