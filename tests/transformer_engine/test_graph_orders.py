"""Transformer Engine's graphs of layers give the gradients of layers without graphs, in the orders of our schedules."""

from __future__ import annotations

import packages
import pytest
from lanes import nightly


@pytest.mark.parametrize(
    "sizes",
    [None, pytest.param(((3, 7), (4, 9), (8, 24)), marks=nightly("two devices"))],
    ids=["small", "large"],
)
def test_gradients_are_those_without_graphs(contract, sizes):
    results = contract(packages.NEWEST, sizes)["orders"]
    assert {"1f1b", "gpipe", "interleaved", "1f1b-v"} <= {case.split(",")[0] for case in results}
    for case, counts in results.items():
        assert {**counts, "overwritten": 0} == {"wrong": 0, "overwritten": 0, "captures": 0, "replays": 0}, case
    # Without copies of the gradients between chunks, messages would be overwritten before they are sent.
    assert any(counts["overwritten"] for counts in results.values())
