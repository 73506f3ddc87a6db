"""Check the types of package, benchmarks and scripts with mypy, as pyproject.toml configures it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_there_are_no_type_errors():
    """It takes a second where .mypy_cache is of the last run, and a quarter of a minute where there is none."""
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
