"""Schedules that a search makes for the run, or that a file holds, train as stock Megatron does and keep the cap."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from ranks import CaseFailed
from test_variants import EVALUATION

from megatron_pipemem.schedule.registry import build_schedule

QUICK = ("--pipemem-option", "seconds=1")
PROFILE = ("--pipemem-costs", "profile", "--train-iters", "7")
PP2 = ("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--overlap-grad-reduce")
UNTIED = "--untie-embeddings-and-output-weights"
GROWING = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 256:4 768:8", "--train-iters", "6")


def test_keeps_a_cap_in_activation_units(train, assert_same_training):
    run, stock = train("auto", "--pipemem-memory-cap", "0.6", *QUICK), train("stock")
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks
    # Activation units count layers; embedding, head and messages come on top.
    assert max(run.counted_peaks) <= 0.65 * max(stock.counted_peaks)
    (plan,) = run.plans
    assert (plan["step"], plan["schedule"], plan["microbatches"]) == (0, "auto", 6)
    assert plan["lower_bound"] <= plan["planned_makespan"] and plan["measured_makespan"] > 0
    assert plan["search_seconds"] > 0


@pytest.mark.parametrize("share", rest_nightly([0.45, 0.7], [0.45], "a tighter cap"))
def test_keeps_a_cap_in_bytes_from_the_first_step_on(train, assert_same_training, share):
    stock = train("stock", *EVALUATION)
    cap = share * max(stock.counted_peaks) / 2**20
    run = train("auto", "--pipemem-memory-cap", f"{cap:.3f}MiB", *QUICK, *EVALUATION)
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks
    assert max(run.counted_peaks) <= float(f"{cap:.3f}") * 2**20
    counting, planned = run.plans
    assert [counting["step"], planned["step"]] == [0, 1]
    assert planned["reason"] == "bytes counted"
    assert planned["planned_makespan"] < counting["planned_makespan"]


def test_bytes_that_one_microbatch_exceeds_are_refused_on_every_rank(train):
    with pytest.raises(CaseFailed) as error:
        train("auto", "--pipemem-memory-cap", "200KiB", *QUICK)
    told = str(error.value).split("UnsupportedError: ")
    assert len(told) == 5, "one error on each of four ranks"
    assert all("no schedule keeps a memory cap of 204800B" in each and "raise" in each for each in told[1:])


@pytest.mark.parametrize(
    ("flags", "placement"),
    [
        pytest.param(("--pipemem-option", "placement=linear"), "linear", marks=nightly("the same by the layout")),
        (("--pipeline-model-parallel-layout", "Ett|tt|tt|ttL"), "linear"),
        pytest.param(
            *(("--pipemem-option", "placement=interleaved", UNTIED), "interleaved"), marks=nightly("tied ends")
        ),
        (("--pipemem-option", "placement=interleaved"), "interleaved"),
    ],
    ids=["linear", "linear-by-layout", "interleaved-untied", "interleaved-tied"],
)
def test_every_placement(train, assert_same_training, flags, placement):
    run = train("auto", *flags, *QUICK)
    assert_same_training(run, train("stock", *(flag for flag in flags if flag == UNTIED)))
    assert run.predicted_peaks == run.counted_peaks
    assert {plan["placement"] for plan in run.plans} == {placement}


def test_data_parallel_replicas_run_the_same_schedule(train, assert_same_training):
    run = train("auto", *PP2, "--pipemem-memory-cap", "0.8", *QUICK)
    assert_same_training(run, train("stock", *PP2))
    assert run.predicted_peaks == run.counted_peaks


def test_every_number_of_microbatches_is_planned_when_it_comes(train, assert_same_training):
    run = train("auto", *GROWING, *QUICK)
    assert_same_training(run, train("stock", *GROWING))
    assert run.predicted_peaks == run.counted_peaks
    assert [plan["microbatches"] for plan in run.plans] == [2, 4, 8]


@pytest.mark.parametrize(
    "flags",
    [(), pytest.param(PP2, marks=nightly("the schedule of replicas above; tests/mcore/test_agreement.py"))],
    ids=["pp4", "pp2-dp2"],
)
def test_plans_anew_with_measured_costs(train, assert_same_training, tmp_path, flags):
    run = train("auto", *PROFILE, "--pipemem-memory-cap", "0.75", *QUICK, *flags, "--pipemem-trace", str(tmp_path))
    assert_same_training(run, train("stock", "--train-iters", "7", *flags))
    assert run.predicted_peaks == run.counted_peaks
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


@nightly("test_offload.py and test_pairs.py, which measure zb-h1 and interleaved")
def test_measured_costs_price_any_schedule(train, assert_same_training):
    run = train("1f1b", *PROFILE)
    assert_same_training(run, train("stock", "--train-iters", "7"))
    first, second = run.plans
    assert first["costs"]["forward"] == [1.0] * 4
    assert second["priced_by"] == "measured" and second["costs"]["forward"] != first["costs"]["forward"]


@pytest.fixture
def file(tmp_path):
    def write(schedule: str, microbatches: int) -> str:
        path = tmp_path / "schedule.csv"
        path.write_text(build_schedule(schedule, num_devices=4, num_microbatches=microbatches).to_csv())
        return str(path)

    return write


@pytest.mark.parametrize(
    ("schedule", "flags"),
    rest_nightly(
        [("zb-h1", ()), ("v-min", ()), ("interleaved", EVALUATION)],
        [],
        "a file with offload in test_offload.py; evaluation in test_variants.py",
    ),
)
def test_runs_a_file(train, assert_same_training, file, schedule, flags):
    run = train(file(schedule, 6), *flags)
    assert_same_training(run, train("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks
    assert run.counted_peaks == train(schedule, *flags).counted_peaks


def test_a_file_for_another_batch_is_refused_on_every_rank(train, file):
    with pytest.raises(CaseFailed) as error:
        train(file("v-min", 12))
    told = str(error.value).split("UnsupportedError: ")
    assert len(told) == 5 and all("schedules 12 microbatches but this step has 6" in each for each in told[1:])
