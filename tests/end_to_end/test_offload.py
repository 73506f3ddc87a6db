"""Activations that leave the device, or are computed again, train as stock Megatron does within predicted memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from comparing import assert_predicted_bytes, assert_same_training
from model_flags import (
    DISTRIBUTED,
    EVALUATION,
    MOE,
    OFFLOADED,
    RECOMPUTED,
    SELECTIVE,
    SIX,
    SMALL_TENSORS,
)
from ranks import CaseFailed

from megatron_pipemem.schedule.registry import build_schedule

KNOWN = ("--pipemem-offload-option", "ratio=0.8")
FULL = (*OFFLOADED, *KNOWN)
SELECTIVELY = ("--pipemem-recompute", "selective")
BF16 = ("--bf16", *SELECTIVE, *EVALUATION)
THREE_STEPS = ("--train-iters", "3")


@pytest.fixture
def moves(equals_stock) -> Callable:
    """A run that offloads: as stock in everything but memory, and in that as predicted."""

    def check(schedule: str, *flags: str, **how: object):
        run, _ = equals_stock(schedule, *flags, **how)
        away = run.of_ranks("counted_host_peak_bytes")
        assert run.of_ranks("predicted_host_peak_bytes") == away and max(away) > 0
        assert run.of_ranks("offloaded_bytes") == run.of_ranks("reloaded_bytes")
        assert any(run.of_ranks("offloaded_bytes"))
        for rank in run.ranks:
            assert rank["stall_seconds"] == pytest.approx(sum(stall["seconds"] for stall in rank["stalls"]))
            assert {stall["waited_for"] for stall in rank["stalls"]} <= {"WAIT_OFFLOAD", "WAIT_RELOAD"}
        return run

    return check


def test_everything_that_fits_leaves_a_v(train_small, moves):
    """With a tied embedding, whose two ends are on one rank."""
    run = moves("zbv", ours=FULL)
    assert max(run.counted_peaks) < 0.85 * max(train_small("zbv").counted_peaks)
    (plan,) = run.plans
    assert plan["step"] == 0 and "activations are offloaded" in plan["notes"]


def test_the_schedule_of_the_paper(train, moves):
    run = moves("po-f", ours=SMALL_TENSORS, train=train)
    assert max(run.counted_peaks) < max(train("v-min").counted_peaks)


def test_fused_backwards_under_data_parallelism(moves):
    moves("interleaved", *DISTRIBUTED, *SIX, ours=("--pipemem-offload", "half", *SMALL_TENSORS, *KNOWN))


def test_a_mixture_of_experts_moves_what_its_routing_left(train_small, equals_stock):
    """Every microbatch gives every expert another number of tokens, so no two copies have the same shapes."""
    run, _ = equals_stock("v-half", *MOE, ours=FULL, nbytes=None)
    assert run.of_ranks("offloaded_bytes") == run.of_ranks("reloaded_bytes") and all(run.of_ranks("offloaded_bytes"))
    assert max(run.counted_peaks) < 0.95 * max(train_small("v-half", *MOE).counted_peaks)


def test_evaluation_leaves_the_engine_alone(moves):
    assert moves("v-half", *BF16, ours=FULL).validation


def test_a_cap_in_bytes_is_kept_from_the_first_step_on(train, moves):
    """Below what V-Min holds, and faster than it."""
    stock, least = train("stock"), train("v-min")
    cap = f"{0.6 * max(stock.counted_peaks) / 2**20:.3f}"
    ours = (
        *("--pipemem-offload", "auto", "--pipemem-memory-cap", f"{cap}MiB", *SMALL_TENSORS, *KNOWN),
        *("--pipemem-option", "seconds=1", "--pipemem-option", "placement=v"),
    )
    run = moves("auto", ours=ours, train=train)
    assert max(run.counted_peaks) <= float(cap) * 2**20
    assert max(run.counted_peaks) < max(least.counted_peaks)
    assert [plan["step"] for plan in run.plans] == [0, 1]
    assert run.plans[1]["planned_makespan"] < least.plans[0]["planned_makespan"]


def test_bytes_seconds_and_the_link_are_measured(moves):
    ours = (
        *("--pipemem-offload", "half", *SMALL_TENSORS, "--pipemem-offload-option", "bandwidth=1GiB"),
        *("--pipemem-host-memory", "2MiB"),
    )
    run = moves("zb-h1", "--train-iters", "5", ours=ours)
    assert max(run.of_ranks("counted_host_peak_bytes")) <= 2**20, "its part of the host's memory"
    assert [plan["step"] for plan in run.plans] == [0, 1, 4]
    assert [plan["priced_by"] for plan in run.plans] == ["unit", "unit", "measured"]


def test_a_file_with_offload(train_small, moves, tmp_path):
    path = tmp_path / "moving.csv"
    path.write_text(build_schedule("po-h", num_devices=2, num_microbatches=4).to_csv())
    run = moves(str(path), ours=SMALL_TENSORS)
    assert run.counted_peaks == train_small("po-h", *SMALL_TENSORS).counted_peaks


@pytest.mark.parametrize(
    ("schedule", "flags", "ours", "share"),
    [
        ("interleaved", (), RECOMPUTED, 0.75),
        ("zbv", BF16, SELECTIVELY, 0.9),
        ("v-half", MOE, (*FULL, *SELECTIVELY), 0.9),
    ],
    ids=["whole", "in-part-beside-megatrons-own", "in-part-experts-offloaded"],
)
def test_recomputation_as_an_action(train_small, equals_stock, schedule, flags, ours, share):
    nbytes = None if flags == MOE else "exact"  # experts get other numbers of tokens in every microbatch
    run, _ = equals_stock(schedule, *flags, ours=ours, nbytes=nbytes)
    plain = train_small(schedule, *flags, *ours[:-2])
    assert max(run.counted_peaks) < share * max(plain.counted_peaks)


def test_selective_recomputation_of_what_is_offloaded(train_small, moves):
    run, plain = moves("zbv", ours=(*FULL, *SELECTIVELY)), train_small("zbv", *FULL)
    assert max(run.of_ranks("offloaded_bytes")) < max(plain.of_ranks("offloaded_bytes"))
    assert max(run.counted_peaks) < max(plain.counted_peaks)


def test_recomputation_with_the_same_random_numbers(train_small):
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    run, plain = train_small("v-half", *dropout, *SELECTIVELY), train_small("v-half", *dropout)
    assert run.losses == plain.losses and run.grad_norms == plain.grad_norms
    assert plain.losses != train_small("v-half").losses, "there is dropout"


def test_a_cap_is_kept_by_as_little_recomputation_as_it_takes(train, equals_stock):
    stock, least = train("stock", *THREE_STEPS), train("1f1b", *RECOMPUTED)
    cap = 0.5 * (max(stock.counted_peaks) + max(least.counted_peaks)) / 2**20
    ours = ("--pipemem-recompute", "auto", "--pipemem-memory-cap", f"{cap:.3f}MiB")
    run, _ = equals_stock("1f1b", *THREE_STEPS, ours=ours, train=train)
    assert max(run.counted_peaks) <= cap * 2**20
    assert [plan["step"] for plan in run.plans] == [0, 1, 2], "two steps show the bytes"
    notes = run.plans[-1]["notes"]
    assert "selective recomputation of stages [" in notes
    assert "3" not in notes.split("stages")[-1], "3 has little in flight"


@pytest.mark.parametrize(
    ("schedule", "ratio", "share", "words"),
    [
        (
            *("interleaved", 1.0, 0.2),
            ("activations are offloaded", "stay (not chosen)", "selective recomputation of stages"),
        ),
        ("1f1b", 2.0, 0.1, ("selective recomputation of stages [2]", "full recomputation of stages [0, 1]")),
    ],
)
def test_ways_to_keep_a_cap_are_mixed(train, schedule, ratio, share, words):
    """Keeping, offloading, and recomputing in part or wholly, on a fast and on a slow channel."""
    stock, least = train("stock", *THREE_STEPS), train("1f1b", *RECOMPUTED)
    cap = (share * max(stock.counted_peaks) + (1 - share) * max(least.counted_peaks)) / 2**20
    auto = ("--pipemem-offload", "auto", "--pipemem-recompute", "auto", "--pipemem-memory-cap", f"{cap:.3f}MiB")
    run = train(schedule, *auto, *SMALL_TENSORS, *THREE_STEPS, "--pipemem-offload-option", f"ratio={ratio}")
    assert_same_training(run, stock)
    assert_predicted_bytes(run)
    assert max(run.counted_peaks) <= cap * 2**20
    assert run.of_ranks("predicted_host_peak_bytes") == run.of_ranks("counted_host_peak_bytes")
    assert all(text in run.plans[-1]["notes"] for text in words), run.plans[-1]["notes"]


@pytest.mark.parametrize(
    ("sabotage", "ours", "code"),
    [
        ("copies fail", FULL, "offload-thread"),
        ("copies are wrong", (*FULL, "--pipemem-offload-option", "guard=1"), "changed-while-away"),
    ],
    ids=["copies-fail", "copies-are-wrong"],
)
def test_an_error_of_the_copies_ends_the_run(train_small, sabotage, ours, code):
    with pytest.raises(CaseFailed) as failed:
        train_small("zbv", *ours, sabotage=sabotage)
    assert f"[{code}]" in str(failed.value)
