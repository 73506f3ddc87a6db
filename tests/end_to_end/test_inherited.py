"""Stock's own results on more ranks: what "equal to stock" inherits (``mcore/refusals.py`` has the known faults)."""

from __future__ import annotations

import pytest
from lanes import nightly
from model_flags import AUX_LOSS, EXPERTS, LATENT_QUERIES, MULTI_TOKEN, TP_AND_SP

PER_TOKEN = "--calculate-per-token-loss"


@nightly("test_variants.py, which compares with stock on as many ranks")
@pytest.mark.parametrize(
    ("flags", "is_right"),
    [
        ((), True),
        ((*EXPERTS, *AUX_LOSS, PER_TOKEN), True),
        ((*MULTI_TOKEN, PER_TOKEN), True),
        (LATENT_QUERIES, False),
    ],
    ids=["dense", "experts", "multi-token", "latent"],
)
def test_two_tensor_parallel_ranks_train_as_one(train_small, flags, is_right):
    cut, whole = (train_small("stock", "--train-iters", "3", *more, *flags) for more in (TP_AND_SP, ()))
    assert cut.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
    assert (cut.losses[1:] == pytest.approx(whole.losses[1:], rel=1e-6)) == is_right
