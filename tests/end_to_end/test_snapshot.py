"""The state that a step without a barrier is rolled back to, with Megatron's optimizers on two data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks

PLAIN = {"bf16": False, "distributed": False, "overlapped": False, "name": "adam"}
BF16 = {**PLAIN, "bf16": True}
DISTRIBUTED = {**BF16, "distributed": True}
OVERLAPPED = {**DISTRIBUTED, "overlapped": True}
# Every class of Megatron's optimizers: in fp32, with master weights, and with shards of either.
CASES = {
    "fp32": PLAIN,
    "fp32 overlapped": {**OVERLAPPED, "bf16": False},
    "bf16": BF16,
    "bf16 distributed": DISTRIBUTED,
    "momentum": {**PLAIN, "name": "sgd"},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    ranks = Ranks("snapshot_cases", tmp_path_factory.mktemp("snapshots"), size=2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("case", CASES)
def test_a_step_taken_back_leaves_no_trace(ranks, case):
    """Weights, masters, moments, counters, learning rates; from the first step on, which finds no state."""
    for seen in ranks.run(CASES[case]):
        tensors = 2 if CASES[case]["name"] == "sgd" else 3
        assert seen["bytes"] == tensors * 4 * seen["parameters"]
