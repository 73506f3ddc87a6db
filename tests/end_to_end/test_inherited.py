"""Stock's own results on more ranks: what "equal to stock" inherits (``mcore/refusals.py`` has the known faults)."""

from __future__ import annotations

import pytest
from lanes import nightly
from test_experts import LATENT_QUERIES
from test_layerwise import MULTI_TOKEN
from test_variants import MOE

THREE_STEPS = ("--train-iters", "3")
CUT = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@nightly("test_parallelism.py, which compares with stock on as many ranks")
@pytest.mark.parametrize(
    ("flags", "is_right"),
    [
        ((), True),
        ((*MOE[:-6], "--moe-layer-freq", "1", *MOE[-4:], "--calculate-per-token-loss"), True),
        ((*MULTI_TOKEN, "--calculate-per-token-loss"), True),
        (LATENT_QUERIES, False),
    ],
    ids=["dense", "experts", "multi-token", "latent"],
)
def test_two_tensor_parallel_ranks_train_as_one(train_small, flags, is_right):
    cut, whole = (train_small("stock", *THREE_STEPS, *cut, *flags) for cut in (CUT, ()))
    assert cut.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
    assert (cut.losses[1:] == pytest.approx(whole.losses[1:], rel=1e-6)) == is_right
