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


def run(*cases: str) -> subprocess.CompletedProcess:
    program = str(Path(__file__).with_name("graph_orders.py"))
    return subprocess.run(
        [sys.executable, program, *cases],
        env=packages.environment(packages.NEWEST),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "sizes",
    [[(2, 4)], pytest.param([(3, 7), (4, 9), (8, 24)], marks=nightly("two devices"))],
    ids=["small", "large"],
)
def test_gradients_are_those_without_graphs(sizes):
    assert {"1f1b", "gpipe", "interleaved", "1f1b-v"} <= {*WHOLE}
    cases = [f"{family},{p},{m}" for family in WHOLE for p, m in sizes]
    process = run(*cases)
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout[process.stdout.rindex('{"' + cases[0]) :])
    assert len(found) == sum(int(case.split(",")[1]) for case in cases)
    for case, counts in found.items():
        assert {**counts, "overwritten": 0} == {"wrong": 0, "overwritten": 0, "captures": 0, "replays": 0}, case
    # Without copies of the gradients between chunks, messages would be overwritten before they are sent.
    assert any(counts["overwritten"] for counts in found.values())
