"""Mixtures of experts, spread over ranks beside the pipeline's, and latent attention train as on stock's schedule."""

from __future__ import annotations

import pytest
from lanes import rest_nightly
from model_flags import (
    ALL_TO_ALL,
    AUX_LOSS,
    CAPACITY,
    DISTRIBUTED,
    EP2,
    EXPERTS,
    LATENT_QUERIES,
    OFFLOADED,
    PADDED,
    RECOMPUTED,
    SHARED_EXPERTS,
    SIX,
    UNTIED,
)

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
OVERLAP = (*SHARED_EXPERTS, "--moe-shared-expert-overlap")
MOVED = (*OFFLOADED, "--pipemem-offload-option", "ratio=0.8")

# name -> schedule, flags of stock's run too, the plugin's
VARIANTS = {
    "losses": ("zb-h1", (*ALL_TO_ALL, *LOSSES, *CAPACITY, *DISTRIBUTED), RECOMPUTED),
    "bias": ("gis", (*ALL_TO_ALL, *BIAS, *Z_LOSS, *OVERLAP), ()),
    "quantiles": ("looped-bfs", (*ALL_TO_ALL, *QUANTILES), ("--pipemem-recompute", "selective")),
    "padded": ("v-half", (*ALL_TO_ALL, *PADDED, *LOSSES), MOVED),
    "allgather": ("v-half", (*EP2, *LOSSES, *DISTRIBUTED), ()),
}


@pytest.mark.parametrize(
    "variant", rest_nightly(VARIANTS, VARIANTS.keys() - {"allgather"}, "on one rank in test_variants.py")
)
def test_experts_train_as_stock(equals_stock, tmp_path_factory, variant):
    """The routers' own losses too, step by step. Bytes are within their prediction, and as predicted where all experts get
    as many tokens.
    """
    schedule, flags, own = VARIANTS[variant]
    logged = ("--tensorboard-dir", str(tmp_path_factory.getbasetemp()), "--tensorboard-log-interval", "1")
    run, stock = equals_stock(schedule, *flags, *SIX, *logged, ours=own, nbytes="bounded")

    def of_routers(scalars: list) -> list:
        return [scalar for scalar in scalars if scalar[0].endswith(("balancing_loss", "z_loss"))]

    assert of_routers(run.scalars) == of_routers(stock.scalars)
    assert bool(of_routers(stock.scalars)) is ("--moe-z-loss-coeff" in flags)
    for rank in run.ranks:
        is_exact = rank["predicted_least_peak_bytes"] == rank["predicted_peak_bytes"]
        assert is_exact is ("--moe-pad-expert-input-to-capacity" in flags)


def test_evaluation_leaves_the_routers_losses_of_a_pipeline_that_is_not_flushed(train_small):
    """It divides them by another number of microbatches, and a backward of an earlier forward runs right after it.

    Only where a step has fewer microbatches than the pipeline has ranks: all others begin with a forward.
    """
    flags = (*EXPERTS, *AUX_LOSS, "--moe-layer-freq", "[1,0,0,1]", "--moe-aux-loss-coeff", "1.0", "--clip-grad", "0")
    flags = (*flags, UNTIED, "--global-batch-size", "1", "--train-iters", "3")
    evaluation = ("--eval-interval", "1", "--eval-iters", "1", "--eval-global-batch-size", "2")
    run, undisturbed = (train_small("pipedream", *flags, *more) for more in (evaluation, ()))
    assert len(run.validation) > 2
    assert run.losses == undisturbed.losses and run.weights == undisturbed.weights


@pytest.mark.parametrize("own", [("--pipemem-recompute", "selective"), MOVED], ids=["recomputed-in-part", "offloaded"])
def test_latent_attention_trains_as_stock(equals_stock, own):
    equals_stock("v-half", *LATENT_QUERIES, ours=own)
