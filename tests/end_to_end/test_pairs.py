"""Forwards and backwards in pairs train as the plain order does, and as Megatron's own overlap does."""

from __future__ import annotations

import pytest
from comparing import assert_close_training, assert_same_training
from model_flags import ALL_TO_ALL, PP2, SHARED_EXPERTS
from test_experts import LOSSES

from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.planner.explanation import case_of_report

OVERLAP = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
PLAIN = (*ALL_TO_ALL, *SHARED_EXPERTS, *PP2, "--num-layers", "4", "--bf16")
FLAGS = (*PLAIN, *LOSSES)
EIGHT = ("--global-batch-size", "8")


@pytest.mark.parametrize(("schedule", "batch"), [("v-half", ()), ("auto", EIGHT)], ids=["v-half", "auto"])
def test_trains_as_the_plain_order(train, equals_stock, schedule, batch):
    equals_stock(schedule, *FLAGS, *batch, ours=OVERLAP, nbytes="bounded", train=train)


def test_pairs_of_two_input_gradients_train_as_the_plain_order(train, equals_stock, tmp_path):
    """Of two microbatches of a stage, and of two stages."""
    text = (
        "0F0,0F1,0F2,0F3,3F0,3F1,(3I0;3I1)O,3W0,3F2,3W1,3F3,(3I2;3I3)O,3W2,3W3,(0I0;0I1)O,0W0,0W1,(0I2;0I3)O,0W2,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,1F3,2F2,2F3,(2I0;2I1)O,2W0,2I2,2W1,(1I0;2I3)O,1W0,(1I1;1I2)O,2W2,1I3,2W3,1W1,1W2,1W3\n"
    )
    file = tmp_path / "backwards.csv"
    file.write_text(text.replace("O", "OVERLAP_B_B"))
    assert len(Schedule.from_csv(file.read_text()).pairs) == 7
    equals_stock(str(file), *FLAGS, *EIGHT, ours=OVERLAP, nbytes="bounded", train=train)


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
