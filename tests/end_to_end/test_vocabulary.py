"""Embedding and head cut over the pipeline: trained as stock trains them whole, on stock's own checkpoints and data."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from test_variants import EVALUATION

UNTIED = "--untie-embeddings-and-output-weights"
PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = (*PP2, "--tensor-model-parallel-size", "2")
DISTRIBUTED = (
    *(*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--ddp-bucket-size", "20000"),
)
SEARCH = ("--pipemem-memory-cap", "0.8", "--pipemem-option", "seconds=1")

PLACEMENTS = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "auto")
# On four ranks, and also where T comes before REDUCE_X on some devices: name -> schedule, algorithm, flags of ours
ON_FOUR = {
    f"{schedule}-{algorithm}": (schedule, algorithm, SEARCH if schedule == "auto" else ())
    for schedule in PLACEMENTS
    for algorithm in ("1", "2")
}
# On two ranks a stage or two stages: name -> schedule, algorithm, flags of stock too, flags of ours
CASES = {
    "bf16": ("1f1b", "2", ("--bf16",), ()),
    "tp2": ("v-half", "2", TP2, ()),
    "tp2-sequence-parallel": ("1f1b", "1", (*TP2, "--sequence-parallel"), ()),
    "dp2-distributed-optimizer": ("zb-h1", "2", (*DISTRIBUTED, UNTIED), ()),
    "per-token-loss": ("1f1b", "2", ("--calculate-per-token-loss",), ()),
    "one-microbatch-in-pieces": ("v-half", "1", ("--global-batch-size", "1"), ("--pipemem-vocab-piece-tokens", "24")),
    "evaluation-of-an-odd-vocabulary": (
        *("v-half", "2", (*EVALUATION, "--vocab-size", "1003", "--make-vocab-size-divisible-by", "1"), ()),
    ),
}
# A first step's values in fp32 differ by the order of summation; then the steps' differences add up.
FIRST, LATER, BF16, BF16_GRADIENT = 1e-6, 5e-6, 3e-3, 3e-2
# Stock's norm, summed in fp32, is 2e-6 off what float64 finds for the same gradients; a third step adds to that.
THIRD_NORM = 2e-5
# Its ranks have the sums of a part of their gradients only.
SHARDED_GRADIENTS = "dp2-distributed-optimizer"


def check(run, stock, tied: bool, later: float = LATER, gradient: float = FIRST) -> None:
    """Assert that ``run`` trains as ``stock``, holds the predicted bytes and divides the rows of the vocabulary evenly."""
    assert len(set(stock.losses)) == len(stock.losses) > 1
    assert run.losses == pytest.approx(stock.losses, rel=later)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=THIRD_NORM if len(run.losses) > 2 else later)
    assert [list(each) for each in run.validation] == [list(each) for each in stock.validation]
    for found, wanted in zip(run.validation, stock.validation, strict=True):
        assert found == pytest.approx(wanted, rel=later)
    assert run.predicted_peaks == run.counted_peaks
    if stock.gradients:
        assert run.gradients.keys() == stock.gradients.keys()
        off = {key: (run.gradients[key] - wanted).norm() / wanted.norm() for key, wanted in stock.gradients.items()}
        assert {key: float(each) for key, each in off.items() if not each <= gradient} == {}
    assert all(len(rank) == (1 if tied else 2) for rank in run.vocabulary_rows)
    rows = [row for rank in run.vocabulary_rows for row in rank]
    assert max(rows) - min(rows) <= 1
    assert max(rows) < max(row for rank in stock.vocabulary_rows for row in rank)


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        ON_FOUR,
        ("1f1b-1", "interleaved-2", "zb-h1-2", "v-half-2", "auto-1"),
        "the other algorithm, or another order in a V",
    ),
)
def test_placements_train_as_stock(train, name):
    schedule, algorithm, ours = ON_FOUR[name]
    stock = train("stock", UNTIED, gradients=True)
    run = train(schedule, UNTIED, *ours, "--pipemem-vocab-parallel", algorithm, gradients=True)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=FIRST)
    check(run, stock, tied=False)


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        CASES,
        CASES.keys() - {"tp2", "tp2-sequence-parallel", "per-token-loss"},
        "the same flags in test_slices.py, and with sequence parallelism in test_multi_token.py",
    ),
)
def test_trains_as_stock(train_small, name):
    schedule, algorithm, flags, ours = CASES[name]
    how = {"gradients": name != SHARDED_GRADIENTS, "ranks": 4 if "--use-distributed-optimizer" in flags else None}
    stock = train_small("stock", *flags, **how)
    run = train_small(schedule, *flags, *ours, "--pipemem-vocab-parallel", algorithm, **how)
    first, later, gradient = (BF16, BF16, BF16_GRADIENT) if name == "bf16" else (FIRST, LATER, FIRST)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=first)
    check(run, stock, UNTIED not in flags, later, gradient)


LEARNING = ("--vocab-size", "257", "--global-batch-size", "4", "--train-iters", "12", "--lr", "3e-3")


@nightly("losses and gradients of two steps")
@pytest.mark.parametrize(("schedule", "algorithm"), [("1f1b", "1"), ("v-half", "2")])
def test_learns_text_as_stock(train, schedule, algorithm):
    stock = train("stock", *LEARNING)
    run = train(schedule, *LEARNING, "--pipemem-vocab-parallel", algorithm)
    assert len(stock.losses) == 12 and stock.losses[-1] < 0.8 * stock.losses[0]
    assert run.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize(("layout", "cuts"), [((), True), (("--pipeline-model-parallel-layout", "Etttt|L"), False)])
def test_auto_cuts_where_the_layout_leaves_no_time_for_the_head(train_small, layout, cuts):
    stock = train_small("stock", UNTIED, gradients=True)
    run = train_small("1f1b", UNTIED, *layout, "--pipemem-vocab-parallel", "auto")
    assert run.losses == pytest.approx(stock.losses, rel=LATER)
    assert max(map(len, run.vocabulary_rows)) == (2 if cuts else 1)


def test_starts_with_the_values_that_stock_draws(train_small):
    stock = train_small("stock", UNTIED, initialise=False)
    run = train_small("1f1b", UNTIED, "--pipemem-vocab-parallel", "2", initialise=False)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=FIRST)
    assert run.losses == pytest.approx(stock.losses, rel=LATER)


CUT = ("--pipemem-vocab-parallel", "2")
# before, after, of which embedding: schedules with their flags
EXCHANGES = {
    "stock-to-cut": (("stock",), ("1f1b", *CUT), (UNTIED,)),
    "cut-to-stock": (("v-half", *CUT), ("stock",), (UNTIED,)),
    "cut-to-stock-tied": (("1f1b", *CUT), ("stock",), ()),
    "cut-to-twice-the-ranks": (("v-half", *CUT), ("interleaved", *CUT, *TP2), (UNTIED,)),
}


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        EXCHANGES,
        ["cut-to-twice-the-ranks"],
        "that both saves and loads shards; initial values follow from stock's names, so test_trains_as_stock sees a wrong one",
    ),
)
def test_checkpoints_are_interchangeable_with_stock(train_small, tmp_path, name):
    before, after, flags = EXCHANGES[name]
    train_small(*before, *flags, "--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2")
    load = ("--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler")
    resumed = train_small(*after, *flags, *load, initialise=False)
    uninterrupted = train_small("stock", *flags, "--train-iters", "4")
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=LATER)
