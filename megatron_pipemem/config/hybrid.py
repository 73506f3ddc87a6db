"""Read patterns of hybrid models and weigh their layers against each other.

A pattern has one symbol per layer, ``|`` between the stages of the pipeline, and behind ``/`` what predicts further tokens. The
weight of a layer is what its forward and backward compute for one token, in sixths of a FLOP: a matrix counts its
elements, attention its scores and values over the whole sequence, a Mamba layer its scan. Norms and activations count
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

FLAGS = ("hybrid-layer-pattern", "hybrid-override-pattern")
SEGMENTS, FURTHER = "|", "/"
_SCAN = 3.5  # of a token, channel and state: 7 FLOPs forward and 14 backward

Sizes = Callable[[str], float]
"""The value of an attribute of Megatron's configuration; 0 or ``None`` where it has none."""

# Attributes whose flags are called otherwise, and what Megatron takes where there is no flag.
_RENAMED = {"gated_linear_unit": "swiglu", "num_moe_experts": "num-experts"}
_DEFAULTS = {
    **{"moe_router_topk": 2, "mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8},
    **{"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
    **{
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}


def layers_of(pattern: str) -> str:
    """Return the symbols of a pattern's layers, without what predicts further tokens."""
    return pattern.split(FURTHER)[0].replace(SEGMENTS, "")


def is_cut(pattern: str) -> bool:
    """Return whether a pattern says where its stages end."""
    return SEGMENTS in pattern.split(FURTHER)[0]


def cut(pattern: str, counts: Sequence[int]) -> str:
    """Return a pattern that is cut into stages.

    Args:
        pattern: without ``|``.
        counts: layers of every stage.
    """
    layers, slash, further = pattern.partition(FURTHER)
    ends = list(accumulate(counts, initial=0))
    return SEGMENTS.join(layers[begin:end] for begin, end in pairwise(ends)) + slash + further


def layer_weight(symbol: str, of: Sizes, sequence: int) -> float:
    """Return the weight of one layer.

    Args:
        symbol: of the layer.
        of: the model's sizes.
        sequence: tokens per sequence.
    """
    return _WEIGHTS[symbol](of, sequence) if symbol in _WEIGHTS else 0.0


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


def _attention(of: Sizes, sequence: int) -> float:
    channels = of("kv_channels") or of("hidden_size") / (of("num_attention_heads") or 1)
    queries = of("num_attention_heads") * channels
    keys = (of("num_query_groups") or of("num_attention_heads")) * channels
    return of("hidden_size") * 2 * (queries + keys) + 2 * sequence * queries


def _latent_attention(of: Sizes, sequence: int) -> float:
    hidden, heads, values = of("hidden_size"), of("num_attention_heads"), of("v_head_dim")
    channels = of("qk_head_dim") + of("qk_pos_emb_head_dim")
    rank = of("q_lora_rank")
    queries = rank * (hidden + heads * channels) if rank else hidden * heads * channels
    keys = hidden * (of("kv_lora_rank") + of("qk_pos_emb_head_dim"))
    keys += of("kv_lora_rank") * heads * (of("qk_head_dim") + values)
    return queries + keys + heads * values * hidden + sequence * heads * (channels + values)


def _ffn(of: Sizes, width: float) -> float:
    return (3 if of("gated_linear_unit") else 2) * of("hidden_size") * width


def _width(of: Sizes) -> float:
    hidden = of("hidden_size")
    return of("ffn_hidden_size") or (hidden * 8 // 3 // 64 * 64 if of("gated_linear_unit") else 4 * hidden)


def _experts(of: Sizes, sequence: int) -> float:
    visited = of("moe_router_topk") * (of("moe_ffn_hidden_size") or _width(of))
    shared = of("moe_shared_expert_intermediate_size") or 0
    return of("hidden_size") * of("num_moe_experts") + _ffn(of, visited + shared)


def _mamba(of: Sizes, sequence: int) -> float:
    hidden, channels = of("hidden_size"), of("mamba_head_dim")
    heads = of("mamba_num_heads") or 2 * hidden / channels
    states = of("mamba_num_groups") * of("mamba_state_dim")
    width = heads * channels
    return hidden * (3 * width + 2 * states + heads) + _SCAN * width * of("mamba_state_dim")


def _delta_net(of: Sizes, sequence: int) -> float:
    keys = of("linear_num_key_heads") * of("linear_key_head_dim")
    values = of("linear_num_value_heads") * of("linear_value_head_dim")
    projections = of("hidden_size") * (2 * keys + 3 * values + 2 * of("linear_num_value_heads"))
    return projections + _SCAN * values * of("linear_key_head_dim")


# Sparse attention computes its scores for a part of the sequence only, and an index of the whole.
_WEIGHTS: dict[str, Callable[[Sizes, int], float]] = {
    "*": _attention,
    "+": _latent_attention,
    "D": _latent_attention,
    "-": lambda of, sequence: _ffn(of, _width(of)),
    "E": _experts,
    "M": _mamba,
    "G": _delta_net,
}
