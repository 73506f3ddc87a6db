"""From scratch and with dropout, every schedule draws the same random numbers."""

from __future__ import annotations

from functools import partial

import pytest
from comparing import assert_close_training, assert_same_training
from model_flags import (
    DROPOUT,
    EXPERTS,
    MULTI_TOKEN,
    RECOMPUTE,
    RECOMPUTED,
    TP_AND_SP,
    UNTIED,
    VOCABULARY,
    hybrid,
)


@pytest.fixture
def train_from_scratch(train_small):
    """From the values that Megatron draws."""
    return partial(train_small, initialise=False)


@pytest.fixture
def draws_as_stock(equals_stock):
    return partial(equals_stock, initialise=False)


@pytest.mark.parametrize("name", ["v-half", "gis"])
def test_trains_as_stock_from_scratch(draws_as_stock, name):
    draws_as_stock(name, *DROPOUT)


def test_two_replicas_begin_as_stock(draws_as_stock):
    draws_as_stock("chimera", *DROPOUT, close=True)


def test_stocks_own_schedules_train_alike(train_from_scratch):
    two = ("--num-virtual-stages-per-pipeline-rank", "2")
    assert_same_training(train_from_scratch("stock", *DROPOUT, *two), train_from_scratch("stock", *DROPOUT))


@pytest.mark.parametrize("again", [RECOMPUTED, RECOMPUTE], ids=["ours", "megatrons"])
def test_shards_and_second_forwards_draw_the_same(draws_as_stock, again):
    draws_as_stock("v-half", *DROPOUT, *TP_AND_SP, ours=again, nbytes=None)


def test_forwards_of_a_later_batch_draw_that_batch_s_numbers(train_from_scratch, emulate):
    """In the emulator, every step runs its own microbatches."""
    flags = (*DROPOUT, UNTIED, "--clip-grad", "0", "--train-iters", "3")
    assert train_from_scratch("pipedream", *flags).losses == emulate("pipedream", *flags, initialise=False).losses


def test_a_hybrid_model_s_layers_have_their_numbers_in_every_cut(train_from_scratch):
    runs = [
        train_from_scratch(name, *DROPOUT, *hybrid(cut))
        for name, cut in (("v-half", "*-|*-|*-|*-"), ("stock", "*-*-|*-*-"))
    ]
    assert_same_training(*runs)


def test_depths_of_multi_token_prediction_draw_for_themselves(draws_as_stock):
    draws_as_stock("v-half", *DROPOUT, *MULTI_TOKEN)


def test_a_cut_vocabulary_begins_as_the_whole_one(draws_as_stock):
    """Its head sums in another order."""
    draws_as_stock("v-half", *DROPOUT, ours=(VOCABULARY, "2"), close=True)


def test_evaluation_does_not_disturb_training(train_from_scratch):
    evaluation = ("--eval-interval", "1", "--eval-iters", "1")
    plain, evaluated = (train_from_scratch("v-half", *DROPOUT, *more) for more in ((), evaluation))
    assert evaluated.losses == plain.losses and len(evaluated.validation) > 1


def test_experts_begin_alike_wherever_they_are(train_from_scratch):
    """Their ranks sum tokens in another order."""
    alone, shared = (
        train_from_scratch("stock", *DROPOUT, *EXPERTS, *more, ranks=4)
        for more in ((), ("--expert-model-parallel-size", "2"))
    )
    assert_close_training(shared, alone)
