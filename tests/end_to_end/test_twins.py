"""What is tested of a GPT holds for the HybridModel with the same layers: it trains as on stock's schedules."""

from __future__ import annotations

import pytest
import test_context_parallel
import test_experts
import test_families
import test_multi_token
import test_packed
import test_unequal
import test_variants
from lanes import rest_nightly
from model_flags import (
    CP2,
    DISTRIBUTED,
    EVALUATION,
    LATENT_QUERIES,
    OFFLOADED,
    QUICK,
    SELECTIVE,
    SIX,
    SMALL_TENSORS,
    UNTIED,
)

SELECTIVELY = ("--pipemem-recompute", "selective")
# By feature and case: schedule, flags of stock too, flags of ours
TABLES = {
    "variants": test_variants.CASES,
    "families": {name: (name, (), ()) for name in test_families.NAMES},
    "experts": {name: (case[0], (*case[1], *SIX), case[2]) for name, case in test_experts.VARIANTS.items()},
    # A HybridModel has no stage for multi-token prediction alone.
    "further tokens": {name: case for name, case in test_multi_token.EXACT.items() if name != "standalone"},
    "context parallel": {
        name: (case[0], (*CP2, *case[1]), case[2]) for name, case in test_context_parallel.CASES.items()
    },
    "packed": test_packed.CASES,
    "unequal": {
        name: (case[0], case[1], (*test_unequal.BY_CONTENT, *case[2])) for name, case in test_unequal.CASES.items()
    },
    "offload": {
        "full": ("zbv", (), OFFLOADED),
        "paper": ("po-f", (), SMALL_TENSORS),
        "selective": ("zbv", ("--bf16", *SELECTIVE, *EVALUATION), (*OFFLOADED, *SELECTIVELY)),
        "data parallel": ("interleaved", (*DISTRIBUTED, *SIX), ("--pipemem-offload", "half", *SMALL_TENSORS)),
    },
    "costs": {
        "searched": ("auto", (), QUICK),
        "profiled": ("auto", ("--train-iters", "6"), ("--pipemem-costs", "profile", *QUICK)),
        "layout": ("v-half", (), ("--pipemem-layout", "auto")),
        "single queue": ("v-half", (), ("--pipemem-single-queue",)),
        "early weights": ("zb-h1", (UNTIED,), ("--pipemem-early-weights", "head")),
    },
    "replicas": {"gems": ("gems", EVALUATION, ()), "dualpipe": ("dualpipe", EVALUATION, ())},
    "latent": {"kept": ("v-half", LATENT_QUERIES, ()), "offloaded": ("v-half", LATENT_QUERIES, OFFLOADED)},
}
CASES = {f"{feature}: {name}": case for feature, table in TABLES.items() for name, case in table.items()}
FULL_LANE = {
    "variants: llama, loss per token",
    "variants: experts, uneven layout",
    "variants: another number of microbatches",
    "variants: empty stages, interleaved",
    "variants: sequence parallel, fusion",
    "variants: distributed optimizer, fusion",
    "families: gpipe",
    "families: hanayo",
    "families: 1f1b-v",
    "experts: padded",
    "further tokens: evaluation",
    "context parallel: recomputed",
    "packed: recomputed, evaluation",
    "unequal: cut vocabulary",
    "offload: paper",
    "offload: selective",
    "costs: profiled",
    "costs: layout",
    "replicas: dualpipe",
    "latent: kept",
}
RESUMMED = ("unequal", "replicas")
UNPREDICTED = {f"variants: {name}" for name in test_variants.UNPREDICTED}


@pytest.mark.parametrize(
    "name", rest_nightly(CASES, FULL_LANE, "the same layers in a GPT, and other features in a HybridModel")
)
def test_a_hybrid_model_trains_as_stock(equals_stock, request, name):
    schedule, flags, ours = CASES[name]
    feature = name.partition(":")[0]
    if feature == "packed":
        flags = (*request.getfixturevalue("packed"), *flags)
    nbytes = None if name in UNPREDICTED else "bounded" if "expert" in name else "exact"
    run, _ = equals_stock(schedule, *flags, ours=ours, model="hybrid", close=feature in RESUMMED, nbytes=nbytes)
    assert len(run.validation) >= 2 or "evaluation" not in name
