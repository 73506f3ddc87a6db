"""Transformer Engine's graphs of layers give the gradients of layers without graphs, in the orders of our schedules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import packages
import pytest
from lanes import nightly

from megatron_pipemem.request import Request
from megatron_pipemem.schedule.registry import families

WHOLE = [family.name for family in families() if Request(family.name).has_only_passes]
SPLIT = ["zb-h1", "zb-h2", "gis", "zbv", "v-half", "v-min"]


def run(state: str, cases: list[str]) -> subprocess.CompletedProcess:
    program = str(Path(__file__).with_name("graph_orders.py"))
    return subprocess.run(
        [sys.executable, program, state, *cases],
        env=packages.environment(packages.NEWEST),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("state", "names", "sizes"),
    [
        ("is", WHOLE, [(2, 3)]),
        ("mended", SPLIT[:1], [(2, 4)]),
        pytest.param("is", WHOLE, [(3, 7), (4, 9), (8, 24)], marks=nightly("two devices")),
        pytest.param("mended", SPLIT, [(3, 6), (4, 9), (8, 24)], marks=nightly("two devices")),
    ],
    ids=["whole", "split", "whole-large", "split-large"],
)
def test_gradients_are_those_without_graphs(state, names, sizes):
    """With W apart, only in a Transformer Engine that is mended as ``graph_orders.py`` says."""
    assert {"1f1b", "gpipe", "interleaved", "1f1b-v"} <= {*WHOLE}
    cases = [f"{family},{p},{m}" for family in names for p, m in sizes]
    process = run(state, cases)
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout[process.stdout.rindex('{"' + cases[0]) :])
    for case, counts in found.items():
        assert {**counts, "overwritten": 0} == {"wrong": 0, "overwritten": 0, "captures": 0, "replays": 0}, case
    # Without copies of the gradients between chunks, messages would be overwritten before they are sent.
    assert any(counts["overwritten"] for counts in found.values())


@nightly("config/refusals.py refuses it")
def test_a_split_backward_cannot_be_captured_so_far():
    assert run("is", ["zb-h1,2,4"]).returncode != 0
