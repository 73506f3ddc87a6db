"""Forwards and backwards in pairs train as the plain order does, and as Megatron's own overlap does."""

from __future__ import annotations

import pytest
from comparing import assert_close_training, assert_same_training
from model_flags import ALL_TO_ALL, PP2, SHARED_EXPERTS
from test_experts import LOSSES

from megatron_pipemem.tools.planner.explanation import case_of_report

OVERLAP = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
PLAIN = (*ALL_TO_ALL, *SHARED_EXPERTS, *PP2, "--num-layers", "4", "--bf16")
FLAGS = (*PLAIN, *LOSSES)
EIGHT = ("--global-batch-size", "8")


@pytest.mark.parametrize(("schedule", "batch"), [("v-half", ()), ("auto", EIGHT)], ids=["v-half", "auto"])
def test_trains_as_the_plain_order(train, equals_stock, schedule, batch):
    equals_stock(schedule, *FLAGS, *batch, ours=OVERLAP, nbytes="bounded", train=train)


def test_trains_as_megatrons_own_overlap(train):
    flags = (*FLAGS, *EIGHT, "--num-virtual-stages-per-pipeline-rank", "2", OVERLAP[0], "--train-iters", "5")
    run = train("interleaved", *flags, "--pipemem-costs", "profile")
    stock = train("stock", *flags)
    assert_same_training(run, stock)
    assert all("[not-for-stock]" in rank["failure"] for rank in stock.ranks)
    # Times of pairs and of single passes are measured, and the last step can be explained with them. It has pairs if they
    # pay by what was measured.
    assert [plan["priced_by"] for plan in run.plans] == ["unit", "measured"]
    case = case_of_report({name: getattr(run, name) for name in ("last_step", "plans", "ranks")})
    assert all(seconds > 0 for seconds in (*case.step.median_ns_of_pairs.values(), *case.step.median_ns.values()))


def test_two_replicas_train_as_the_plain_order(train):
    flags = (*PLAIN, *EIGHT)
    assert_close_training(train("dualpipe", *flags, *OVERLAP), train("dualpipe", *flags))
