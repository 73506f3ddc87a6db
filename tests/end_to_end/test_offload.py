"""Activations that leave the device, or are computed again, train as stock Megatron does within predicted memory."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from ranks import CaseFailed
from test_variants import EVALUATION, SMALL_MOE

from megatron_pipemem.schedule.registry import build_schedule

SMALL = ("--pipemem-offload-option", "min_bytes=1KiB")
KNOWN = (*SMALL, "--pipemem-offload-option", "ratio=0.8")
FULL = ("--pipemem-offload", "full", *KNOWN)
RECOMPUTE = ("--pipemem-recompute", "full")
SELECTIVELY = ("--pipemem-recompute", "selective")
SELECTIVE = ("--recompute-granularity", "selective")
BF16 = ("--bf16", *SELECTIVE, *EVALUATION)
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
TP2 = (
    *("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--global-batch-size", "4"),
)
DP2 = (
    *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--ddp-bucket-size", "20000"),
)


@pytest.fixture
def moved(assert_same_training):
    """A run that offloads: as stock in everything but memory, and in that as predicted."""

    def check(run, stock) -> None:
        assert_same_training(run, stock)
        assert run.predicted_peaks == run.counted_peaks
        away = run.of_ranks("counted_host_peak_bytes")
        assert run.of_ranks("predicted_host_peak_bytes") == away and max(away) > 0
        assert run.of_ranks("offloaded_bytes") == run.of_ranks("reloaded_bytes") and any(
            run.of_ranks("offloaded_bytes")
        )
        for rank in run.ranks:
            assert rank["stall_seconds"] == pytest.approx(sum(stall["seconds"] for stall in rank["stalls"]))
            assert {stall["waited_for"] for stall in rank["stalls"]} <= {"WAIT_OFFLOAD", "WAIT_RELOAD"}

    return check


def test_everything_that_fits_leaves_a_v(train_small, moved):
    """With a tied embedding, whose two ends are on one rank."""
    run = train_small("zbv", *FULL)
    moved(run, train_small("stock"))
    assert max(run.counted_peaks) < 0.85 * max(train_small("zbv").counted_peaks)
    (plan,) = run.plans
    assert plan["step"] == 0 and "activations are offloaded" in plan["notes"]


@pytest.mark.parametrize("schedule", rest_nightly(["po-h", "po-f"], ["po-f"], "po-f, and po-h from a file"))
def test_the_schedules_of_the_paper(train, moved, schedule):
    run = train(schedule, *SMALL)
    moved(run, train("stock"))
    least = train("v-min")
    assert max(run.counted_peaks) < max(least.counted_peaks)


def test_fused_backwards_under_data_parallelism(train_small, moved):
    run = train_small("interleaved", *DP2, "--pipemem-offload", "half", *KNOWN, ranks=4)
    moved(run, train_small("stock", *DP2, ranks=4))


def test_a_mixture_of_experts_moves_what_its_routing_left(train_small, assert_same_training):
    """Every microbatch gives every expert another number of tokens, so no two copies have the same shapes."""
    run = train_small("v-half", *SMALL_MOE, *FULL)
    assert_same_training(run, train_small("stock", *SMALL_MOE))
    assert run.of_ranks("offloaded_bytes") == run.of_ranks("reloaded_bytes") and all(run.of_ranks("offloaded_bytes"))
    assert max(run.counted_peaks) < 0.95 * max(train_small("v-half", *SMALL_MOE).counted_peaks)


def test_evaluation_leaves_the_engine_alone(train_small, moved):
    run = train_small("v-half", *BF16, *FULL)
    moved(run, train_small("stock", *BF16))
    assert run.validation


def test_a_cap_in_bytes_is_kept_from_the_first_step_on(train, moved):
    """Below what V-Min holds, and faster than it."""
    stock, least = train("stock"), train("v-min")
    cap = f"{0.6 * max(stock.counted_peaks) / 2**20:.3f}"
    run = train(
        *("auto", "--pipemem-offload", "auto", "--pipemem-memory-cap", f"{cap}MiB", *KNOWN),
        *("--pipemem-option", "seconds=1", "--pipemem-option", "placement=v"),
    )
    moved(run, stock)
    assert max(run.counted_peaks) <= float(cap) * 2**20
    assert max(run.counted_peaks) < max(least.counted_peaks)
    assert [plan["step"] for plan in run.plans] == [0, 1]
    assert run.plans[1]["planned_makespan"] < least.plans[0]["planned_makespan"]


def test_bytes_seconds_and_the_link_are_measured(train_small, moved):
    run = train_small(
        *("zb-h1", "--pipemem-offload", "half", *SMALL, "--pipemem-offload-option", "bandwidth=1GiB"),
        *("--pipemem-host-memory", "2MiB", "--train-iters", "5"),
    )
    moved(run, train_small("stock", "--train-iters", "5"))
    assert max(run.of_ranks("counted_host_peak_bytes")) <= 2**20, "its part of the host's memory"
    assert [plan["step"] for plan in run.plans] == [0, 1, 4]
    assert [plan["priced_by"] for plan in run.plans] == ["unit", "unit", "measured"]


def test_a_file_with_offload(train_small, moved, tmp_path):
    path = tmp_path / "moving.csv"
    path.write_text(build_schedule("po-h", num_devices=2, num_microbatches=4).to_csv())
    run = train_small(str(path), *SMALL)
    moved(run, train_small("stock"))
    assert run.counted_peaks == train_small("po-h", *SMALL).counted_peaks


@pytest.mark.parametrize(
    ("schedule", "flags"),
    rest_nightly(
        [("1f1b", ()), ("interleaved", ()), ("interleaved", TP2)],
        [("interleaved", ())],
        "two chunks per rank with the same backwards; test_layerwise.py with tensor parallelism",
    ),
    ids=["1f1b", "interleaved", "interleaved-tp2"],
)
def test_recomputation_as_an_action(train_small, assert_same_training, schedule, flags):
    run = train_small(schedule, *flags, *RECOMPUTE)
    assert_same_training(run, train_small("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks
    assert max(run.counted_peaks) < 0.75 * max(train_small(schedule, *flags).counted_peaks)


@pytest.mark.parametrize(
    ("schedule", "flags"),
    rest_nightly(
        [("1f1b", ()), ("zbv", BF16), ("interleaved", TP2), ("v-half", (*SMALL_MOE, *FULL))],
        [("zbv", BF16), ("v-half", (*SMALL_MOE, *FULL))],
        "the same action with another placement; test_layerwise.py with tensor parallelism",
    ),
    ids=["1f1b", "zbv-beside-megatrons-own", "interleaved-tp2", "v-half-moe-offloaded"],
)
def test_selective_recomputation(train_small, assert_same_training, schedule, flags):
    run = train_small(schedule, *flags, *SELECTIVELY)
    assert_same_training(run, train_small("stock", *[flag for flag in flags if flag not in FULL]))
    if schedule != "v-half":  # experts get other numbers of tokens in every microbatch
        assert run.predicted_peaks == run.counted_peaks
    assert max(run.counted_peaks) < 0.9 * max(train_small(schedule, *flags).counted_peaks)


def test_selective_recomputation_of_what_is_offloaded(train_small, moved):
    run = train_small("zbv", *FULL, *SELECTIVELY)
    moved(run, train_small("stock"))
    plain = train_small("zbv", *FULL)
    assert max(run.of_ranks("offloaded_bytes")) < max(plain.of_ranks("offloaded_bytes"))
    assert max(run.counted_peaks) < max(plain.counted_peaks)


@pytest.mark.parametrize("again", rest_nightly(["full", "selective"], ["selective"], "test_layerwise.py"))
def test_recomputation_with_the_same_random_numbers(train_small, again):
    run, plain = train_small("v-half", *DROPOUT, "--pipemem-recompute", again), train_small("v-half", *DROPOUT)
    assert run.losses == plain.losses and run.grad_norms == plain.grad_norms
    assert plain.losses != train_small("v-half").losses, "there is dropout"


def test_a_cap_is_kept_by_as_little_recomputation_as_it_takes(train, assert_same_training):
    three_steps = ("--train-iters", "3")
    stock, least = train("stock", *three_steps), train("1f1b", *RECOMPUTE)
    cap = 0.5 * (max(stock.counted_peaks) + max(least.counted_peaks)) / 2**20
    run = train("1f1b", *three_steps, "--pipemem-recompute", "auto", "--pipemem-memory-cap", f"{cap:.3f}MiB")
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks and max(run.counted_peaks) <= cap * 2**20
    assert [plan["step"] for plan in run.plans] == [0, 1, 2], "two steps show the bytes"
    notes = run.plans[-1]["notes"]
    assert "selective recomputation of stages [" in notes and "3" not in notes.split("stages")[-1], (
        "3 has little in flight"
    )


@pytest.mark.parametrize(
    ("schedule", "ratio", "share", "told"),
    [
        (
            "interleaved",
            1.0,
            0.2,
            ("activations are offloaded", "stay (not needed)", "selective recomputation of stages"),
        ),
        ("1f1b", 2.0, 0.1, ("selective recomputation of stages [2]", "full recomputation of stages [0, 1]")),
    ],
)
def test_ways_to_keep_a_cap_are_mixed(train, assert_same_training, schedule, ratio, share, told):
    """Keeping, offloading, and recomputing in part or wholly, on a fast and on a slow channel."""
    three_steps = ("--train-iters", "3")
    stock, least = train("stock", *three_steps), train("1f1b", *RECOMPUTE)
    cap = (share * max(stock.counted_peaks) + (1 - share) * max(least.counted_peaks)) / 2**20
    auto = ("--pipemem-offload", "auto", "--pipemem-recompute", "auto", "--pipemem-memory-cap", f"{cap:.3f}MiB")
    run = train(schedule, *auto, *SMALL, *three_steps, "--pipemem-offload-option", f"ratio={ratio}")
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks and max(run.counted_peaks) <= cap * 2**20
    assert run.of_ranks("predicted_host_peak_bytes") == run.of_ranks("counted_host_peak_bytes")
    assert all(words in run.plans[-1]["notes"] for words in told), run.plans[-1]["notes"]


@pytest.mark.parametrize(
    ("schedule", "sabotage", "flags", "code"),
    [
        ("zbv", "copies fail", FULL, "offload-thread"),
        ("zbv", "copies are wrong", (*FULL, "--pipemem-offload-option", "guard=1"), "changed-while-away"),
        pytest.param(
            *("po-f", None, (*SMALL, "--pipemem-host-memory", "512KiB"), "host-memory"),
            marks=nightly("a run ends so when copies fail; tests/runtime/test_offload_pool.py for this error"),
        ),
    ],
    ids=["copies-fail", "copies-are-wrong", "no-host-memory"],
)
def test_what_goes_wrong_is_told_and_ends_the_run(train_small, schedule, sabotage, flags, code):
    with pytest.raises(CaseFailed) as failed:
        train_small(schedule, *flags, sabotage=sabotage)
    assert f"[{code}]" in str(failed.value)
