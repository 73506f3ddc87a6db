"""Count parameters and FLOPs of layers from the matrices of their blocks, and weigh layers for balancing.

A linear layer with ``k`` inputs and ``n`` outputs takes ``2 k n`` FLOPs per token in each of F, I and W. Attention
scores and their product with the values take ``4 s^2`` per sequence and query channel in F, twice that in I and nothing
in W. The causal half is counted in full, as in the papers and in MFU. Norms, activations and softmax count nothing.
Take ``a`` heads of ``h/a`` channels and an FFN of ``4h``. A layer then takes ``bsh(24h + 4s)`` in F, ``bsh(24h + 8s)``
in I and ``24bsh^2`` in W. The head takes ``2bshV`` in each (arXiv 2401.10241, arXiv 2411.05288).

Sparse attention computes scores and values of the tokens that are chosen, in the width of the latent (absorbed), and an
index of all tokens. Its loss computes the scores of the chosen tokens again.

The weight of a layer is the number of FLOPs of its forward and backward for one token, divided by 6. It is computed
from Megatron's configuration or a training script's flags. A matrix counts its elements, attention counts its scores
and values over the whole sequence, and Mamba layers and gated delta nets count their scan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model.arguments import model_of
from megatron_pipemem.model.layout import PATTERN_ARGUMENT
from megatron_pipemem.model.model import Execution, Model, Sublayer
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.schedule.options import EarlyWgrad, early_wgrad

SCAN = 7  # FLOPs per token, channel and state of a Mamba block's scan, as Megatron counts them
DELTA_RULE = 8  # likewise of a gated delta net

MatrixCut = Literal["columns", "rows", "none"]


@dataclass(frozen=True)
class Matrix:
    """A linear layer of a block, and how ranks share it."""

    inputs: int  # channels, of all tensor-parallel ranks
    outputs: int  # likewise
    cut: MatrixCut  # what tensor-parallel ranks divide: ``columns`` for outputs, ``rows`` for inputs, or ``none``
    bias: bool = False
    copies: int = 1  # number on a rank: its experts
    visits: float = 1.0  # uses of it, or of one of its copies, per token of the rank
    routed: bool = False  # whether a dispatcher brings it whole sequences of tokens
    ranks: int | None = None  # number of ranks that share it, if not the tensor-parallel ones
    waits: bool = True
    """Whether the layer's backward is split, so that W may compute its weight gradient. The router's is not."""
    early: bool = False  # whether its weight gradient is computed in I nevertheless
    recompute: tuple[str, ...] = ()  # modules of ``Recomputable`` that repeat its F

    def parameters(self, tp: int) -> int:
        """Return the number of weights and biases of all copies on one of ``tp`` ranks (or of ``ranks``, if set)."""
        tp = self.ranks or tp
        weights, bias = self.inputs * self.outputs, self.outputs * self.bias
        if self.cut == "columns":
            return (weights + bias) // tp * self.copies
        return (weights // (tp if self.cut == "rows" else 1) + bias) * self.copies

    def width(self, tp: int) -> float:
        """Return the number of output channels on one of ``tp`` ranks (or of ``ranks``, if set)."""
        return self.outputs / ((self.ranks or tp) if self.cut == "columns" else 1)

    def products(self, tp: int) -> float:
        """Return the multiplications per token on one of ``tp`` ranks (or of ``ranks``), for all uses of the layer."""
        return self.inputs * self.outputs * self.visits / (1 if self.cut == "none" else self.ranks or tp)

    def depth(self, tp: int) -> float:
        """Return the number of input channels on one of ``tp`` ranks (or of ``ranks``, if set)."""
        return self.inputs / ((self.ranks or tp) if self.cut == "rows" else 1)


def early_modules(model: Model, execution: Execution) -> frozenset[EarlyWgrad]:
    """Return the modules of a model whose weight gradients pass I computes, and not W."""
    width = model.expert_width / execution.expert_tp if model.experts else 0
    return early_wgrad(execution.early_wgrad, model.hidden, width)


@lru_cache(maxsize=1024)
def matrices(model: Model, execution: Execution, block: str) -> tuple[Matrix, ...]:
    """Return the linear layers of a block: attention, FFN, experts, or another kind of ``Sublayer``."""
    return tuple(_MATRICES[Sublayer(block)](model, execution))


def _attention(model: Model, execution: Execution) -> Iterable[Matrix]:
    gate = model.query_width * model.attention_gate
    yield Matrix(model.hidden, model.qkv_width + gate, "columns", model.bias != "none")
    yield Matrix(model.query_width, model.hidden, "rows", model.bias == "all")


def _latent_attention(model: Model, execution: Execution, sparse: bool = False) -> Iterable[Matrix]:
    # With Transformer Engine every rank has the whole projections to the latents.
    down: MatrixCut = "none" if execution.implementation == "transformer_engine" else "columns"
    queries, modules = model.heads * model.latent_query_channels, ("mla_up_proj",)
    if model.q_lora_rank:
        yield Matrix(model.hidden, model.q_lora_rank, down)
    yield Matrix(model.q_lora_rank or model.hidden, queries, "columns", recompute=modules)
    latent = model.kv_lora_rank or 0
    yield Matrix(model.hidden, latent + model.qk_pos_emb_head_dim, down)
    keys_and_values = Matrix(latent, model.heads * (model.qk_head_dim + model.v_head_dim), "columns", recompute=modules)
    # Sparse attention multiplies queries and outputs by it, and I computes its weight gradient.
    yield replace(keys_and_values, waits=not sparse, early=sparse)
    yield Matrix(model.heads * model.v_head_dim, model.hidden, "rows", model.bias == "all")


def _sparse_attention(model: Model, execution: Execution) -> Iterable[Matrix]:
    yield from _latent_attention(model, execution, sparse=True)
    width, channels = model.dsa_indexer_n_heads * model.dsa_indexer_head_dim, model.dsa_indexer_head_dim
    sizes = (
        (model.q_lora_rank or model.hidden, width),
        (model.hidden, channels),
        (model.hidden, model.dsa_indexer_n_heads),
    )
    # The indexer's inputs need no gradient, so its weight gradients do not wait.
    yield from (Matrix(inputs, outputs, "none", waits=False, early=True) for inputs, outputs in sizes)


def _delta_net(model: Model, execution: Execution) -> Iterable[Matrix]:
    keys, values = model.linear_widths
    yield Matrix(model.hidden, 2 * (keys + values + model.linear_num_value_heads), "columns")
    yield Matrix(values, model.hidden, "rows")


def _ffn(
    model: Model, width: int, recompute: tuple[str, ...], copies: int = 1, visits: float = 1.0, routed: bool = False
) -> tuple[Matrix, Matrix]:
    bias, channels = model.bias == "all", model.expert_channels if routed else model.hidden
    first = (model.projections - 1) * width
    return (
        Matrix(channels, first, "columns", bias, copies, visits, routed, recompute=recompute),
        Matrix(width, channels, "rows", bias, copies, visits, routed, recompute=recompute),
    )


def _experts(model: Model, execution: Execution) -> Iterable[Matrix]:
    yield Matrix(model.hidden, model.experts, "none", model.bias == "all", waits=False, recompute=("moe",))
    copies, visits = model.experts // execution.ep, execution.expert_visits(model)
    early = early_modules(model, execution)
    first, second = _ffn(model, model.expert_width, ("moe",), copies, visits, routed=True)
    yield replace(first, early="experts_fc1" in early, ranks=execution.expert_tp)
    yield replace(second, early="experts_fc2" in early, ranks=execution.expert_tp)
    if model.expert_latent:  # every tensor-parallel rank has all of both projections, and a part of the tokens
        share = 1 / execution.sequence_ranks
        for inputs, outputs in ((model.hidden, model.expert_latent), (model.expert_latent, model.hidden)):
            yield Matrix(inputs, outputs, "none", model.bias == "all", visits=share, recompute=("moe",))
    if model.shared_expert_ffn:
        yield from _ffn(model, model.shared_expert_ffn, ("moe", "shared_experts"))


def _mamba(model: Model, execution: Execution) -> Iterable[Matrix]:
    states = 2 * model.mamba_groups * model.mamba_state
    yield Matrix(model.hidden, 2 * model.mamba_width + states + model.scan_heads, "columns")
    yield Matrix(model.mamba_width, model.hidden, "rows")


_MATRICES = {
    Sublayer.ATTENTION: _attention,
    Sublayer.LATENT_ATTENTION: _latent_attention,
    Sublayer.SPARSE_ATTENTION: _sparse_attention,
    Sublayer.REUSED_INDEX: lambda model, execution: _latent_attention(model, execution, sparse=True),
    Sublayer.DELTA_NET: _delta_net,
    Sublayer.FFN: lambda model, execution: _ffn(model, model.ffn_width, ("mlp",)),
    Sublayer.EXPERTS: _experts,
    Sublayer.MAMBA: _mamba,
    Sublayer.MERGE: lambda model, execution: (Matrix(2 * model.hidden, model.hidden, "columns"),),
}


_LATENT = (Sublayer.LATENT_ATTENTION, Sublayer.SPARSE_ATTENTION, Sublayer.REUSED_INDEX)


def _other_parameters(model: Model, execution: Execution, block: Sublayer) -> int:
    """Return the number of parameters of a block on one rank that ``Matrix.parameters`` does not count.

    They belong to norms. A Mamba block adds those of its convolution, and the decay, skip and step of each head. A
    gated delta net adds those of its convolution, and the decay and step of each head.
    """
    per_channel = 2 if model.norm == "layernorm" else 1
    if block is Sublayer.MERGE:  # norms of the embedding, of the hidden states, and after the layer
        return 3 * per_channel * model.hidden
    inner = 0
    if block is Sublayer.ATTENTION and model.qk_norm:
        inner = 2 * model.channels
    if block in _LATENT and model.qk_norm:
        inner = (model.q_lora_rank or 0) + (model.kv_lora_rank or 0)
    if block is Sublayer.DELTA_NET:
        inner = model.linear_value_head_dim
    count = per_channel * (model.hidden + inner)
    if block is Sublayer.SPARSE_ATTENTION:  # the norm of the index's keys
        count += 2 * model.dsa_indexer_head_dim
    if block is Sublayer.DELTA_NET:
        convolved = 2 * model.linear_widths[0] + model.linear_widths[1]
        count += (convolved * model.linear_conv_kernel_dim + 2 * model.linear_num_value_heads) // execution.tp
    if block is Sublayer.MAMBA:
        convolved = model.mamba_width + 2 * model.mamba_groups * model.mamba_state
        # A convolution with biases; decay, skip and step of every head; the gated norm, which is an RMS norm.
        count += (convolved * (model.mamba_convolution + 1) + 3 * model.scan_heads + model.mamba_width) // execution.tp
    return count


def core_flops(model: Model, execution: Execution, block: str) -> float:
    """Return the FLOPs of a block's F outside its matrices: of attention scores and values, or of a scan.

    They are those of one rank and one microbatch; 0 for blocks with neither.
    """
    n, s, tp = execution.tokens(model), model.sequence, execution.tp
    if block == Sublayer.ATTENTION:
        return 4 * n * s * model.query_width / tp
    if block == Sublayer.LATENT_ATTENTION:
        return 2 * n * s * model.heads * (model.latent_query_channels + model.v_head_dim) / tp
    if block in (Sublayer.SPARSE_ATTENTION, Sublayer.REUSED_INDEX):
        chosen, latent = min(s, model.dsa_indexer_topk), model.kv_lora_rank or 0
        scores, index = latent + model.qk_pos_emb_head_dim, 0
        both = scores + latent
        if block == Sublayer.SPARSE_ATTENTION:
            both += scores  # for the index's loss
            index = 2 * s * model.dsa_indexer_n_heads * model.dsa_indexer_head_dim
        return n * (2 * chosen * model.heads * both / tp + index)
    if block == Sublayer.MAMBA:
        return SCAN * n * model.mamba_width * model.mamba_state / tp
    if block == Sublayer.DELTA_NET:
        keys, values = model.linear_widths
        convolved = 2 * model.linear_conv_kernel_dim * (2 * keys + values)
        return n * (DELTA_RULE * values * model.linear_key_head_dim + convolved) / tp
    return 0.0


@lru_cache(maxsize=1024)
def layer_flops(model: Model, execution: Execution, kind: str | None = None) -> Passes:
    """Return the FLOPs of F, I and W of one layer on one rank for one microbatch; I includes recomputation.

    ``kind`` names the layer's blocks (``Sublayer``), by default those of the model's first layer.
    """
    linear = core = recomputed = 0.0
    for block in kind or model.kinds[0]:
        for matrix in matrices(model, execution, block):
            flops = 2 * execution.tokens(model) * matrix.products(execution.tp)
            linear += flops
            recomputed += flops * execution.recomputes(*matrix.recompute)
        scores = core_flops(model, execution, block)
        core += scores
        if block not in (Sublayer.MAMBA, Sublayer.DELTA_NET):
            recomputed += scores * execution.recomputes("core_attn")
    if execution.recompute == "full":
        recomputed = linear + core
    return Passes(linear + core, linear + 2 * core + recomputed, linear)


@lru_cache(maxsize=1024)
def early_share(model: Model, execution: Execution, kind: str) -> float:
    """Return the fraction of a layer's weight-gradient FLOPs that pass I computes, and not W."""
    products: dict[bool, float] = {True: 0.0, False: 0.0}
    for block in kind:
        for matrix in matrices(model, execution, block):
            products[matrix.early] += matrix.products(execution.tp)
    return products[True] / (sum(products.values()) or 1.0)


