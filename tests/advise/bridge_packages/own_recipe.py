"""Recipes of a user: a model in a folder of Hugging Face, whose sizes Megatron-Bridge reads itself, and a hybrid model."""

from __future__ import annotations

import os

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.recipes.common import _pretrain_common


def small_llama():
    config = _pretrain_common()
    config.model = AutoBridge.from_hf_pretrained(os.environ["MODEL_FOLDER"]).to_megatron_provider(load_weights=False)
    config.model.pipeline_model_parallel_size = 2
    config.model.seq_length = 32
    config.train.global_batch_size = 8
    config.train.micro_batch_size = 1
    return config


def small_hybrid():
    """A model with Mamba layers and gated delta nets, from random values."""
    config = _pretrain_common()
    config.model = HybridModelProvider(
        hybrid_layer_pattern="M*-GM-G*",
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        activation_func=torch.nn.functional.silu,
        **dict(mamba_num_heads=4, mamba_head_dim=16, mamba_num_groups=2, mamba_state_dim=8),
        **dict(linear_num_key_heads=2, linear_key_head_dim=8, linear_num_value_heads=4, linear_value_head_dim=16),
    )
    return config
