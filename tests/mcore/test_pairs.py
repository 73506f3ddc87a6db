"""What turns pairs on, and models and programs that cannot run in pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from refusals import refused

from megatron_pipemem.features.pairs.megatron import check_model
from megatron_pipemem.mcore import refusals
from megatron_pipemem.mcore.launch import take_flags
from megatron_pipemem.request import Request

OVERLAP, SIZES = "--overlap-moe-expert-parallel-comm", ("--pipeline-model-parallel-size", "2", "--num-layers", "8")
MODEL = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "bf16": True, "fp16": False}


def test_megatrons_flag_asks_for_pairs_and_goes_no_further():
    request, others = take_flags(["--pipemem-schedule", "zb-h1", OVERLAP, "--delay-wgrad-compute", *SIZES])
    assert request.pairs and others == [*SIZES]
    request, others = take_flags(["--pipemem-schedule", "stock", OVERLAP, *SIZES])
    assert not request.pairs and OVERLAP in others


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_model_parallel_size", 1),
        ("moe_token_dispatcher_type", "allgather"),
        ("bf16", False),
        ("recompute_granularity", "full"),
    ],
)
def test_models_that_cannot_run_in_pieces_are_refused_before_they_are_built(name, value):
    def check(**settings):
        config = SimpleNamespace(**{**MODEL, **settings})
        refusals.check_model(config, Request("1f1b", pairs=True))
        check_model(config)

    check(recompute_granularity="selective", recompute_modules=["core_attn"])
    with refused("unsupported-setting", OVERLAP):
        check(**{name: value})
