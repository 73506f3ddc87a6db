"""Schedules that a search makes for the run, or that a file holds, train as stock Megatron does and keep the cap."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from ranks import CaseFailed
from refusals import check_refusal
from test_variants import EVALUATION

from megatron_pipemem.schedule.registry import build_schedule

QUICK = ("--pipemem-option", "seconds=0.3")
PROFILE = ("--pipemem-costs", "profile", "--train-iters", "6")
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--global-batch-size", "6")
UNTIED = "--untie-embeddings-and-output-weights"
GROWING = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 128:4 384:8", "--train-iters", "3")


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


@pytest.mark.parametrize(
    ("share", "flags"), rest_nightly([(0.45, ()), (0.7, EVALUATION)], [(0.45, ())], "a tighter cap; test_variants.py")
)
def test_keeps_a_cap_in_bytes_from_the_first_step_on(train, assert_same_training, share, flags):
    stock = train("stock", *flags)
    cap = share * max(stock.counted_peaks) / 2**20
    run = train("auto", "--pipemem-memory-cap", f"{cap:.3f}MiB", *QUICK, *flags)
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks
    assert max(run.counted_peaks) <= float(f"{cap:.3f}") * 2**20
    counting, planned = run.plans
    assert [counting["step"], planned["step"]] == [0, 1]
    assert planned["reason"] == "bytes counted"
    assert planned["planned_makespan"] < counting["planned_makespan"]


def test_bytes_that_one_microbatch_exceeds_are_refused_on_every_rank(train_small):
    with pytest.raises(CaseFailed) as error:
        train_small("auto", "--pipemem-memory-cap", "200KiB", *QUICK)
    assert str(error.value).count("[cap-unreachable]") == 2, error.value
    check_refusal(str(error.value), "cap-unreachable", "204800B")


@pytest.mark.parametrize(
    ("flags", "placement"),
    [
        pytest.param(("--pipemem-option", "placement=linear"), "linear", marks=nightly("the same by the layout")),
        (("--pipeline-model-parallel-layout", "Ettt|tL"), "linear"),
        pytest.param(
            *(("--pipemem-option", "placement=interleaved", UNTIED), "interleaved"), marks=nightly("tied ends")
        ),
        (("--pipemem-option", "placement=interleaved"), "interleaved"),
    ],
    ids=["linear", "linear-by-layout", "interleaved-untied", "interleaved-tied"],
)
def test_every_placement(train_small, assert_same_training, flags, placement):
    run = train_small("auto", *flags, *QUICK)
    assert_same_training(run, train_small("stock", *(flag for flag in flags if flag == UNTIED)))
    assert run.predicted_peaks == run.counted_peaks
    assert {plan["placement"] for plan in run.plans} == {placement}


def test_data_parallel_replicas_run_the_same_schedule(train_small, assert_same_training):
    run = train_small("auto", *DISTRIBUTED, "--pipemem-memory-cap", "0.8", *QUICK, ranks=4)
    assert_same_training(run, train_small("stock", *DISTRIBUTED, ranks=4))
    assert run.predicted_peaks == run.counted_peaks


def test_every_number_of_microbatches_is_planned_when_it_comes(train_small, assert_same_training):
    run = train_small("auto", *GROWING, *QUICK)
    assert_same_training(run, train_small("stock", *GROWING))
    assert run.predicted_peaks == run.counted_peaks
    assert [plan["microbatches"] for plan in run.plans] == [2, 4, 8]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ((), 2),
        pytest.param(DISTRIBUTED, 4, marks=nightly("the schedule of replicas above; tests/mcore/test_agreement.py")),
    ],
    ids=["pp2", "pp2-dp2"],
)
def test_plans_anew_with_measured_costs(train_small, assert_same_training, tmp_path, flags, ranks):
    own = (*PROFILE, "--pipemem-memory-cap", "0.8", *QUICK, "--pipemem-trace", str(tmp_path))
    run = train_small("auto", *own, *flags, ranks=ranks)
    assert_same_training(run, train_small("stock", "--train-iters", "6", *flags, ranks=ranks))
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
def test_measured_costs_price_any_schedule(train_small, assert_same_training):
    run = train_small("1f1b", *PROFILE)
    assert_same_training(run, train_small("stock", "--train-iters", "6"))
    first, second = run.plans
    assert first["costs"]["forward"] == [1.0] * 2
    assert second["priced_by"] == "measured" and second["costs"]["forward"] != first["costs"]["forward"]


@pytest.fixture
def file(tmp_path):
    def write(schedule: str, microbatches: int) -> str:
        path = tmp_path / "schedule.csv"
        path.write_text(build_schedule(schedule, num_devices=2, num_microbatches=microbatches).to_csv())
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
def test_runs_a_file(train_small, assert_same_training, file, schedule, flags):
    """With every W at its place, where a named schedule may run W earlier."""
    run = train_small(file(schedule, 4), *flags)
    assert_same_training(run, train_small("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks
    published = train_small(schedule, *flags, "--pipemem-early-weights", "none")
    assert run.counted_peaks == published.counted_peaks


def test_a_file_for_another_batch_is_refused_on_every_rank(train_small, file):
    with pytest.raises(CaseFailed) as error:
        train_small(file("v-min", 12))
    assert str(error.value).count("[other-size]") == 2, error.value
    check_refusal(str(error.value), "other-size", 12, 4)
