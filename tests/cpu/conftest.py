"""Every test here runs the code under test in processes of its own: activating the CPU lane changes a process for good."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

TOY_MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3 --eval-interval 1000 --eval-iters 0
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --tokenizer-type NullTokenizer
    --distributed-timeout-minutes 5
""".split()


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """This process's environment without what a surrounding launcher may have left in it."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    kept = {
        name: value for name, value in os.environ.items() if name not in launcher and not name.startswith("TORCHELASTIC")
    }
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
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return run


@pytest.fixture(scope="session")
def torchrun(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``pipemem run --cpu script arguments`` on ranks of its own; stdout and stderr come as one text."""

    def run(ranks: int, script: Path, *arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, "-m", "megatron_pipemem", "run", "--cpu", str(script), *arguments]
        return subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
