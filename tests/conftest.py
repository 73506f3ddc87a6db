"""Which tests run beside which: those that start processes of their own run one after another, beside all others."""

from __future__ import annotations

from pathlib import Path

import pytest

# By folder; tests of one group share a worker of pytest-xdist. Slurm's mostly wait.
GROUPS = dict.fromkeys(("benchmarks", "cpu", "end_to_end", "runtime", "scripts"), "ranks") | {"slurm": "slurm"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in GROUPS:
            item.add_marker(pytest.mark.xdist_group(GROUPS[folder]))
