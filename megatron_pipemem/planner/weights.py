"""Weigh layers of a model against each other, by Megatron's configuration or a training script's flags.

The weight of a layer is what its forward and backward compute for one token, in sixths of a FLOP: a matrix counts its
elements, attention its scores and values over the whole sequence, a Mamba layer its scan (``planner.counts``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_pipemem.config.model import LATENT, Execution, Model, Sublayer
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.planner.counts import SCAN, layer_flops

Sizes = Callable[[str], float]
"""The value of an attribute of Megatron's configuration; 0 or ``None`` where it has none."""

# Attributes of Megatron's configuration that a model's fields of other names stand for.
_ATTRIBUTES = {
    **{"hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_query_groups"},
    **{"head_channels": "kv_channels", "ffn": "ffn_hidden_size"},
    **{"experts": "num_moe_experts", "experts_per_token": "moe_router_topk"},
    **{"expert_ffn": "moe_ffn_hidden_size", "shared_expert_ffn": "moe_shared_expert_intermediate_size"},
    **{"mamba_state": "mamba_state_dim", "mamba_heads": "mamba_num_heads", "mamba_groups": "mamba_num_groups"},
}
# Attributes whose flags are called otherwise, and what Megatron takes where there is no flag and a model has no default.
_RENAMED = {"gated_linear_unit": "swiglu", "num_moe_experts": "num-experts"}
_DEFAULTS = {
    **{"moe_router_topk": 2, "kv_lora_rank": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
_DELTA_NET, _SPARSE = "G", "D"  # symbols of layers that the planner does not know


def layer_weight(symbol: str, of: Sizes, sequence: int) -> float:
    """Return the weight of one block; 0 where its sizes are such that Megatron refuses them. ``symbol``: of the block, as
    in a hybrid model's pattern.
    """
    if symbol == _DELTA_NET:
        return _delta_net(of)
    # Sparse attention computes its scores for a part of the sequence only, and an index of the whole.
    symbol = Sublayer.LATENT_ATTENTION if symbol == _SPARSE else symbol
    try:
        model = _model(symbol, of, sequence)
    except ConfigError:
        return 0.0
    return layer_flops(model, Execution(), symbol).total / (6 * model.sequence)


def head_weight(of: Sizes, vocabulary: int) -> float:
    """Return the weight of the output layer."""
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
    """Return a model of one layer of a kind."""

    names = {**_ATTRIBUTES, "mamba_head_dim": "mamba_head_dim"}
    if symbol == Sublayer.LATENT_ATTENTION:
        names |= {name: name for name in LATENT}
    sizes: dict[str, Any] = {field: int(size) for field, attribute in names.items() if (size := of(attribute))}
    hidden, heads, gated = sizes.get("hidden", 0), sizes.get("heads", 1), bool(of("gated_linear_unit"))
    usual = {"hidden": hidden, "heads": heads, "head_channels": max(1, hidden // heads)}
    if gated:
        usual["ffn"] = hidden * 8 // 3 // 64 * 64
    return Model(
        layers=1,
        pattern=symbol,
        vocabulary=1,
        sequence=max(1, sequence),
        activation="swiglu" if gated else "gelu",
        **{**usual, **sizes},
    )


def _delta_net(of: Sizes) -> float:
    keys = of("linear_num_key_heads") * of("linear_key_head_dim")
    values = of("linear_num_value_heads") * of("linear_value_head_dim")
    projections = of("hidden_size") * (2 * keys + 3 * values + 2 * of("linear_num_value_heads"))
    return projections + 3 * SCAN / 6 * values * of("linear_key_head_dim")  # forward, and twice that backward
