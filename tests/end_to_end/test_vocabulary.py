"""Embedding and head cut over the pipeline: trained as stock trains them whole, on stock's own checkpoints and data."""

from __future__ import annotations

import json

import pytest
from comparing import assert_close_gradients, assert_close_training, assert_predicted_bytes
from lanes import nightly
from model_flags import DISTRIBUTED, EVALUATION, LAYOUT, RESUMED, TP2, UNTIED, VOCABULARY

SEARCH = ("--pipemem-memory-cap", "0.8", "--pipemem-option", "seconds=1")
# On four ranks, and also where T comes before REDUCE_X on some devices: schedule, algorithm, flags of ours
ON_FOUR = [
    ("interleaved", "2", ()),
    ("zb-h1", "2", ()),
    ("v-half", "2", ()),
    ("auto", "1", SEARCH),
]
# On two ranks a stage or two stages: name -> schedule, algorithm, flags of stock too, flags of ours
CASES = {
    "bf16": ("1f1b", "2", ("--bf16",), ()),
    "distributed optimizer": ("zb-h1", "2", (*DISTRIBUTED, UNTIED), ()),
    "one microbatch in pieces": ("v-half", "1", ("--global-batch-size", "1"), ("--pipemem-vocab-piece-tokens", "24")),
    "evaluation of an odd vocabulary": (
        *("v-half", "2", (*EVALUATION, "--vocab-size", "1003", "--make-vocab-size-divisible-by", "1"), ()),
    ),
}
# A first step's values in fp32 differ by the order of summation; then the steps' differences add up.
FIRST, LATER, BF16, BF16_GRADIENT = 1e-6, 5e-6, 3e-3, 3e-2


def check(run, stock, tied: bool, first: float = FIRST, later: float = LATER, gradient: float = FIRST) -> None:
    """Assert that ``run`` trains as ``stock``, holds the predicted bytes and divides the rows of the vocabulary evenly."""
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=first)
    # Stock's norm, summed in fp32, is 2e-6 off what float64 finds for the same gradients; a third step adds to that.
    assert_close_training(run, stock, later, norms=2e-5 if len(run.losses) > 2 else later)
    assert_predicted_bytes(run)
    if stock.gradients:
        assert_close_gradients(run, stock, gradient)
    assert all(len(rank) == (1 if tied else 2) for rank in run.vocabulary_rows)
    rows = [row for rank in run.vocabulary_rows for row in rank]
    assert max(rows) - min(rows) <= 1
    assert max(rows) < max(row for rank in stock.vocabulary_rows for row in rank)


@pytest.mark.parametrize(("schedule", "algorithm", "ours"), ON_FOUR, ids=["-".join(row[:2]) for row in ON_FOUR])
def test_placements_train_as_stock(train, schedule, algorithm, ours):
    stock = train("stock", UNTIED, gradients=True)
    check(train(schedule, UNTIED, *ours, VOCABULARY, algorithm, gradients=True), stock, tied=False)


def test_late_losses_train_as_stock(train, tmp_path):
    """Algorithm 1 delays every loss by one forward if collectives have a price."""
    costs = tmp_path / "costs.json"
    shards = {"score": 0.1, "gradient": 0.1, "collectives": 0.05}
    costs.write_text(json.dumps({"forward": 1, "backward_input": 1, "backward_weight": 1, "vocabulary": shards}))
    stock = train("stock", UNTIED, gradients=True)
    run = train("1f1b", UNTIED, "--pipemem-costs", str(costs), VOCABULARY, "1", gradients=True)
    check(run, stock, tied=False)


@pytest.mark.parametrize("name", CASES)
def test_trains_as_stock(train_small, name):
    schedule, algorithm, flags, ours = CASES[name]
    how = {"gradients": name != "distributed optimizer"}  # whose ranks have the sums of a part of their gradients only
    stock = train_small("stock", *flags, **how)
    run = train_small(schedule, *flags, *ours, VOCABULARY, algorithm, **how)
    check(run, stock, UNTIED not in flags, *((BF16, BF16, BF16_GRADIENT) if name == "bf16" else ()))


@nightly("losses and gradients of two steps")
def test_learns_text_as_stock(train):
    learning = ("--vocab-size", "257", "--global-batch-size", "4", "--train-iters", "20", "--lr", "3e-3")
    stock, run = (train(*schedule, *learning) for schedule in (("stock",), ("v-half", VOCABULARY, "2")))
    assert stock.losses[-1] < 0.8 * stock.losses[0]
    assert run.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize(("layout", "cuts"), [((), True), ((LAYOUT, "Etttt|L"), False)])
def test_auto_cuts_where_the_layout_leaves_no_time_for_the_head(train_small, layout, cuts):
    stock = train_small("stock", UNTIED)
    run = train_small("1f1b", UNTIED, *layout, VOCABULARY, "auto")
    assert run.losses == pytest.approx(stock.losses, rel=LATER)
    assert max(map(len, run.vocabulary_rows)) == (2 if cuts else 1)


def test_starts_with_the_values_that_stock_draws(train_small):
    stock = train_small("stock", UNTIED, initialise=False)
    run = train_small("1f1b", UNTIED, VOCABULARY, "2", initialise=False)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=FIRST)
    assert run.losses == pytest.approx(stock.losses, rel=LATER)


def test_checkpoints_do_not_depend_on_the_cut(train_small, tmp_path):
    """Saved by two ranks, and loaded by four. That stock reads the same names follows from the tests' initial values."""
    cut = (UNTIED, VOCABULARY, "2")
    train_small("v-half", *cut, "--save", str(tmp_path), "--save-interval", "2")
    resumed = train_small("interleaved", *cut, *TP2, *RESUMED, "--load", str(tmp_path), initialise=False)
    uninterrupted = train_small("stock", UNTIED, "--train-iters", "4")
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=LATER)
