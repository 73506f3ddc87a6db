"""What is tested of a GPT holds for the HybridModel with the same layers: it trains as on stock's schedules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import test_asynchronous
import test_context_parallel
import test_experts
import test_families
import test_multi_token
import test_packed
import test_pairs
import test_slices
import test_transformer_engine
import test_unequal
import test_variants
import yaml
from comparing import assert_predicted_bytes, bits
from lanes import nightly, rest_nightly
from model_flags import (
    CP2,
    DISTRIBUTED,
    EVALUATION,
    GROUPED,
    LATENT_QUERIES,
    LAYOUT,
    OFFLOADED,
    QUICK,
    SELECTIVE,
    SIX,
    SMALL_TENSORS,
    UNTIED,
    hybrid,
)
from ranks import CaseFailed

from megatron_pipemem.errors import CODES
from megatron_pipemem.schedule.registry import families

OVERLAPPED = ("--train-iters", "4", "--log-interval", "10", "--rerun-mode", "disabled")
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
    "packed": test_packed.CASES | {"weighed by FLOPs": ("chimera", GROUPED, ("--pipemem-microbatch-costs", "FLOPs"))},
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
        "overlapped steps": ("zbv", OVERLAPPED, ("--pipemem-overlap-steps",)),
        "single queue": ("v-half", (), ("--pipemem-single-queue",)),
        "early weights": ("zb-h1", (UNTIED,), ("--pipemem-early-wgrad", "head")),
    },
    "replicas": {"gems": ("gems", EVALUATION, ()), "dualpipe": ("dualpipe", EVALUATION, ())},
    "pairs": {"shared experts": ("v-half", test_pairs.FLAGS, test_pairs.OVERLAP)},
    "slices": {name: (schedule, flags, ours) for name, (schedule, ours, flags) in test_slices.CASES.items()},
    "packed slices": {name: (schedule, flags, ours) for name, (schedule, ours, flags) in test_slices.PACKED.items()},
    "latent": {"kept": ("v-half", LATENT_QUERIES, ()), "offloaded": ("v-half", LATENT_QUERIES, OFFLOADED)},
}
CASES = {f"{feature}: {name}": case for feature, table in TABLES.items() for name, case in table.items()}
# The others would show what test_hybrid.py shows of this class, or what does not depend on the class of a model.
FULL_LANE = {
    "variants: llama, loss per token, another number of microbatches",
    "variants: empty stages, interleaved",
    "variants: sequence parallel, fusion",
    "families: hanayo",
    "further tokens: evaluation",
    "context parallel: recomputed",
    "packed: recomputed, evaluation",
    "packed: weighed by FLOPs",
    "offload: selective",
    "costs: profiled",
    "costs: layout",
    "pairs: shared experts",
    "latent: kept",
    "slices: recomputed",
}
RESUMMED = {"--pipemem-microbatch-costs", *(family.name for family in families() if family.replicas > 1)}
"""Flags and schedules that add gradients in another order than stock."""
UNPREDICTED = {f"variants: {name}" for name in test_variants.UNPREDICTED}


@pytest.mark.parametrize(
    "name",
    rest_nightly(CASES, FULL_LANE, "test_hybrid.py; the same layers in a GPT, and other features in a HybridModel"),
)
def test_a_hybrid_model_trains_as_stock(equals_stock, request, name):
    schedule, flags, ours = CASES[name]
    feature = name.partition(":")[0]
    if "packed" in feature:
        flags = (*request.getfixturevalue("packed"), *flags)
    is_close = "slices" in feature or not RESUMMED.isdisjoint((schedule, *ours))
    nbytes = None if name in UNPREDICTED else "bounded" if "expert" in name else "exact"
    within = 1e-6 if "slices" in feature else None
    run, _ = equals_stock(schedule, *flags, ours=ours, model="hybrid", close=is_close, nbytes=nbytes, within=within)
    assert len(run.validation) >= 2 or "evaluation" not in name


@pytest.mark.parametrize(
    "name",
    rest_nightly(["pipedream-2bw", "pipedream"], ["pipedream"], "its weights' versions, in test_asynchronous.py"),
)
def test_a_hybrid_model_trains_late_as_the_formula_says(train_small, emulate, name):
    flags = test_asynchronous.FLAGS[name]
    # The emulator's stages have equally many layers.
    run = train_small(name, *flags, LAYOUT, "Ett|ttL", model="hybrid")
    emulated = emulate(name, *flags, model="hybrid", stages=2)
    assert bits(run.losses) == bits(emulated.losses) and len(set(run.losses)) == 3
    assert_predicted_bytes(run)


@nightly("Megatron's own check")
def test_megatron_refuses_a_stage_for_multi_token_prediction(train_small):
    with pytest.raises(CaseFailed) as failed:
        train_small("stock", *hybrid("*-*-*-*-/*-"), LAYOUT, "Ett|tt|m|L")
    assert f"{LAYOUT} should not be used with --hybrid-layer-pattern" in str(failed.value)


FOLDER = Path(__file__).parent
CLASSES = yaml.safe_load((FOLDER / "classes_of_models.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("feature", CLASSES)
def test_every_cell_of_the_documented_table_has_a_test(feature):
    assert [*CLASSES[feature]] == ["GPTModel", "HybridModel", "with states"]
    for model, (verdict, test) in CLASSES[feature].items():
        if model == "with states" and test.startswith("states: "):
            name = test.removeprefix("states: ")
            is_close = name in test_transformer_engine.RESUMMED
            assert name in test_transformer_engine.STATES and verdict == ("close" if is_close else "bits"), test
            continue
        code = verdict.removeprefix("refused: ")
        assert verdict in ("bits", "close", "Megatron refuses") or (code != verdict and code in CODES)
        file, _, function = test.partition("::")
        if not function:
            schedule, _, ours = CASES[test]
            is_close = test.startswith("slices") or not RESUMMED.isdisjoint((schedule, *ours))
            assert model == "HybridModel" and (verdict == "close") == is_close, test
            continue
        functions = ast.walk(ast.parse((FOLDER / file).read_text(encoding="utf-8")))
        assert function in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, test
