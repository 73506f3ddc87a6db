"""Every pass in a CUDA graph of its own, captured and replayed over ``cuda_graphs``, trains as the same step without graphs."""

from __future__ import annotations

import pytest
from lanes import nightly
from model_flags import (
    ALL_TO_ALL,
    AUX_LOSS,
    DISTRIBUTED,
    EVALUATION,
    EXPERTS,
    FUSION,
    LAYOUT,
    LLAMA,
    MOE,
    MULTI_TOKEN,
    OVERLAP,
    RECOMPUTE,
    RESUMED,
    SHARED_EXPERTS,
    SIX,
    TP2,
    TP_AND_SP,
    UNTIED,
)

GRAPHS = ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1")
EXPERT_PARTS = ("--cuda-graph-modules", "attn", "moe_router", "moe_preprocess")
FOUR = ("--train-iters", "4")
OVERLAPPED = "--moe-shared-expert-overlap"
PARTS_AGAIN = ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
RANDOM = ("--moe-router-force-load-balancing", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
# Steps of 2, 2, 2, 4, 4, 4 and 4 microbatches, which are captured twice. The scale is first too large for fp16.
LOSS_SCALE = (
    *("--fp16", "--initial-loss-scale", "4194304", "--hysteresis", "1", "--tensorboard-dir", "unused"),
    *("+--global-batch-size", "--step-batch-size-schedule", "0:2 384:4", "--train-iters", "7"),
)
# It doubles after every two steps.
GROWING_SCALE = ("--fp16", "--initial-loss-scale", "256", "--loss-scale-window", "2", "--tensorboard-dir", "unused")
# name -> schedule, flags, replays of a rank: passes of the steps after the first of each number of microbatches, or of each
# rank, if these have different numbers of experts' layers, which cut a forward and its gradient
CASES = {
    "distributed optimizer, evaluation": ("v-half", (*DISTRIBUTED, *EVALUATION[:-2], *FOUR, "--bf16"), 3 * 2 * 3 * 2),
    "experts": ("zb-h1", (*MOE, *EXPERT_PARTS, *FOUR), [3 * 4 * (2 + 2 + 1), 3 * 4 * (3 + 3 + 1)]),
    "recomputed": ("zb-h1", (*RECOMPUTE, *FOUR), 3 * 3 * 4),
}
FURTHER = {
    "bf16": ("zb-h1", (*FOUR, "--bf16"), 3 * 3 * 4),
    "whole backwards": ("1f1b", (*FOUR, *TP2), 3 * 2 * 4),
    "sequence parallel": ("zb-h1", (*TP_AND_SP, *FOUR), 3 * 3 * 4),
    "distributed optimizer, sequence parallel": ("v-half", (*TP_AND_SP, *DISTRIBUTED, *FOUR, "--bf16"), 3 * 2 * 3 * 4),
    "fused gradients": ("zb-h1", (*TP_AND_SP, *FUSION, *FOUR), 3 * 3 * 4),
    "reduced gradients": ("v-half", (*OVERLAP, *SIX, *FOUR), 3 * 2 * 3 * 3),
    "loss per token": ("v-half", (*LLAMA, "--calculate-per-token-loss", *FOUR), 3 * 2 * 3 * 4),
    "empty stages": ("zbv", (LAYOUT, "Et||tt|tL", *FOUR), 3 * 2 * 3 * 4),
    "experts on two ranks": ("v-half", (*ALL_TO_ALL, *SHARED_EXPERTS, *AUX_LOSS, *EXPERT_PARTS, *FOUR), 3 * 2 * 2 * 5),
    "shared experts overlap, parts recomputed": (
        "v-half",
        (*ALL_TO_ALL, *SHARED_EXPERTS, OVERLAPPED, *PARTS_AGAIN, *EXPERT_PARTS, *FOUR),
        3 * 2 * 2 * 5,
    ),
    "distributed optimizer, experts": (
        "v-half",
        (*MOE, *DISTRIBUTED, *EXPERT_PARTS, *FOUR, "--bf16"),
        [3 * 2 * (5 + 5)] * 2 + [3 * 2 * (3 + 5)] * 2,
    ),
    "random numbers": ("v-half", (*MOE, *RANDOM, *EXPERT_PARTS, *FOUR), [3 * 4 * (5 + 5), 3 * 4 * (3 + 5)]),
    "further tokens after experts": (
        "v-half",
        (*MULTI_TOKEN, *EXPERTS, *AUX_LOSS, *EXPERT_PARTS, *FOUR),
        [3 * 4 * (5 + 4 + 4 + 1), 3 * 4 * (5 + 5)],
    ),
    "further tokens": ("v-half", (*MULTI_TOKEN, *GROWING_SCALE, *FOUR), 3 * 2 * 3 * 4),
}


def further_losses(run) -> list[tuple[str, int, float]]:
    """The logged losses of multi-token prediction."""
    return [row for row in run.scalars if row[0].startswith("mtp_")]


INSTEAD = nightly("the cases above, and tests/mcore/test_pass_graphs.py")


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=INSTEAD) for name in FURTHER)])
def test_trains_as_without_graphs(train_small, name):
    schedule, flags, replays = (CASES | FURTHER)[name]
    ranks = 4 if OVERLAP[0] in flags else None
    plain, run = (train_small(schedule, *flags, *more, report=None, ranks=ranks) for more in ((), GRAPHS))
    assert (run.weights, run.validation) == (plain.weights, plain.validation)
    assert run.replays == replays if isinstance(replays, list) else {*run.replays} == {replays}
    assert further_losses(run) == further_losses(plain)
    assert len(run.validation) >= 2 or "evaluation" not in name


def test_steps_that_change_their_microbatches_and_loss_scale_train_as_without_graphs(train_small):
    plain, run = (train_small("v-half", *LOSS_SCALE, *more, report=None) for more in ((), GRAPHS))
    assert run.weights == plain.weights
    scales = [value for name, _, value in run.scalars if name == "loss-scale"]
    assert scales == sorted(scales, reverse=True) and scales[0] > scales[-2] == scales[-1], "some steps were skipped"
    assert run.replays == [(2 * 2 + 3 * 4) * 2 * 3] * 2


@INSTEAD
def test_a_run_in_graphs_goes_on_from_a_checkpoint_of_one(train_small, tmp_path):
    steps = (UNTIED, "--bf16", *RESUMED)
    place = ("--save", str(tmp_path), "--save-interval", "2")
    train_small("v-half", *steps, *GRAPHS, *place, report=None)
    load = ("--load", str(tmp_path), "--ckpt-step", "2")
    run = train_small("v-half", *steps, *GRAPHS, *load, report=None, initialise=False)
    assert run.weights == train_small("v-half", *steps, report=None).weights
    assert run.replays == [2 * 3 * 4] * 2
