"""Weigh layers of a model against each other, by Megatron's configuration or a training script's flags.

The weight of a layer is what its forward and backward compute for one token, in sixths of a FLOP: a matrix counts its
elements, attention its scores and values over the whole sequence, a Mamba layer its scan (``planner.counts``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_pipemem.config.model import Block, Execution, Model
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.planner.counts import SCAN, layer_flops

Sizes = Callable[[str], float]
"""The value of an attribute of Megatron's configuration; 0 or ``None`` where it has none."""

# Attributes whose flags are called otherwise, and what Megatron takes where there is no flag.
_RENAMED = {"gated_linear_unit": "swiglu", "num_moe_experts": "num-experts"}
_DEFAULTS = {
    **{"moe_router_topk": 2, "mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8},
    **{"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
_DELTA_NET, _SPARSE = "G", "D"  # symbols of layers that the planner does not know


def layer_weight(symbol: str, of: Sizes, sequence: int) -> float:
    """Return the weight of one block; 0 where its sizes are such that Megatron refuses them.

    Args:
        symbol: of the block, as in a hybrid model's pattern.
        of: the model's sizes.
        sequence: tokens per sequence.
    """
    if symbol == _DELTA_NET:
        return _delta_net(of)
    # Sparse attention computes its scores for a part of the sequence only, and an index of the whole.
    symbol = Block.LATENT_ATTENTION if symbol == _SPARSE else symbol
    try:
        model = _model(symbol, of, sequence)
    except ConfigError:
        return 0.0
    return layer_flops(model, Execution(), symbol).total / (6 * model.sequence)


def head_weight(of: Sizes, vocabulary: int) -> float:
    """Return the weight of the output layer.

    Args:
        of: the model's sizes.
        vocabulary: its rows.
    """
    return of("hidden_size") * vocabulary


def sizes_of(flags: Mapping[str, object]) -> Sizes:
    """Return the sizes that a training script's flags (without dashes in front) say, Megatron's defaults included."""

    def of(attribute: str) -> float:
        given = flags.get(_RENAMED.get(attribute, attribute.replace("_", "-")))
        try:
            return (
                _DEFAULTS.get(attribute, 0) if given in (None, False) else float(str(given)) if given is not True else 1
            )
        except ValueError:  # Megatron will refuse it
            return 0

    return of


def _model(symbol: str, of: Sizes, sequence: int) -> Model:
    """Return a model of one layer of a kind.

    Raises:
        ConfigError: there is none of these sizes.
    """

    def size(attribute: str) -> int | None:
        return int(of(attribute)) or None

    hidden, heads, gated = size("hidden_size") or 0, size("num_attention_heads") or 1, bool(of("gated_linear_unit"))
    ffn = size("ffn_hidden_size") or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    latent = symbol == Block.LATENT_ATTENTION
    return Model(
        layers=1,
        pattern=symbol,
        hidden=hidden,
        heads=heads,
        vocabulary=1,
        sequence=max(1, sequence),
        kv_heads=size("num_query_groups"),
        head_channels=size("kv_channels") or max(1, hidden // heads),
        ffn=ffn,
        activation="swiglu" if gated else "gelu",
        experts=size("num_moe_experts") or 0,
        experts_per_token=size("moe_router_topk") or 1,
        expert_ffn=size("moe_ffn_hidden_size") or ffn,
        shared_expert_ffn=size("moe_shared_expert_intermediate_size") or 0,
        kv_lora_rank=size("kv_lora_rank") if latent else None,
        q_lora_rank=size("q_lora_rank") if latent else None,
        qk_head_dim=size("qk_head_dim") or 1,
        qk_pos_emb_head_dim=size("qk_pos_emb_head_dim") or 1,
        v_head_dim=size("v_head_dim") or 1,
        mamba_state=size("mamba_state_dim") or 1,
        mamba_heads=size("mamba_num_heads"),
        mamba_head_dim=size("mamba_head_dim") or 1,
        mamba_groups=size("mamba_num_groups") or 1,
    )


def _delta_net(of: Sizes) -> float:
    keys = of("linear_num_key_heads") * of("linear_key_head_dim")
    values = of("linear_num_value_heads") * of("linear_value_head_dim")
    projections = of("hidden_size") * (2 * keys + 3 * values + 2 * of("linear_num_value_heads"))
    return projections + 3 * SCAN / 6 * values * of("linear_key_head_dim")  # forward, and twice that backward
