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

# name -> schedule, algorithm, flags of stock too, flags of ours
CASES = {
    f"{schedule}-{algorithm}": (schedule, algorithm, (UNTIED,), SEARCH if schedule == "auto" else ())
    for schedule in ("1f1b", "interleaved", "zbv", "v-half", "auto")
    for algorithm in ("1", "2")
} | {
    # T comes before REDUCE_X on some devices.
    "zb-h1-2": ("zb-h1", "2", (UNTIED,), ()),
    "bf16": ("1f1b", "2", ("--bf16",), ()),
    "tp2": ("v-half", "2", TP2, ()),
    "tp2-sequence-parallel": ("1f1b", "1", (*TP2, "--sequence-parallel", "--global-batch-size", "4"), ()),
    "dp2-distributed-optimizer": ("zb-h1", "2", (*DISTRIBUTED, UNTIED), ()),
    "per-token-loss": ("1f1b", "2", ("--calculate-per-token-loss",), ()),
    "one-microbatch": ("v-half", "1", ("--global-batch-size", "1"), ()),
    "odd-vocabulary": ("1f1b", "2", ("--vocab-size", "1003", "--make-vocab-size-divisible-by", "1"), ()),
    "pieces": ("v-half", "1", (), ("--pipemem-vocab-piece-tokens", "24")),
    "evaluation": ("v-half", "2", EVALUATION, ()),
}
# A first step's values in fp32 differ by the order of summation; then the steps' differences add up.
FIRST, LATER, BF16, BF16_GRADIENT = 1e-6, 5e-6, 3e-3, 3e-2
# Stock's norm, summed in fp32, is 2e-6 off what float64 finds for the same gradients; a third step adds to that.
THIRD_NORM = 2e-5
# Its ranks have the sums of a part of their gradients only.
SHARDED_GRADIENTS = "dp2-distributed-optimizer"


# The full lane has either algorithm with every placement and kind of backward, and every other flag once.
NIGHTLY = {"1f1b-2", "interleaved-1", "zbv-1", "zbv-2", "v-half-1", "auto-2", "tp2", "per-token-loss"}


@pytest.mark.parametrize(
    "name", rest_nightly(CASES, CASES.keys() - NIGHTLY, "the other algorithm with this schedule, or more flags")
)
def test_trains_as_stock(train, name):
    schedule, algorithm, flags, ours = CASES[name]
    whole = name != SHARDED_GRADIENTS
    stock = train("stock", *flags, gradients=whole)
    run = train(schedule, *flags, *ours, "--pipemem-vocab-parallel", algorithm, gradients=whole)
    first, later, gradient = (BF16, BF16, BF16_GRADIENT) if name == "bf16" else (FIRST, LATER, FIRST)
    assert len(set(stock.losses)) == len(stock.losses) > 1
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=first)
    assert run.losses == pytest.approx(stock.losses, rel=later)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=THIRD_NORM if name == "evaluation" else later)
    assert [list(each) for each in run.validation] == [list(each) for each in stock.validation]
    for found, wanted in zip(run.validation, stock.validation, strict=True):
        assert found == pytest.approx(wanted, rel=later)
    assert run.predicted_peaks == run.counted_peaks
    if whole:
        assert run.gradients.keys() == stock.gradients.keys()
        off = {key: (run.gradients[key] - wanted).norm() / wanted.norm() for key, wanted in stock.gradients.items()}
        assert {key: float(each) for key, each in off.items() if not each <= gradient} == {}

    tied = UNTIED not in flags
    assert all(len(rank) == (1 if tied else 2) for rank in run.vocabulary_rows)
    rows = [row for rank in run.vocabulary_rows for row in rank]
    assert max(rows) - min(rows) <= 1
    assert max(rows) < max(row for rank in stock.vocabulary_rows for row in rank)


LEARNING = ("--vocab-size", "257", "--global-batch-size", "4", "--train-iters", "12", "--lr", "3e-3")


@nightly("losses and gradients of two steps")
@pytest.mark.parametrize(("schedule", "algorithm"), [("1f1b", "1"), ("v-half", "2")])
def test_learns_text_as_stock(train, schedule, algorithm):
    stock = train("stock", *LEARNING)
    run = train(schedule, *LEARNING, "--pipemem-vocab-parallel", algorithm)
    assert len(stock.losses) == 12 and stock.losses[-1] < 0.8 * stock.losses[0]
    assert run.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "cuts"), [((), True), (("--pipeline-model-parallel-layout", "Ettt|ttt|tt|L"), False)]
)
def test_auto_cuts_where_the_layout_leaves_no_time_for_the_head(train, layout, cuts):
    stock = train("stock", UNTIED, gradients=True)
    run = train("1f1b", UNTIED, *layout, "--pipemem-vocab-parallel", "auto")
    assert run.losses == pytest.approx(stock.losses, rel=LATER)
    assert max(map(len, run.vocabulary_rows)) == (2 if cuts else 1)


def test_starts_with_the_values_that_stock_draws(train):
    stock = train("stock", UNTIED, initialise=False)
    run = train("1f1b", UNTIED, "--pipemem-vocab-parallel", "2", initialise=False)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=FIRST)
    assert run.losses == pytest.approx(stock.losses, rel=LATER)


CUT = ("--pipemem-vocab-parallel", "2")
# before, after, of which embedding: schedules with their flags
EXCHANGES = {
    "stock-to-cut": (("stock",), ("1f1b", *CUT), (UNTIED,)),
    "cut-to-stock": (("v-half", *CUT), ("stock",), (UNTIED,)),
    "cut-to-stock-tied": (("1f1b", *CUT), ("stock",), ()),
    "cut-to-half-the-pipeline": (("v-half", *CUT), ("interleaved", *CUT, *TP2), (UNTIED,)),
}


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        EXCHANGES,
        ["cut-to-half-the-pipeline"],
        "that both saves and loads shards; initial values follow from stock's names, so test_trains_as_stock sees a wrong one",
    ),
)
def test_checkpoints_are_interchangeable_with_stock(train, tmp_path, name):
    before, after, flags = EXCHANGES[name]
    train(*before, *flags, "--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2")
    resumed = train(
        *after,
        *(*flags, "--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler"),
        initialise=False,
    )
    uninterrupted = train("stock", *flags, "--train-iters", "4")
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=LATER)
