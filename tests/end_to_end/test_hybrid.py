"""HybridModels of local layers, cut by ``|`` in their pattern, train as on stock Megatron."""

from __future__ import annotations

import pytest
from comparing import assert_close_gradients, assert_close_training, assert_predicted_bytes, assert_same_training
from lanes import nightly
from model_flags import AUX_LOSS, EXPERTS, RESUMED, UNTIED, VOCABULARY
from quickstart import ROUNDING
from test_vocabulary import FIRST, LATER

# The same layers on 2 and 4 stages, one of them without any; without |, the schedule's cuts are written for the user.
CUTS = {1: "*-*-|**-*", 2: "*-*||-**|-*", None: "*-*-**-*"}
SELECTIVELY = ("--pipemem-recompute", "selective")


def of(pattern: str, *more: str) -> tuple[str, ...]:
    """Flags of a hybrid model."""
    spec = ("--spec", "megatron_pipemem.tools.cpu.hybrid_layers", "hybrid_stack_spec")
    return (*spec, "--hybrid-layer-pattern", pattern, *more)


# schedule, which of the cuts, flags of ours
EXACT = [("zb-h1", 1, ()), ("interleaved", None, ()), ("v-half", 2, ()), ("v-half", 2, SELECTIVELY)]
NAMES = ["zb-h1", "interleaved", "v-half", "recomputed-in-part"]


@pytest.mark.parametrize(("schedule", "cut", "ours"), EXACT, ids=NAMES)
def test_trains_as_stock(train_small, schedule, cut, ours):
    run = train_small(schedule, *of(CUTS[cut], *ours))
    assert_same_training(run, train_small("stock", *of(CUTS[1])))
    assert_predicted_bytes(run)
    if ours:
        whole = train_small(schedule, *of(CUTS[cut]))
        assert all(map(int.__lt__, run.counted_peaks, whole.counted_peaks)), "it drops what norms keep"


def test_a_mixture_of_experts_trains_as_stock(train_small):
    # Experts on every rank: else Megatron's own log of their losses hangs.
    runs = [
        train_small(schedule, *of(pattern, *EXPERTS, *AUX_LOSS))
        for schedule, pattern in (("v-half", "*E|-|E*|E"), ("stock", "*E-|E*E"))
    ]
    assert_same_training(*runs)


# Schedules whose sums are ordered otherwise than stock's.
@pytest.mark.parametrize(("schedule", "ours"), [("chimera", ()), ("zbv", (VOCABULARY, "2"))])
def test_gradients_are_stocks(train_small, schedule, ours):
    stock = train_small("stock", *of(CUTS[1], UNTIED), gradients=True)
    run = train_small(schedule, *of(CUTS[None], UNTIED, *ours), gradients=True)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=FIRST)
    assert_close_training(run, stock, LATER)
    assert_close_gradients(run, stock, FIRST)
    assert_predicted_bytes(run)


@nightly("initial values follow from the names in checkpoints, so the tests above see a wrong one; test_checkpoints.py")
@pytest.mark.parametrize(
    ("before", "whole"), [(("stock",), ()), (("v-half", *of("*-|*-|*-|*-")), of("*-*-|*-*-"))], ids=["gpt", "v"]
)
def test_checkpoints_go_to_another_cut(train_small, tmp_path, before, whole):
    """Of a GPT with as many layers, or of a V, to a model without a pipeline, which adds gradients in another order."""
    train_small(*before, UNTIED, "--save", str(tmp_path), "--save-interval", "2")
    load = (*RESUMED, "--load", str(tmp_path), "--no-load-rng", "--pipeline-model-parallel-size", "1")
    resumed = train_small("stock", *of("*-*-*-*-", UNTIED, *load), initialise=False)
    uninterrupted = train_small("stock", *whole, UNTIED, "--train-iters", "4")
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=ROUNDING)
