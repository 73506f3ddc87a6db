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
    ("whole", "split", "sizes"),
    [
        (WHOLE, SPLIT[:1], [(2, 4)]),
        pytest.param(WHOLE, SPLIT, [(3, 7), (4, 9), (8, 24)], marks=nightly("two devices")),
    ],
    ids=["small", "large"],
)
def test_gradients_are_those_without_graphs(whole, split, sizes):
    """With W apart, only in a Transformer Engine that is mended as ``graph_orders.py`` says."""
    assert {"1f1b", "gpipe", "interleaved", "1f1b-v"} <= {*WHOLE}
    as_it_is, mended = ([f"{family},{p},{m}" for family in names for p, m in sizes] for names in (whole, split))
    process = run(*as_it_is, "mended", *mended)
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout[process.stdout.rindex('{"' + as_it_is[0]) :])
    for cases in (as_it_is, mended):
        of_cases = {
            case: counts for case, counts in found.items() if case.startswith(tuple(f"{each}," for each in cases))
        }
        assert len(of_cases) == sum(int(case.split(",")[1]) for case in cases)
        for case, counts in of_cases.items():
            assert {**counts, "overwritten": 0} == {"wrong": 0, "overwritten": 0, "captures": 0, "replays": 0}, case
        # Without copies of the gradients between chunks, messages would be overwritten before they are sent.
        assert any(counts["overwritten"] for counts in of_cases.values())


@nightly("config/refusals.py refuses it")
def test_a_split_backward_cannot_be_captured_so_far():
    assert run("zb-h1,2,4").returncode != 0
