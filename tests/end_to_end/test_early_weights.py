"""Weight gradients that are computed in I add up as stock's do, and nothing of theirs waits for W."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from test_experts import ALL_TO_ALL, EXPERTS, PADDED, THREE_EACH
from test_multi_token import ONE

from megatron_pipemem import build_schedule

NARROW = ("--moe-ffn-hidden-size", "32")
SHARED_EXPERTS = ("--moe-shared-expert-intermediate-size", "64")
SECOND, ALL = "experts_fc2", "head,experts_fc1,experts_fc2"
FLAG = "--pipemem-early-weights"


@pytest.mark.parametrize("schedule", rest_nightly(["zb-h1", "v-half"], ["v-half"], "v-half"))
def test_local_experts_and_the_head_hold_less_for_w(train_small, assert_same_training, schedule):
    """All experts get as many tokens, so bytes are predicted exactly."""
    buckets = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
    flags = (*ALL_TO_ALL, *PADDED, *NARROW, *SHARED_EXPERTS, *THREE_EACH, *buckets)
    runs = {early: train_small(schedule, *flags, FLAG, early) for early in ("none", SECOND, ALL)}
    stock = train_small("stock", *flags)
    for run in runs.values():
        assert_same_training(run, stock)
        assert run.predicted_peaks == run.counted_peaks
    peaks = {early: max(run.counted_peaks) for early, run in runs.items()}
    assert peaks["none"] > peaks[SECOND] > peaks[ALL]


@nightly("tests/planner/test_early_weights.py says which modules auto names")
def test_wide_experts_wait_unless_told_otherwise(train_small, tmp_path):
    """In a file's schedule, where every W keeps its place."""
    path = tmp_path / "zb-h1.csv"
    path.write_text(build_schedule("zb-h1", num_devices=2, num_microbatches=3).to_csv())
    flags = (*EXPERTS, *PADDED, *THREE_EACH, "--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "256")
    auto, none, early = (
        train_small(str(path), *flags, FLAG, names).counted_peaks for names in ("auto", "none", SECOND)
    )
    assert auto == none != early


def test_the_head_of_multi_token_prediction(train_small, assert_same_training):
    """It predicts twice with one weight, and a copy of the embedding stands on its stage."""
    run, stock = train_small("zb-h1", *ONE, FLAG, "head"), train_small("stock", *ONE)
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks
    assert run.counted_peaks[-1] < train_small("zb-h1", *ONE, FLAG, "none").counted_peaks[-1]


def test_a_head_that_is_cut_over_the_pipeline_is_left_alone(train_small):
    cut = ("--pipemem-vocab-parallel", "2")
    early, waiting = (train_small("zb-h1", *cut, *more) for more in ((FLAG, "head"), ()))
    assert early.losses == waiting.losses
    assert early.counted_peaks == waiting.counted_peaks


def test_auto_runs_w_earlier_for_a_large_vocabulary(train_small, assert_same_training):
    """The rank of a large head would hold more than any under 1F1B; that of a small one would not."""
    for size, moves in (("8000", True), ("100", False)):
        flags = ("--vocab-size", size, "--untie-embeddings-and-output-weights")
        first = train_small("1f1b", *flags)
        auto, none = (train_small("zb-h1", *flags, FLAG, text) for text in ("auto", "none"))
        for run in (auto, none):
            assert_same_training(run, first)
            assert run.predicted_peaks == run.counted_peaks
        assert (max(none.counted_peaks) > max(first.counted_peaks)) == moves
        assert max(auto.counted_peaks) <= max(first.counted_peaks)
        assert ("W run earlier" in auto.plans[0]["notes"]) == moves and not none.plans[0]["notes"]
        assert (auto.counted_peaks == none.counted_peaks) != moves
