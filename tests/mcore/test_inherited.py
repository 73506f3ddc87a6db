"""Megatron's own faults are told where a run has them, and nowhere else."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from megatron_pipemem.mcore import refusals
from megatron_pipemem.mcore.compat import counts_all_experts

TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({}, 0),
        (SP, 0),
        ({"softmax_type": "learnable"}, 0),
        ({"softmax_type": "learnable", **SP}, 1),
        ({"mtp_num_layers": 1}, 0),
        ({"mtp_num_layers": 1, "calculate_per_token_loss": True}, 1),
        ({"experimental_attention_variant": "gated_delta_net", **TP}, 1),
        ({"moe_grouped_gemm": True, "expert_model_parallel_size": 2, **SP}, int(not counts_all_experts())),
        ({"multi_latent_attention": True, **TP}, 1),
        ({"multi_latent_attention": True, **SP}, 0),
        ({"multi_latent_attention": True, "transformer_impl": "local", **SP}, 1),
    ],
)
def test_a_fault_is_told_where_it_is(settings, number):
    assert len(refusals.inherited_faults(settings.get)) == number


@pytest.mark.parametrize(
    ("module", "mended"),
    [
        ("transformer.dot_product_attention", "set_tensor_model_parallel_attributes"),  # pull request 7530
        ("ssm.gated_delta_net.common", "average_gradients_across_tp_domain"),
        ("transformer.multi_latent_attention", "copy_to_tensor_model_parallel_region"),  # pull request 6839
    ],
)
def test_megatron_still_has_the_fault(module, mended):
    spec = importlib.util.find_spec(f"megatron.core.{module}")
    assert spec is None or mended not in Path(spec.origin).read_text()


def test_once(caplog):
    refusals.warn_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        refusals.warn_of("some fault")
        refusals.warn_of("some fault")
    assert [record.message.endswith("some fault") for record in caplog.records] == [True]
