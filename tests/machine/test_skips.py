"""What is skipped is said once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import skips

CASES = """
import pytest

@pytest.mark.parametrize("number", range(12))
def test_in_a_browser(number):
    pytest.skip("needs a browser")

@pytest.mark.skipif(True, reason="is off")
def test_marked():
    pass

def test_that_passes():
    pass
"""


def test_each_reason_is_named_once_with_its_count(tmp_path):
    (tmp_path / "conftest.py").write_text("from skips import pytest_terminal_summary\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.importorskip('no_such_module', reason='is not there')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {"PYTHONPATH": str(Path(skips.__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.split("skipped, and why")[1].split("\n====")[0].splitlines()[1:]
    assert [line.split(maxsplit=1) for line in told if line] == [
        ["12", "needs a browser"],
        ["1", "is not there"],
        ["1", "is off"],
    ]
