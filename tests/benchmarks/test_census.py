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
PAGE, NOTE = ROOT / "docs" / "choosing-a-schedule.md", ROOT / "benchmarks" / "notes" / "recipes.md"


def census(form: str) -> str:
    """Return the output of the census in the form that an option names."""
    path = [str(ROOT / "tests" / "advise" / "bridge_packages"), *packages.consumers()]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "census.py"), form],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@nightly("advise/test_bridge.py, which reads some of the recipes")
def test_the_table_is_current():
    printed, page = census("--markdown"), PAGE.read_text(encoding="utf-8")
    table = NOTE.read_text(encoding="utf-8").split("<!-- recipes -->\n")[1].split("\n<!-- end of recipes -->")[0]
    assert table in printed
    understood = re.search(r"It can price (\d+ of \d+): .*?Of the \d+, (\d+) gain more", page, re.DOTALL)
    assert f"\n{understood[1]} recipes" in printed and f"\n{understood[2]} gain more" in printed
    assert f"of {understood[1].split()[0]} public recipes" in (ROOT / "README.md").read_text().replace("Of", "of")


@nightly("mcore/test_gates.py, which asks the same gates")
def test_the_numbers_of_accepted_recipes_are_current():
    text = re.sub(r"\s+", " ", NOTE.read_text(encoding="utf-8"))
    (total,) = re.findall(r"Of the (\d+) benchmark recipes", text)
    plain, split, sliced = re.findall(r"(?:of|those of) (\d+)(?=, )", text.split("benchmark recipes")[1])
    accepted = dict(
        re.findall(rf"(?m)^(\S+(?: cp_comm_type=all_gather)?): (\d+) of {total} accepted", census("--benchmarks"))
    )
    assert (accepted["1f1b"], accepted["interleaved"]) == (plain, plain)
    assert (accepted["zb-h1"], accepted["v-half"]) == (split, split)
    assert (accepted["seq1f1b"], accepted["seq1f1b cp_comm_type=all_gather"]) == (sliced, sliced)
