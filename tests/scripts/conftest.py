"""Grids of tiny runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_pipemem.tools.launch.grid.points import load_points
from megatron_pipemem.tools.launch.grid.store import Store

TINY = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"


@pytest.fixture
def write_grid(tmp_path):
    def write(**keys) -> Path:
        file = tmp_path / "grid.yaml"
        file.write_text(yaml.safe_dump({"run": str(TINY), **keys}, sort_keys=False))
        return file

    return write


@pytest.fixture
def store(tmp_path, write_grid) -> Store:
    """Four points, of which the second fails and the last is infeasible."""
    names = ["stock", "1f1b", "v-half", "1f1b-v", "no-such"]
    points = load_points(write_grid(product={"schedule": names}))
    made = Store(tmp_path / "grid")
    made.create(tmp_path / "grid.yaml", points)
    return made
