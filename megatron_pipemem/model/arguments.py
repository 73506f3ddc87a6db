"""Read the shape of a model from Megatron's arguments or configuration, and write it as Megatron's arguments.

The attributes of Megatron's ``Namespace`` and of its ``TransformerConfig`` have the same names, except those of
``_ALSO_CALLED``. A model file has these names too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model.layout import (
    EARLIER_PATTERN_ARGUMENT,
    FURTHER,
    PATTERN_ARGUMENT,
    pattern_layers,
    pattern_of,
    without_cuts,
)
from megatron_pipemem.model.model import (
    DELTA_ATTRIBUTES,
    EXPERT_ATTRIBUTES,
    INDEXER_ATTRIBUTES,
    LATENT_ATTRIBUTES,
    MAMBA_ATTRIBUTES,
    SIZE_ATTRIBUTES,
    Model,
    Sublayer,
)

_ALSO_CALLED = {
    "num_experts": "num_moe_experts",
    PATTERN_ARGUMENT: EARLIER_PATTERN_ARGUMENT,
    "vocab_size": "padded_vocab_size",
}
"""Names of attributes that Megatron's configuration, or an older Megatron, spells in another way."""
_NEEDED = {"layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "sequence": "seq_length"}
ATTRIBUTES = {
    **SIZE_ATTRIBUTES,
    **_NEEDED,
    "vocabulary": "vocab_size",
    "activation": "swiglu",
    "norm": "normalization",
    "position": "position_embedding_type",
    "bias": "add_bias_linear",
    "tied": "untie_embeddings_and_output_weights",
    "dropout": "hidden_dropout",
    "router_score": "moe_router_score_function",
    "router_bias": "moe_router_enable_expert_bias",
    "router_scale": "moe_router_topk_scaling_factor",
    "qk_norm": "qk_layernorm",
    "attention_gate": "attention_output_gate",
    "mtp_layers": "mtp_num_layers",
    "pattern": PATTERN_ARGUMENT,
    "mtp_pattern": PATTERN_ARGUMENT,
}
"""The attribute that decides each field of ``Model``, where the names differ."""
FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
"""Attributes with a number, or with an entry per layer."""
NAMES = (
    *dict.fromkeys((*ATTRIBUTES.values(), *FREQUENCIES)),
    *("multi_latent_attention", "experimental_attention_variant"),
    *("group_query_attention", "add_qkv_bias", "squared_relu", "gated_linear_unit", "attention_dropout"),
)
"""The names of all attributes that describe a model's shape."""
_POSITIONS = {"learned_absolute": "learned", "none": "none"}
"""Values of ``Model.position`` by Megatron's. All others are rotary."""


def model_of(args: object, **facts: Any) -> Model:
    """Return the model that Megatron's arguments or configuration describe.

    Args:
        args: an object with Megatron's attributes: the ``Namespace`` of its parser, or a ``TransformerConfig``. If an
            attribute is missing or ``None``, the model has the default of ``Model``.
        facts: attributes that ``args`` lacks, or whose values replace its own. A configuration lacks ``seq_length``, and
            without ``vocab_size`` the size of the vocabulary is 1. Fields of ``Model`` that Megatron lacks, such as
            ``tower``, are facts too.

    Raises:
        ConfigError: a size is missing (``unknown-size``) or wrong. The key is the attribute.
    """

    def of(name: str, default: Any = None) -> Any:
        value = facts[name] if name in facts else getattr(args, name, None)
        if value is None and name in _ALSO_CALLED:
            value = of(_ALSO_CALLED[name])
        return default if value is None else value

    def sizes(fields: Mapping[str, str]) -> dict[str, int]:
        return {field: int(size) for field, name in fields.items() if (size := of(name)) is not None}

    pattern, layers, ahead = of(PATTERN_ARGUMENT), of("num_layers"), of("mtp_num_layers", 0)
    shape: dict[str, Any] = {"mtp_layers": ahead}
    if pattern is not None:
        main, *further = pattern.split(FURTHER)
        layers = len(pattern_layers(main))
        ahead = {"mtp_layers": len(further), "mtp_pattern": further[0] if further else None}
        shape = {"pattern": without_cuts(main), **ahead}
    groups, is_grouped = of("num_query_groups"), of("group_query_attention", True)
    has_bias, has_qkv_bias = of("add_bias_linear", True), of("add_qkv_bias", False)
    position = of("position_embedding_type", "learned_absolute")
    shape |= {
        **{field: _needed(name, layers if field == "layers" else of(name)) for field, name in _NEEDED.items()},
        "vocabulary": of("vocab_size", 1),
        "kv_heads": groups if is_grouped else None,
        "head_channels": of("kv_channels"),
        "activation": _activation(of),
        "norm": "rmsnorm" if of("normalization") == "RMSNorm" else "layernorm",
        "position": "rope" if of("use_rotary_position_embeddings") else _POSITIONS.get(position, "rope"),
        "bias": "all" if has_bias else "qkv_only" if has_qkv_bias else "none",
        "tied": not of("untie_embeddings_and_output_weights", True),
        "dropout": max(of("attention_dropout", 0.0), of("hidden_dropout", 0.0)),
        "qk_norm": bool(of("qk_layernorm")),
        "attention_gate": bool(of("attention_output_gate")),
    }
    hidden, variant, blocks = shape["hidden"], of("experimental_attention_variant"), pattern or ""
    shape["ffn"] = of("ffn_hidden_size") or (int(4 * hidden * 2 / 3 / 64) * 64 if of("swiglu") else None)
    if of("multi_latent_attention"):
        shape |= sizes(LATENT_ATTRIBUTES)
    if variant == "dsa":
        shape |= sizes(INDEXER_ATTRIBUTES)
    if variant == "gated_delta_net":
        shape["linear_attention_freq"] = _frequency(of("linear_attention_freq", 1))
    if variant == "gated_delta_net" or Sublayer.DELTA_NET in blocks:
        shape |= sizes(DELTA_ATTRIBUTES)
    if Sublayer.MAMBA in blocks:
        shape |= sizes(MAMBA_ATTRIBUTES)
    if experts := of("num_experts"):
        shape |= {
            "experts": experts,
            **sizes(EXPERT_ATTRIBUTES),
            "router_score": of("moe_router_score_function", "softmax"),
            "router_bias": bool(of("moe_router_enable_expert_bias")),
            "router_scale": of("moe_router_topk_scaling_factor") or 1.0,
        }
        if pattern is None:
            shape["moe_layer_freq"] = _frequency(of("moe_layer_freq", 1))
    others = {name: value for name, value in facts.items() if name not in NAMES}
    try:
        return Model(**shape | others)
    except ConfigError as error:
        raise ConfigError(error.code, error.message, key=ATTRIBUTES.get(error.key or "", error.key)) from error


def _needed(name: str, value: int | None) -> int:
    if value is None:
        raise ConfigError("unknown-size", "is missing, and the model's shape follows from it; add it", key=name)
    return value


def _activation(of: Callable[[str], Any]) -> str:
    """Return the activation of FFNs. A gate without ``swiglu`` belongs to a configuration, whose default is GELU."""
    function = getattr(of("activation_func"), "__name__", "gelu")
    if of("swiglu") or (of("gated_linear_unit") and function == "silu"):
        return "swiglu"
    return "geglu" if of("gated_linear_unit") else "squared_relu" if of("squared_relu") else "gelu"


def _frequency(value: Any) -> int | tuple[int, ...]:
    return value if isinstance(value, int) else tuple(value)


def arguments_of(model: Model) -> dict[str, Any]:
    """Return Megatron's arguments for a model by attribute, from which ``model_of`` returns it. Others are ``None``.

    ``gated_linear_unit``, for geglu, is a field of Megatron's configuration and not of its arguments.
    """
    groups = model.key_heads if model.key_heads != model.heads else None
    arguments: dict[str, Any] = {
        "num_layers": model.layers if model.pattern is None else None,
        PATTERN_ARGUMENT: pattern_of(model),
        "mtp_num_layers": model.mtp_layers or None,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "group_query_attention": groups is not None,
        "num_query_groups": groups,
        "kv_channels": model.head_channels,
        "ffn_hidden_size": model.ffn_width,
        "qk_layernorm": model.qk_norm,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared_relu",
        "gated_linear_unit": True if model.activation == "geglu" else None,
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        "position_embedding_type": {"learned": "learned_absolute"}.get(model.position, model.position),
        "max_position_embeddings": model.sequence,
        "seq_length": model.sequence,
        "vocab_size": model.vocabulary,
        "untie_embeddings_and_output_weights": not model.tied,
        "attention_dropout": model.dropout,
        "hidden_dropout": model.dropout,
        "add_bias_linear": model.bias == "all",
        "add_qkv_bias": model.bias == "qkv_only",
        "attention_output_gate": model.attention_gate,
    }

    def sizes(fields: Mapping[str, str]) -> dict[str, Any]:
        return {name: getattr(model, field) or None for field, name in fields.items()}

    blocks = "".join(model.all_kinds)
    if model.kv_lora_rank is not None:
        arguments |= {"multi_latent_attention": True, **sizes(LATENT_ATTRIBUTES)}
    if model.dsa_indexer_topk:
        arguments |= {"experimental_attention_variant": "dsa", **sizes(INDEXER_ATTRIBUTES)}
    if Sublayer.DELTA_NET in blocks:
        arguments |= sizes(DELTA_ATTRIBUTES)
    if model.linear_attention_freq != 1:
        arguments["experimental_attention_variant"] = "gated_delta_net"
        arguments["linear_attention_freq"] = model.linear_attention_freq
    if Sublayer.MAMBA in blocks:
        arguments |= sizes(MAMBA_ATTRIBUTES)
    if model.experts:
        arguments |= {
            "num_experts": model.experts,
            **sizes(EXPERT_ATTRIBUTES),
            "moe_ffn_hidden_size": model.expert_width,
            "moe_layer_freq": model.moe_layer_freq if model.moe_layer_freq != 1 else None,
            "moe_router_score_function": model.router_score,
            "moe_router_enable_expert_bias": model.router_bias,
            "moe_router_topk_scaling_factor": model.router_scale if model.router_scale != 1 else None,
        }
    return arguments
