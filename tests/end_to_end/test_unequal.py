"""Microbatches that are weighed run in another order, and train as in arrival order but for the order of sums."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_flags import DISTRIBUTED, DROPOUT, EP2, EVALUATION, SIX, TP_AND_SP, UNTIED, VOCABULARY

BY_CONTENT = ("--pipemem-microbatch-costs", f"{Path(__file__).with_name('content_weights.py')}:weight")
# Steps of 2 and 5 microbatches.
ANOTHER_NUMBER = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 256:5", "--train-iters", "4")
# name -> schedule, flags of stock too, flags of ours
CASES = {
    "cut vocabulary": ("1f1b", (UNTIED,), (VOCABULARY, "2")),
    "another number": ("v-half", ANOTHER_NUMBER, ()),
    "tensor-parallel dropout": ("v-half", (*DROPOUT, *TP_AND_SP), ()),
    "data parallel": ("interleaved", (*DISTRIBUTED, *SIX), ()),
    "two replicas": ("chimera", EVALUATION, ()),
    "experts": ("zb-h1", (*EP2, *SIX), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_stock_but_for_the_order_of_sums(equals_stock, name):
    schedule, flags, own = CASES[name]
    nbytes = None if name == "experts" else "exact"
    how = {"initialise": False} if "dropout" in name else {}
    run, stock = equals_stock(schedule, *flags, ours=(*BY_CONTENT, *own), close=True, nbytes=nbytes, **how)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=1e-7)
    (plan,) = (plan for plan in run.plans if plan["microbatches"] > 2)
    assert plan["planned_makespan"] <= plan["arrival_makespan"]
