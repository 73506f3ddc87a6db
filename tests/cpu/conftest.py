"""Nothing here is tested in this process: activating the CPU lane changes a process for good."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from launching import REPOSITORY


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """This process's environment without what a surrounding launcher may have left in it."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", *launcher))}
    return kept | {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="session")
def python(environment: dict[str, str]) -> Callable[..., str]:
    """Run a piece of Python in a new process and give what it printed; it must succeed."""

    def run(code: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return run


@pytest.fixture(scope="session")
def lane() -> Iterator[Callable[[str], object]]:
    """Run a piece of Python where the CPU lane is active, all in one process, and return its variable ``result``.

    It is forked from the process of the ranks, which has imported Megatron.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        yield lambda code: process.submit(_execute, code).result()


@pytest.fixture
def script(lane: Callable[[str], object]) -> Callable[..., object]:
    """Run the ``main`` of a script where the CPU lane is active, and return its output."""

    def run(path: Path, *arguments: object) -> object:
        return lane(f"""
import contextlib, io, runpy, sys
from unittest import mock
printed = io.StringIO()
with mock.patch.object(sys, "argv", {[str(path), *map(str, arguments)]}), contextlib.redirect_stdout(printed):
    assert not runpy.run_path({str(path)!r})["main"]()
result = printed.getvalue()
""")

    return run


def _execute(code: str) -> object:
    import torch

    names: dict[str, object] = {"torch": torch}
    exec(code, names)
    return names.get("result")


@pytest.fixture(scope="session")
def torchrun(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``pipemem run --cpu script arguments`` on ranks of its own; stdout and stderr come as one text."""

    def run(ranks: int, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, "-m", "megatron_pipemem", "run", "--cpu", str(script), *arguments]
        return subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    return run
