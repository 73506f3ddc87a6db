"""Context parallelism beside the pipeline: two ranks share every sequence, and train as stock's do."""

from __future__ import annotations

import pytest
from comparing import assert_predicted_bytes, assert_same_training
from lanes import nightly, rest_nightly
from model_flags import (
    ALL_TO_ALL,
    CP2,
    DROPOUT,
    EVALUATION,
    GROUPED,
    MULTI_TOKEN,
    OFFLOADED,
    RECOMPUTED,
    RESUMED,
    UNTIED_LATENT,
    VOCABULARY,
)
from test_unequal import BY_CONTENT
from test_vocabulary import LATER

# name -> schedule, flags of stock too, flags of ours
CASES = {
    "grouped queries, evaluation": ("v-half", (*GROUPED, *EVALUATION), ()),
    "multi-token": ("v-half", MULTI_TOKEN, ()),
    "experts": ("v-half", ALL_TO_ALL, ()),
    "latent": ("zb-h1", UNTIED_LATENT, ()),
    "recomputed": ("v-half", GROUPED, RECOMPUTED),
    "offloaded": ("v-half", GROUPED, OFFLOADED),
}
NIGHTLY = {"latent", "recomputed", "offloaded"}


@pytest.mark.parametrize("name", rest_nightly(CASES, CASES.keys() - NIGHTLY, "the same attention with another feature"))
def test_trains_as_stock(equals_stock, name):
    schedule, flags, ours = CASES[name]
    equals_stock(schedule, *CP2, *flags, ours=ours, nbytes="bounded" if name == "experts" else "exact")


def test_half_of_every_sequence_trains_as_whole_ones(train_small):
    """Of multi-token prediction this does not hold: Megatron averages its loss over the tokens of each rank alone."""
    run, whole = (train_small("stock", *cut, *GROUPED, *EVALUATION) for cut in (CP2, ()))
    assert run.losses == pytest.approx(whole.losses, rel=1e-6)
    for evaluated, wanted in zip(run.validation, whole.validation, strict=True):
        assert evaluated == pytest.approx(wanted, rel=1e-6)


def test_dropout_draws_as_stock(equals_stock):
    equals_stock("v-half", *CP2, *DROPOUT, initialise=False)


def test_cut_vocabulary(train_small):
    stock = train_small("stock", *CP2, *GROUPED, *EVALUATION)
    run = train_small("v-half", *CP2, *GROUPED, *EVALUATION, VOCABULARY, "1")
    assert run.losses == pytest.approx(stock.losses, rel=LATER)
    assert_predicted_bytes(run)


def test_unequal_microbatches(equals_stock):
    equals_stock("v-half", *CP2, ours=BY_CONTENT, close=True)


@nightly("test_checkpoints.py, where data-parallel ranks share what these share")
def test_checkpoints_do_not_know_the_placement(train_small, tmp_path):
    train_small("v-half", *CP2, *GROUPED, "--save", str(tmp_path), "--save-interval", "2")
    load = (*CP2, *GROUPED, *RESUMED, "--load", str(tmp_path))
    run, stock = (train_small(schedule, *load, initialise=False) for schedule in ("zb-h1", "stock"))
    assert_same_training(run, stock)
