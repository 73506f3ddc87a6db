"""Context parallelism beside the pipeline: two ranks share every sequence, and train as stock's do."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from test_experts import ALL_TO_ALL
from test_unequal import BY_CONTENT
from test_variants import EVALUATION, RECOMPUTE, UNTIED
from test_vocabulary import LATER

# Four microbatches fill a pipeline of two twice.
PP2 = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "4")
CP2 = (*PP2, "--context-parallel-size", "2")
ROTARY = ("--position-embedding-type", "rope", UNTIED)
GROUPED = (*ROTARY, "--group-query-attention", "--num-query-groups", "2")
LATENT = (
    *("--multi-latent-attention", "--rope-type", "rope", "--kv-lora-rank", "16", "--q-lora-rank", "16"),
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", *ROTARY),
)
MULTI_TOKEN = (*ROTARY, "--mtp-num-layers", "2", "--global-batch-size", "4")
DROPOUT = ("--pipemem-random", "layerwise", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
DISTRIBUTED = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ddp-bucket-size",
    "20000",
)
NO_BARRIER = ("--rerun-mode", "disabled", "--clip-grad", "0", UNTIED)

# name -> schedule, flags of stock too, flags of ours
CASES = {
    "zb-h1": ("zb-h1", (), ()),
    "v-half": ("v-half", (*GROUPED, *EVALUATION), ()),
    "interleaved": ("interleaved", GROUPED, ()),
    "auto": ("auto", GROUPED, ()),
    "latent": ("zb-h1", LATENT, ()),
    "multi-token": ("v-half", MULTI_TOKEN, ()),
    "distributed-optimizer": ("zb-h1", DISTRIBUTED, ()),
    "bf16": ("v-half", ("--bf16",), ()),
    "per-token-loss": ("zb-h1", ("--calculate-per-token-loss",), ()),
    "experts": ("v-half", ALL_TO_ALL, ()),
    "recompute-in-schedule": ("v-half", GROUPED, ("--pipemem-recompute", "full")),
    "recompute-in-model": ("zb-h1", (*GROUPED, *RECOMPUTE), ()),
    "offload": ("v-half", GROUPED, ("--pipemem-offload", "full", "--pipemem-offload-option", "min_bytes=1KiB")),
    "no-barrier": ("zb-h1", NO_BARRIER, ("--pipemem-overlap-steps",)),
}
FULL_LANE = {"v-half", "multi-token", "experts"}


@pytest.mark.parametrize("name", rest_nightly(CASES, FULL_LANE, "the same attention with another feature"))
def test_trains_as_stock(train_small, assert_same_training, name):
    schedule, flags, ours = CASES[name]
    run = train_small(schedule, *CP2, *flags, *ours)
    assert_same_training(run, train_small("stock", *CP2, *flags))
    if name not in ("experts", "recompute-in-model"):  # predicted as an upper bound
        assert run.predicted_peaks == run.counted_peaks
    assert all(counted <= bound for counted, bound in zip(run.counted_peaks, run.predicted_peaks, strict=True))


@pytest.mark.parametrize("flags", [(*GROUPED, *EVALUATION), pytest.param(LATENT, marks=nightly("the same gather"))])
def test_half_of_every_sequence_trains_as_whole_ones(train_small, flags):
    """Of multi-token prediction this does not hold: Megatron averages its loss over the tokens of each rank alone."""
    run, whole = train_small("stock", *CP2, *flags), train_small("stock", *PP2, *flags)
    assert run.losses == pytest.approx(whole.losses, rel=1e-6)
    for found, expected in zip(run.validation, whole.validation, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_dropout_draws_as_stock(train_small, assert_same_training):
    run, stock = (train_small(name, *CP2, *DROPOUT, initialise=False) for name in ("v-half", "stock"))
    assert_same_training(run, stock)


@pytest.mark.parametrize("algorithm", ["1", pytest.param("2", marks=nightly("the same shards"))])
def test_cut_vocabulary(train_small, algorithm):
    stock = train_small("stock", *CP2, *GROUPED, *EVALUATION)
    run = train_small("v-half", *CP2, *GROUPED, *EVALUATION, "--pipemem-vocab-parallel", algorithm)
    assert run.losses == pytest.approx(stock.losses, rel=LATER)
    assert run.predicted_peaks == run.counted_peaks


def test_unequal_microbatches(train_small, assert_close_training):
    run, stock = train_small("v-half", *CP2, *BY_CONTENT), train_small("stock", *CP2)
    assert_close_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks


@nightly("test_checkpoints.py, where data-parallel ranks share what these share")
def test_checkpoints_do_not_know_the_placement(train_small, assert_same_training, tmp_path):
    save = ("--save", str(tmp_path), "--save-interval", "2")
    train_small("v-half", *CP2, *GROUPED, *save)
    more = ("--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler")
    run = train_small("zb-h1", *CP2, *GROUPED, *more, initialise=False)
    assert_same_training(run, train_small("stock", *CP2, *GROUPED, *more, initialise=False))
