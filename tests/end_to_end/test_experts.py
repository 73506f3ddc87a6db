"""Mixtures of experts, their ranks beside the pipeline's, train as on stock's schedule."""

from __future__ import annotations

import pytest

EXPERTS = (
    # Megatron's own local experts cannot add a bias: they modify a view in place.
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2", "--num-layers", "4"),
    *("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"),
)
ALL_TO_ALL = (*EXPERTS, "--moe-token-dispatcher-type", "alltoall")
AUX = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.01")


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("v-half", (*ALL_TO_ALL, *AUX)),
        ("v-half", (*EXPERTS, *AUX)),
    ],
)
def test_trains_as_stock(train, assert_same_training, schedule, flags):
    assert_same_training(train(schedule, *flags), train("stock", *flags))
