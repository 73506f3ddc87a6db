"""The documents' table of public recipes is what the census prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

import packages
from lanes import nightly

ROOT = Path(__file__).parents[2]


@nightly("advise/test_bridge.py, which reads some of the recipes")
def test_the_table_is_current():
    path = [str(ROOT / "tests" / "advise" / "bridge_packages"), *packages.consumers()]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "census.py"), "--markdown"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / "choosing-a-schedule.md").read_text(encoding="utf-8")
    note = (ROOT / "benchmarks" / "notes" / "recipes.md").read_text(encoding="utf-8")
    table = note.split("<!-- recipes -->\n")[1].split("\n<!-- end of recipes -->")[0]
    assert table in done.stdout
    understood = re.search(r"It can price (\d+ of \d+): .*?Of the \d+, (\d+) gain more", page, re.DOTALL)
    assert f"\n{understood[1]} recipes" in done.stdout and f"\n{understood[2]} gain more" in done.stdout
    assert f"of {understood[1].split()[0]} public recipes" in (ROOT / "README.md").read_text().replace("Of", "of")
