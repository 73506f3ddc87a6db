from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def benchmark() -> Callable[..., None]:
    """``benchmark("overhead.py", "--quick")``: run a program as Python would, which must succeed, but in this process.

    Its ranks are then forked from the process that those of other tests are forked from, which has imported Megatron already.
    """

    def run(name: str, *arguments: object) -> None:
        command = [str(BENCHMARKS / name), *map(str, arguments)]
        with (
            mock.patch.object(sys, "argv", command),
            mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]),
            mock.patch.dict(os.environ),
        ):
            try:
                runpy.run_path(command[0], run_name="__main__")
            except SystemExit as left:
                assert not left.code, f"{name} ended with {left.code}"

    return run
