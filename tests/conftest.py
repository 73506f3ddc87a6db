"""Which tests run beside which: those that start processes of their own run one after another, beside all others."""

from __future__ import annotations

from pathlib import Path

import pytest

START_PROCESSES = {"benchmarks", "cpu", "end_to_end", "runtime", "scripts", "slurm"}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in START_PROCESSES:
            item.add_marker(pytest.mark.xdist_group("ranks"))
