"""Microbatches that are weighed run in another order, and train as in arrival order but for the order of sums."""

from __future__ import annotations

from pathlib import Path

import pytest

BY_CONTENT = ("--pipemem-microbatch-costs", f"{Path(__file__).with_name('content_weights.py')}:weight")
# Steps of 2 and 5 microbatches.
ANOTHER_NUMBER = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 256:5", "--train-iters", "4")
UNTIED = "--untie-embeddings-and-output-weights"
PP2 = ("--pipeline-model-parallel-size", "2")
OVERLAP = (
    *(*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--ddp-bucket-size", "20000", "--global-batch-size", "6"),
)
DROPOUT = ("--pipemem-random", "layerwise", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
TP_AND_SP = (*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "4")
EVALUATED = ("--eval-iters", "1", "--eval-interval", "2", "--train-iters", "3")
EXPERTS = (
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--expert-model-parallel-size", "2", *PP2, "--global-batch-size", "6"),
)


@pytest.mark.parametrize(
    ("schedule", "flags", "own"),
    [
        ("1f1b", (UNTIED,), ("--pipemem-vocab-parallel", "2")),
        ("v-half", ANOTHER_NUMBER, ()),
        ("v-half", (*DROPOUT, *TP_AND_SP), ()),  # in the order of test_layerwise.py, whose stock run it shares
        ("interleaved", OVERLAP, ()),
        ("chimera", EVALUATED, ()),
        ("zb-h1", EXPERTS, ()),
    ],
    ids=["cut-vocabulary", "another-number", "tensor-parallel-dropout", "data-parallel", "two-replicas", "experts"],
)
def test_trains_as_stock_but_for_the_order_of_sums(train_small, assert_close_training, schedule, flags, own):
    how = {"ranks": 4} if flags is OVERLAP else {"initialise": False} if "--pipemem-random" in flags else {}
    run, stock = train_small(schedule, *flags, *BY_CONTENT, *own, **how), train_small("stock", *flags, **how)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=1e-7)
    assert_close_training(run, stock)
    if "--num-experts" not in flags:  # of which the prediction is what they hold at most
        assert run.predicted_peaks == run.counted_peaks
    (plan,) = (each for each in run.plans if each["microbatches"] > 2)
    assert plan["planned_makespan"] <= plan["arrival_makespan"]
