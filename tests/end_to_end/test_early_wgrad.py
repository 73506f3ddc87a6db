"""Weight gradients that are computed in I add up as stock's do, and nothing of theirs waits for W."""

from __future__ import annotations

import pytest
from comparing import assert_predicted_bytes, assert_same_training
from model_flags import ALL_TO_ALL, OVERLAP, PADDED, SHARED_EXPERTS, SIX, UNTIED, VOCABULARY
from test_multi_token import ONE

SECOND, ALL = "experts_fc2", "head,experts_fc1,experts_fc2"
FLAG = "--pipemem-early-wgrad"


def test_local_experts_and_the_head_hold_less_for_w(equals_stock):
    """All experts get as many tokens, so bytes are predicted exactly."""
    flags = (*ALL_TO_ALL, *PADDED, "--moe-ffn-hidden-size", "32", *SHARED_EXPERTS, *SIX, *OVERLAP)
    runs = [equals_stock("v-half", *flags, ours=(FLAG, early))[0] for early in ("none", SECOND, ALL)]
    peaks = [max(run.counted_peaks) for run in runs]
    assert peaks[0] > peaks[1] > peaks[2]


def test_the_head_of_multi_token_prediction(train_small, equals_stock):
    """It predicts twice with one weight, and a copy of the embedding stands on its stage."""
    run, _ = equals_stock("zb-h1", *ONE, ours=(FLAG, "head"))
    assert run.counted_peaks[-1] < train_small("zb-h1", *ONE, FLAG, "none").counted_peaks[-1]


def test_a_head_that_is_cut_over_the_pipeline_is_left_alone(train_small):
    early, waiting = (train_small("zb-h1", VOCABULARY, "2", *more) for more in ((FLAG, "head"), ()))
    assert early.losses == waiting.losses
    assert early.counted_peaks == waiting.counted_peaks


@pytest.mark.parametrize(("size", "moves"), [("8000", True), ("100", False)])
def test_auto_runs_w_earlier_for_a_large_vocabulary(train_small, size, moves):
    """The rank of a large head would hold more than any under 1F1B; that of a small one would not."""
    flags = ("--vocab-size", size, UNTIED)
    first = train_small("1f1b", *flags)
    auto, none = (train_small("zb-h1", *flags, FLAG, text) for text in ("auto", "none"))
    for run in (auto, none):
        assert_same_training(run, first)
        assert_predicted_bytes(run)
    assert (max(none.counted_peaks) > max(first.counted_peaks)) == moves
    assert max(auto.counted_peaks) <= max(first.counted_peaks)
    assert ("W run earlier" in auto.plans[0]["notes"]) == moves and not none.plans[0]["notes"]
    assert (auto.counted_peaks == none.counted_peaks) != moves
