"""The example in docs/adding-a-schedule.md works as printed: named by its path, and as a file of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import oracle
import pytest

import megatron_pipemem
from megatron_pipemem.errors import UnknownScheduleError
from megatron_pipemem.schedule import registry
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate

PACKAGE = Path(megatron_pipemem.__file__).parent
DOCUMENT = (Path(__file__).parents[2] / "docs" / "adding-a-schedule.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```python\n(from megatron_pipemem import .*?)```", DOCUMENT, re.DOTALL)[1]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE, encoding="utf-8")
    return path


def test_the_example_outside_of_the_package(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.families()
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    with pytest.raises(UnknownScheduleError):
        registry.family("all-then-all")
    (added,) = registry.register_module(str(example))
    schedule = registry.build_schedule("all-then-all", num_devices=4, num_microbatches=8)
    validate(schedule)
    assert oracle.check(schedule) == []
    assert simulate(schedule).peak == 2.0
    assert (added.placement, added.splits_backward, added.chunks) == ("linear", False, 1)


def test_the_example_as_a_file_of_the_package(example: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tree" / "megatron_pipemem"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(example, copy / "families" / "all_then_all.py")
    done = subprocess.run(
        [sys.executable, *"-m megatron_pipemem simulate all-then-all -p 4 -m 8 --json".split()],
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"peak_activation": 2.0' in done.stdout
