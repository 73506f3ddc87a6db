"""One process for all tests of a version of Transformer Engine, because the imports take longer than the tests."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import packages
import pytest

from megatron_pipemem.request import Request
from megatron_pipemem.schedule.registry import families

WHOLE = [family.name for family in families() if Request(family.name).has_only_passes]
SMALL = ((2, 4),)


@pytest.fixture(scope="session")
def contract() -> Callable[..., dict]:
    """Return what ``contract.py`` shows of a version; of graphs, for numbers of devices and microbatches.

    If none are given, graphs of the newest version are shown for ``SMALL``.
    """

    @functools.cache
    def run(version: str, sizes: tuple[tuple[int, int], ...]) -> dict:
        process = subprocess.run(
            [
                *(sys.executable, str(Path(__file__).with_name("contract.py"))),
                *(f"{family},{p},{m}" for family in WHOLE for p, m in sizes),
            ],
            env=packages.environment(version),
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-3000:]
        return json.loads(process.stdout[process.stdout.index('{"version"') :])

    return lambda version, sizes=None: run(version, sizes or (SMALL if version == packages.NEWEST else ()))
