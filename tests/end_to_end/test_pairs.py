"""Forwards and backwards in pairs train as the plain order does, and as Megatron's own overlap does."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from test_experts import ALL_TO_ALL, LOSSES, SHARED

from megatron_pipemem.tools.planner.explanation import case_of_report

OVERLAP = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
FLAGS = (*ALL_TO_ALL, *SHARED, *LOSSES, "--bf16")
SCHEDULES = ("v-half", "zb-h1", "1f1b", "zbv", "dualpipe-v", "auto", "looped-bfs", "gis")


@pytest.mark.parametrize(
    "schedule",
    rest_nightly(SCHEDULES, ("v-half", "zb-h1"), "the same actions in another order (tests/schedule/test_pairs)"),
)
def test_trains_as_the_plain_order(train, assert_same_training, schedule):
    run = train(schedule, *FLAGS, *OVERLAP)
    assert_same_training(run, train("stock", *FLAGS))
    for rank in run.ranks:
        least, most, counted = (rank[f"{name}_peak_bytes"] for name in ("predicted_least", "predicted", "counted"))
        assert least <= counted <= most


def test_trains_as_megatrons_own_overlap(train, assert_same_training):
    flags = (*FLAGS, "--num-virtual-stages-per-pipeline-rank", "2", "--global-batch-size", "8", OVERLAP[0])
    flags = (*flags, "--train-iters", "5")
    run = train("interleaved", *flags, "--pipemem-costs", "profile")
    stock = train("stock", *flags)
    assert_same_training(run, stock)
    assert all("[not-for-stock]" in rank["failure"] for rank in stock.ranks)
    # Times of pairs and of single passes are measured, and the last step can be explained with them. It has pairs if they
    # pay by what was measured.
    assert [plan["priced_by"] for plan in run.plans] == ["unit", "measured"]
    case = case_of_report({name: getattr(run, name) for name in ("last_step", "plans", "ranks")})
    assert all(seconds > 0 for seconds in (*case.step.usual_pairs.values(), *case.step.usual.values()))


DEEP = ("--bf16", "--pipeline-model-parallel-size", "4", "--num-layers", "8", "--global-batch-size", "16")


@nightly("the same pieces on two pipeline ranks, above")
def test_four_pipeline_ranks_train_as_the_plain_order_and_as_megatrons_own_overlap(
    train_on_eight_ranks, assert_same_training
):
    train = train_on_eight_ranks
    flags = (*FLAGS, *DEEP)
    plain = train("stock", *flags)
    for schedule in ("zbv", "v-half", "dualpipe-v", "zb-h1", "auto"):
        assert_same_training(train(schedule, *flags, *OVERLAP), plain)
    interleaved = (*flags, "--num-virtual-stages-per-pipeline-rank", "2", OVERLAP[0])
    assert_same_training(train("interleaved", *interleaved), train("stock", *interleaved))


@nightly("two replicas on two pipeline ranks, below")
def test_two_replicas_on_four_pipeline_ranks_train_as_the_plain_order(train_on_eight_ranks, assert_close_training):
    flags = (*ALL_TO_ALL, *SHARED, *DEEP)
    assert_close_training(train_on_eight_ranks("dualpipe", *flags, *OVERLAP), train_on_eight_ranks("dualpipe", *flags))


def test_two_replicas_train_as_the_plain_order(train, assert_close_training):
    flags = (*ALL_TO_ALL, *SHARED, "--bf16", "--global-batch-size", "8")
    assert_close_training(train("dualpipe", *flags, *OVERLAP), train("dualpipe", *flags))