@lru_cache(maxsize=1024)
def attention_share(model: Model) -> float:
    """Return the fraction of F's FLOPs, over all layers, in attention scores and values.

    Scores that the causal mask removes are counted.
    """
    passes = [layer_flops(model, Execution(), kind) for kind in model.all_kinds]
    return 1 - sum(of_layer.weight for of_layer in passes) / sum(of_layer.forward for of_layer in passes)


def head_flops(model: Model, execution: Execution) -> Passes:
    """Return the FLOPs of the output layer on one rank for one microbatch.

    With multi-token prediction, the output layer runs once for each predicted token.
    """
    product = 2 * execution.tokens(model) * model.hidden * execution.vocabulary_rows(model)
    return Passes(product, product, product) * model.heads_of_output


def projection_matrices(model: Model) -> list[Matrix]:
    """Return the linear layers of one projection of a vision tower's patches to tokens; none without a tower."""
    tower = model.tower
    if tower is None:
        return []
    inner = tower.joined if tower.projection is None else tower.projection
    if not inner:
        return [Matrix(tower.joined, model.hidden, "none", bias=True)]
    return [Matrix(tower.joined, inner, "columns", bias=True), Matrix(inner, model.hidden, "rows", bias=True)]


def model_flops(model: Model) -> float:
    """Return the FLOPs of forward and backward of one whole sequence, without recomputation, as MFU counts them.

    They include the head, and a vision tower with all images of the sequence.
    """
    layers = sum(layer_flops(model, Execution(), kind).total for kind in model.all_kinds)
    if (tower := model.tower) is not None:
        projected = sum(matrix.products(1) for matrix in projection_matrices(model)) * (1 + tower.deepstack)
        layers += tower.layers * tower.images * layer_flops(tower.model(), Execution()).total
        layers += 6 * tower.images * tower.patches / tower.merge * projected
    return layers + 6 * model.sequence * model.hidden * model.vocabulary * model.heads_of_output


