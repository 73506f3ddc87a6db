"""Submit runs to Slurm, through the batch files of ``scripts/slurm``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_pipemem.config.runs import SCRIPTS, Run
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.command import Command, min_nodes, ranks_per_node

_CONTAINER = "--container-image"


@dataclass(frozen=True)
class Options:
    """Hold a user's own options of Slurm's commands, for example ``--partition=gpu``.

    Args:
        sbatch: options of the job; they win over the batch file's.
        srun: options of the training's step; with ``--container-image`` it runs in a container.
    """

    sbatch: Sequence[str] = ()
    srun: Sequence[str] = ()


def size(run: Run, nodes: int | None = None) -> tuple[str, ...]:
    """Return the options of sbatch that say how much of the cluster a run takes.

    Raises:
        ConfigError: the ranks do not share the nodes evenly.
    """
    count = nodes or min_nodes(run)
    each = ranks_per_node(run, count)
    return (f"--nodes={count}", *(() if run.on_cpu else (f"--gpus-per-node={each}",)))


def job(script: str, more: Sequence[str], options: Options, arguments: Sequence[str]) -> Command:
    """Return the command that submits a batch file.

    Args:
        script: name of the batch file.
        more: options of sbatch that the user's own win over.
        options: the user's own.
        arguments: of the batch file.

    Raises:
        UnsupportedError: an option would be read as an argument.
    """
    for option in (*options.sbatch, *options.srun):
        if not option.startswith("-"):
            raise UnsupportedError(
                "bad-syntax", f"{option!r} is no option of sbatch or srun; write it as in --partition=gpu"
            )
    surroundings = ["ALL", f"PIPEMEM_ROOT={SCRIPTS.parent}"]
    if not any(option.startswith(_CONTAINER) for option in options.srun):  # which has an interpreter of its own
        surroundings.append(f"PYTHON={os.environ.get('PYTHON', sys.executable)}")
    words = ["sbatch", *more, f"--export={','.join(surroundings)}", *options.sbatch]
    return Command((*words, str(batch_file(script)), *options.srun, *arguments), {})


def batch_file(script: str) -> Path:
    """Return the path of a batch file."""
    return SCRIPTS / "slurm" / script


def printed(jobs: Iterable[Command], script: str) -> str:
    """Return the text of commands and, as comments, of the batch file that they submit."""
    path = batch_file(script)
    comments = (f"# {line}".rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    return "\n".join([*(f"{each.text()}\n" for each in jobs), f"# {path}:", *comments])


def submit(job: Command) -> str:
    """Submit a job, and return its number.

    Raises:
        UnsupportedError: there is no Slurm here, or it refuses the job.
    """
    sbatch, *words = job.words
    return call([sbatch, "--parsable", *words]).strip().split(";")[0]


def check_here() -> None:
    """Raises UnsupportedError where Slurm's commands are not."""
    for command in ("sbatch", "squeue"):
        if shutil.which(command) is None:
            raise UnsupportedError(
                "not-installed", f"there is no {command} here; start this where Slurm's commands are"
            )


def call(words: Sequence[str]) -> str:
    """Return the output of one of Slurm's commands.

    Raises:
        UnsupportedError: it is not here, or it fails.
    """
    check_here()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            "slurm-failed", f"{words[0]} failed: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}"
        )
    return done.stdout
