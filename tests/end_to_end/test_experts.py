"""Mixtures of experts, spread over ranks beside the pipeline's, and latent attention train as on stock's schedule."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from test_variants import MOE

EXPERTS = (
    # Megatron's own local experts cannot add a bias: they modify a view in place.
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2", "--num-layers", "4"),
    *("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"),
)
THREE_EACH = ("--global-batch-size", "6")  # microbatches of two data-parallel replicas
ALL_TO_ALL = (*EXPERTS, "--moe-token-dispatcher-type", "alltoall")
Z_LOSS = ("--moe-z-loss-coeff", "0.01")
LOSSES = (
    *("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    *("--moe-aux-loss-coeff", "0.01", "0.02", "0.03", *Z_LOSS),
)
BIAS = (
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-bias-update-rate", "0.1", "--moe-router-load-balancing-type", "none"),
)
QUANTILES = ("--moe-router-load-balancing-type", "quantile_balancing")
SHARED = ("--moe-shared-expert-intermediate-size", "64")
OVERLAP = (*SHARED, "--moe-shared-expert-overlap")
DISTRIBUTED_OPTIMIZER = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"),
)
CAPACITY = ("--moe-expert-capacity-factor", "1.0")
PADDED = (*CAPACITY, "--moe-pad-expert-input-to-capacity")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SMALL = ("--pipemem-offload-option", "min_bytes=1KiB", "--pipemem-offload-option", "ratio=0.8")

# name -> schedule, flags of stock's run too, the plugin's
VARIANTS = {
    "allgather": ("v-half", (*EXPERTS, *LOSSES, *DISTRIBUTED_OPTIMIZER), ()),
    "losses": ("v-half", (*ALL_TO_ALL, *LOSSES, *DISTRIBUTED_OPTIMIZER), ()),
    "losses-recomputed": (
        "zb-h1",
        (*ALL_TO_ALL, *LOSSES, *CAPACITY, *DISTRIBUTED_OPTIMIZER),
        ("--pipemem-recompute", "full"),
    ),
    "bias": ("v-half", (*ALL_TO_ALL, *BIAS, *Z_LOSS, *OVERLAP), ()),
    "bias-in-another-order": ("gis", (*ALL_TO_ALL, *BIAS, *Z_LOSS, *OVERLAP), ()),
    "bias-megatrons-recompute": ("zb-h1", (*ALL_TO_ALL, *BIAS, *SHARED, *RECOMPUTE), ()),
    "quantiles": ("looped-bfs", (*ALL_TO_ALL, *QUANTILES), ("--pipemem-recompute", "selective")),
    "padded": ("v-half", (*ALL_TO_ALL, *PADDED, *LOSSES), ("--pipemem-offload", "full", *SMALL)),
}


@pytest.mark.parametrize(
    "variant",
    rest_nightly(
        VARIANTS,
        VARIANTS.keys() - {"allgather", "losses", "bias", "bias-megatrons-recompute"},
        "the same losses and biases with more flags",
    ),
)
def test_experts_train_as_stock(train_small, assert_same_training, tmp_path_factory, variant):
    """The routers' own losses too, step by step. What is held is within its prediction, and as predicted where all experts
    get as many tokens.
    """
    schedule, flags, own = VARIANTS[variant]
    logged = ("--tensorboard-dir", str(tmp_path_factory.getbasetemp()), "--tensorboard-log-interval", "1")
    flags = (*flags, *THREE_EACH, *logged)
    run, stock = train_small(schedule, *flags, *own), train_small("stock", *flags)
    assert_same_training(run, stock)

    def of_routers(scalars: list) -> list:
        return [each for each in scalars if each[0].endswith(("balancing_loss", "z_loss"))]

    assert of_routers(run.scalars) == of_routers(stock.scalars)
    assert bool(of_routers(stock.scalars)) is ("--moe-z-loss-coeff" in flags)
    for rank in run.ranks if "--recompute-granularity" not in flags else ():
        least, most, counted = (rank[f"{name}_peak_bytes"] for name in ("predicted_least", "predicted", "counted"))
        assert least <= counted <= most
        assert (least == most) is ("--moe-pad-expert-input-to-capacity" in flags)


def test_evaluation_leaves_the_routers_losses_of_a_pipeline_that_is_not_flushed(train_small):
    """It divides them by another number of microbatches, and backwards of forwards before it come behind it."""
    flags = (*MOE, "--moe-layer-freq", "[1,0,0,1]", "--moe-aux-loss-coeff", "1.0", "--train-iters", "3")
    evaluation = ("--eval-interval", "1", "--eval-iters", "1", "--eval-global-batch-size", "2")
    run, undisturbed = train_small("pipedream-2bw", *flags, *evaluation), train_small("pipedream-2bw", *flags)
    assert len(run.validation) > 2
    assert run.losses == undisturbed.losses


LATENT = (
    *("--multi-latent-attention", "--kv-lora-rank", "16", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8"),
    *("--v-head-dim", "12", "--position-embedding-type", "rope"),
)
LATENT_QUERIES = (*LATENT, "--q-lora-rank", "24")


@pytest.mark.parametrize(
    ("schedule", "model", "own"),
    [
        pytest.param("zb-h1", LATENT, (), marks=nightly("in slices in test_slices.py, and recomputed")),
        pytest.param("v-half", LATENT_QUERIES, (), marks=nightly("the same offloaded")),
        pytest.param("po-f", LATENT_QUERIES, SMALL[:2], marks=nightly("v-half offloaded")),
        ("v-half", LATENT_QUERIES, ("--pipemem-recompute", "selective")),
        ("v-half", LATENT_QUERIES, ("--pipemem-offload", "full", *SMALL)),
    ],
    ids=["zb-h1", "v-half", "po-f", "recompute-selective", "offload-full"],
)
def test_latent_attention_trains_as_stock(train_small, assert_same_training, schedule, model, own):
    run = train_small(schedule, *model, *own)
    assert_same_training(run, train_small("stock", *model))
    assert run.predicted_peaks == run.counted_peaks
