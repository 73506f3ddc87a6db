"""The state that a step without a barrier is rolled back to, with Megatron's optimizers on two data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lanes import rest_nightly
from ranks import Ranks

PLAIN = {"bf16": False, "distributed": False, "overlapped": False, "name": "adam"}
BF16 = {**PLAIN, "bf16": True}
DISTRIBUTED = {**BF16, "distributed": True}
OVERLAPPED = {**DISTRIBUTED, "overlapped": True}
CASES = {
    "fp32": PLAIN,
    "fp32 distributed": {**PLAIN, "distributed": True},
    "fp32 overlapped": {**OVERLAPPED, "bf16": False},
    "bf16": BF16,
    "bf16 distributed": DISTRIBUTED,
    "bf16 overlapped": OVERLAPPED,
    "momentum": {**PLAIN, "name": "sgd"},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    ranks = Ranks("snapshot_cases", tmp_path_factory.mktemp("snapshots"), size=2)
    yield ranks
    ranks.stop()


# Every class of Megatron's optimizers: in fp32, with master weights, and with shards of either.
SINGLY = CASES.keys() - {"fp32 distributed", "bf16 overlapped"}


@pytest.mark.parametrize("case", rest_nightly(CASES, SINGLY, "the other number format with the same shards"))
def test_a_step_taken_back_leaves_no_trace(ranks, case):
    """Weights, masters, moments, counters, learning rates; from the first step on, which finds no state."""
    for seen in ranks.run(CASES[case]):
        tensors = 2 if CASES[case]["name"] == "sgd" else 3
        assert seen["bytes"] == tensors * 4 * seen["parameters"]
