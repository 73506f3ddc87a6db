"""Read the shape of a model off Megatron's configuration."""

from __future__ import annotations

from megatron_pipemem.config.model import Model


def model_of(config, sequence: int) -> Model:
    """Return the layers of a configuration, as FLOPs are counted of them. Its vocabulary is not known there, and is 1.

    Args:
        config: Megatron's configuration of a model whose layers it describes; a hybrid model's does not.
        sequence: tokens of a sequence.
    """
    latent = getattr(config, "multi_latent_attention", False)
    names = ("q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim") if latent else ()
    frequency = config.moe_layer_freq
    experts = config.num_moe_experts or 0
    return Model(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        vocabulary=1,
        sequence=sequence,
        kv_heads=config.num_query_groups,
        head_channels=config.kv_channels,
        ffn=config.ffn_hidden_size,
        activation="swiglu" if config.gated_linear_unit else "gelu",
        experts=experts,
        experts_per_token=config.moe_router_topk if experts else 1,
        expert_ffn=config.moe_ffn_hidden_size,
        shared_expert_ffn=config.moe_shared_expert_intermediate_size or 0,
        moe_every=frequency if isinstance(frequency, int) else 1,
        dense_layers=frequency.index(1) if isinstance(frequency, list) and 1 in frequency else 0,
        kv_lora_rank=config.kv_lora_rank if latent else None,
        **{name: getattr(config, name) for name in names},
    )
