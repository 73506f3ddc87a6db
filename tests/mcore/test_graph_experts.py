"""Graphs that leave experts out train to the bit as steps without graphs; a planted fault is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = Path(__file__).parent, *(Path(__file__).parents[1] / name for name in ("runtime", "transformer_engine"))
PROGRAM = "from megatron_pipemem.tools.cpu import activate; activate(); import graph_experts; graph_experts.main()"


@pytest.fixture(scope="module")
def differing() -> dict:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS))},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def test_replayed_steps_with_experts_equal_plain_steps_to_the_bit(differing):
    assert len(differing["models"]) == 6 and {*differing["models"].values()} == {0}


def test_faults_at_the_borders_of_graphs_are_found(differing):
    assert len(differing["faults"]) == 5 and 0 not in differing["faults"].values()