@lru_cache(maxsize=1024)
def layer_parameters(model: Model, execution: Execution, kind: str | None = None) -> int:
    """Return the number of parameters of one layer on one rank, experts included.

    ``kind`` names the layer's blocks (``Sublayer``), by default those of the model's first layer.
    """
    return sum(
        _other_parameters(model, execution, Sublayer(block))
        + sum(matrix.parameters(execution.tp) for matrix in matrices(model, execution, block))
        for block in kind or model.kinds[0]
    )


def expert_parameters(model: Model, execution: Execution, kind: str) -> int:
    """Return the number of a layer's expert parameters on one rank.

    They count apart because fewer ranks share their optimizer state.
    """
    copies = model.experts // execution.ep
    of_experts = (
        matrix
        for block in kind
        if block == Sublayer.EXPERTS
        for matrix in _ffn(model, model.expert_width, (), copies, routed=True)
    )
    return sum(matrix.parameters(execution.expert_tp) for matrix in of_experts)


def embedding_parameters(model: Model, execution: Execution) -> int:
    """Return the number of parameters of the input embedding on one rank, including learned positions."""
    return model.hidden * (execution.vocabulary_rows(model) + (model.sequence if model.position == "learned" else 0))


def head_parameters(model: Model, execution: Execution) -> int:
    """Return the number of parameters of final norm and output layer on one rank.

    A tied head counts in full, because the last stage has a copy of the embedding.
    """
    return model.hidden * (execution.vocabulary_rows(model) + (2 if model.norm == "layernorm" else 1))


def layer_weights(args: object, symbols: str, sequence: int) -> list[float]:
    """Return the weight (FLOPs per token / 6) of each block of a hybrid pattern, by Megatron's arguments or configuration.

    ``sequence`` is the number of tokens of a sequence. Sizes that Megatron refuses give 0.
    """
    facts = {
        PATTERN_ARGUMENT: symbols,
        "seq_length": max(1, sequence),
        "vocab_size": 1,
        "multi_latent_attention": not {*symbols}.isdisjoint(_LATENT),
        "experimental_attention_variant": "dsa" if Sublayer.SPARSE_ATTENTION in symbols else None,
    }
    try:
        model = model_of(args, **facts)
    except ConfigError:
        return [0.0] * len(symbols)
    weights = kind_weights(model)
    return [weights[symbol] for symbol in symbols]


def kind_weights(model: Model) -> dict[str, float]:
    """Return the weight (FLOPs per token / 6) of each kind of a model's layers."""
    return {
        kind: layer_flops(model, Execution(), kind).total / (6 * model.sequence) for kind in dict.fromkeys(model.kinds)
    }
