"""A GPT of Transformer Engine's own layers, with every weight gradient delayed, trains as on stock's schedule."""

from __future__ import annotations

import pytest

FUSION = ("+--no-gradient-accumulation-fusion",)
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
DEFAULTS = (*FUSION, *OVERLAP)  # what users start with, beside bias
NO_BIAS = "--disable-bias-linear"
PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = (*PP2, "--tensor-model-parallel-size", "2")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", NO_BIAS, "--no-bias-swiglu-fusion"),
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2"),
)
GROUPED_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "[1,0,1,0,0,1,1,1]", "--moe-grouped-gemm"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss"),
)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")

SPLIT = ("zb-h1", "v-half")
FAMILIES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "dualpipe-v", "po-f")
# name -> flags, schedules
VARIANTS = {
    "defaults": (DEFAULTS, FAMILIES),
    "tp2-sequence-parallel": ((*TP2, "--sequence-parallel", *DEFAULTS, "--bf16"), FAMILIES),
    "dp2-distributed-optimizer": (
        (*PP2, "--use-distributed-optimizer", "--overlap-param-gather", *DEFAULTS, "--bf16", NO_BIAS),
        FAMILIES,
    ),
    "bf16": ((*DEFAULTS, "--bf16"), SPLIT),
    "no-bias": ((*DEFAULTS, NO_BIAS), SPLIT),
    "neither-fusion-nor-overlap": ((), SPLIT),
    "fusion": (FUSION, SPLIT),
    "overlap": (OVERLAP, SPLIT),
    "bf16-overlap-no-bias": ((*OVERLAP, "--bf16", NO_BIAS), SPLIT),
    "tp2": (TP2, SPLIT),
    "recompute-full": ((*DEFAULTS, *RECOMPUTE), SPLIT),
    "llama": ((*DEFAULTS, *LLAMA), SPLIT),
    "grouped-experts": ((*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS), SPLIT),
    "grouped-experts-bias": ((*DEFAULTS, *GROUPED_EXPERTS), SPLIT),
}


@pytest.mark.parametrize(
    ("variant", "schedule"), [(variant, name) for variant, (_, names) in VARIANTS.items() for name in names]
)
def test_trains_as_stock(train_with_transformer_engine, assert_same_training, variant, schedule):
    train = train_with_transformer_engine
    flags, _ = VARIANTS[variant]
    run = train(schedule, *flags)
    assert_same_training(run, train("stock", *flags))
    for layers in run.layers:
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= set(layers)
    if "experts" in variant:  # routing differs between microbatches
        assert any("TERowParallelGroupedLinear" in layers for layers in run.layers)
    else:
        assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize(
    "flags",
    [
        ("--pipemem-recompute", "full"),
        ("--pipemem-recompute", "selective"),
        ("--pipemem-offload", "full", "--pipemem-host-memory", "1GiB"),
    ],
    ids=lambda flags: "-".join(flags[:2]).removeprefix("--pipemem-"),
)
@pytest.mark.parametrize("schedule", SPLIT)
def test_recomputes_and_offloads_as_stock(train_with_transformer_engine, assert_same_training, schedule, flags):
    train = train_with_transformer_engine
    run = train(schedule, *DEFAULTS, *flags)
    assert_same_training(run, train("stock", *DEFAULTS))
    assert run.predicted_peaks == run.counted_peaks


def test_two_copies_train_as_stock_but_for_the_order_of_a_sum(train_with_transformer_engine):
    train = train_with_transformer_engine
    flags = (*DEFAULTS, "--global-batch-size", "8")
    run, stock = train("dualpipe", *flags), train("stock", *flags)
    assert run.losses == pytest.approx(stock.losses, rel=1e-6)
