from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from commands import pipemem
from typer.testing import Result

from megatron_pipemem.tools.cli import common as progress


@pytest.fixture(autouse=True)
def no_columns(monkeypatch) -> None:
    """Output goes to a file unless a test says otherwise; pytest-xdist gives its workers a terminal's width."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch) -> None:
    """On a busy machine a short command takes long enough to say what it is doing."""
    monkeypatch.setattr(progress, "_FIRST_LINE_SECONDS", 1e6)


@pytest.fixture(name="pipemem")
def run_pipemem() -> Callable[..., Result]:
    return pipemem


@pytest.fixture
def pipemem_json(pipemem: Callable[..., Result]) -> Callable[..., Any]:
    """As ``pipemem`` with ``--json``: what stdout holds, which must be JSON and nothing else."""

    def call(*arguments: object) -> Any:
        result = pipemem(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
        return json.loads(result.stdout)

    return call


@pytest.fixture
def refuses(pipemem: Callable[..., Result]) -> Callable[..., str]:
    """The one line of stderr of a call that must fail with the given exit code, with and without ``--json``."""

    def call(*arguments: object, code: int = 2) -> str:
        lines = []
        for extra in ((), ("--json",)):
            result = pipemem(*arguments, *extra)
            assert result.exit_code == code, result.output
            assert extra or result.stdout == ""
            (line,) = result.stderr.splitlines()
            assert line.startswith("error: ")
            lines.append(line)
        assert lines[0] == lines[1]
        return lines[0]

    return call
