"""Schedules that a search makes for the run, or that a file holds, train as stock Megatron does and keep the cap."""

from __future__ import annotations

import pytest
from model_flags import DISTRIBUTED, LAYOUT, QUICK, SIX
from ranks import CaseFailed
from refusals import check_refusal

from megatron_pipemem.schedule.registry import build_schedule

CAP = "--pipemem-memory-cap"


def test_keeps_a_cap_in_activation_units(train, equals_stock):
    run, stock = equals_stock("auto", ours=(CAP, "0.6", *QUICK), train=train)
    # Activation units count layers; embedding, head and messages come on top.
    assert max(run.counted_peaks) <= 0.65 * max(stock.counted_peaks)
    (plan,) = run.plans
    assert (plan["step"], plan["schedule"], plan["microbatches"]) == (0, "auto", 6)
    assert plan["lower_bound"] <= plan["planned_makespan"] and plan["measured_makespan"] > 0
    assert plan["search_seconds"] > 0


def test_keeps_a_cap_in_bytes_from_the_first_step_on(train, equals_stock):
    cap = f"{0.45 * max(train('stock').counted_peaks) / 2**20:.3f}"
    run, _ = equals_stock("auto", ours=(CAP, f"{cap}MiB", *QUICK), train=train)
    assert max(run.counted_peaks) <= float(cap) * 2**20
    counting, planned = run.plans
    assert [counting["step"], planned["step"]] == [0, 1]
    assert planned["reason"] == "bytes counted"
    assert planned["planned_makespan"] < counting["planned_makespan"]


def test_bytes_that_one_microbatch_exceeds_are_refused_on_every_rank(train_small):
    with pytest.raises(CaseFailed) as error:
        train_small("auto", CAP, "200KiB", *QUICK)
    assert str(error.value).count("[cap-unreachable]") == 2, error.value
    check_refusal(str(error.value), "cap-unreachable", "204800B")


@pytest.mark.parametrize(
    ("ours", "placement"),
    [((LAYOUT, "Ettt|tL"), "linear"), (("--pipemem-option", "placement=interleaved"), "interleaved")],
    ids=["linear-by-layout", "interleaved"],
)
def test_every_placement(equals_stock, ours, placement):
    run, _ = equals_stock("auto", ours=(*ours, *QUICK))
    assert {plan["placement"] for plan in run.plans} == {placement}


def test_data_parallel_replicas_run_the_same_schedule(equals_stock):
    equals_stock("auto", *DISTRIBUTED, *SIX, ours=(CAP, "0.8", *QUICK))


def test_every_number_of_microbatches_is_planned_when_it_comes(equals_stock):
    growing = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 128:4 384:8", "--train-iters", "3")
    run, _ = equals_stock("auto", *growing, ours=QUICK)
    assert [plan["microbatches"] for plan in run.plans] == [2, 4, 8]


def test_plans_anew_with_measured_costs(equals_stock, tmp_path):
    ours = ("--pipemem-costs", "profile", CAP, "0.8", *QUICK, "--pipemem-trace", str(tmp_path))
    run, _ = equals_stock("auto", "--train-iters", "6", ours=ours)
    first, second = run.plans
    assert (first["step"], first["priced_by"]) == (0, "unit")
    assert (second["step"], second["priced_by"]) == (4, "measured")
    assert second["reason"].startswith("costs measured")
    prices = second["costs"]
    assert len(set(prices["forward"])) == len(prices["forward"]), "every stage has its own"
    assert all(0 < price < 10 for name in ("forward", "backward_input", "backward_weight") for price in prices[name])
    assert prices["p2p"] and all(0 < seconds < 1 for seconds in prices["p2p"].values())
    # No more can be said of times here: the ranks share cores, and the plan has one for every device.
    assert second["planned_makespan"] > 0 and second["measured_makespan"] > 0
    names = {f"{name}.{suffix}" for name in ("plan", "run") for suffix in ("html", "png", "json")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_file_for_another_batch_is_refused_on_every_rank(train_small, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(build_schedule("v-min", num_devices=2, num_microbatches=12).to_csv())
    with pytest.raises(CaseFailed) as error:
        train_small(str(path))
    assert str(error.value).count("[other-size]") == 2, error.value
    check_refusal(str(error.value), "other-size", 12, 4)
