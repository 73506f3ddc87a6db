"""The example in docs/adding-a-schedule.md works as printed: named by its path, and as a file of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.splitlines()) < 100


def test_the_example_outside_of_the_package(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.families()
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    with pytest.raises(UnknownScheduleError):
        registry.family("all-then-all")
    (added,) = registry.register_module(str(example))
    schedule = registry.build_schedule("all-then-all", num_devices=4, num_microbatches=8)
    validate(schedule)
    assert simulate(schedule).peak == 2.0
    assert (added.placement, added.splits_backward, added.chunks) == ("linear", False, 1)


def test_the_example_as_a_file_of_the_package(example: Path, tmp_path: Path) -> None:
    """The package with one more file: the property tests and the command line take it."""
    copy = tmp_path / "tree" / "megatron_pipemem"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(example, copy / "families" / "all_then_all.py")
    code = """
import sys
sys.path.insert(0, TESTS)
import test_families
(mine,) = [each for each in test_families.families() if each.name == "all-then-all"]
assert mine.name in test_families.NAMES
for p in (1, 4):
    test_families.test_correct_and_within_its_peak(mine.name, p)
    test_families.test_bubble_is_the_closed_form(mine, p)
    test_families.test_peaks_are_the_closed_forms(mine, p)
from megatron_pipemem.cli.app import app
app(["simulate", "all-then-all", "-p", "4", "-m", "8", "--json"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code.replace("TESTS", repr(str(Path(__file__).parent)))],
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"peak_activation": 2.0' in done.stdout
