"""The bytes that one microbatch keeps on a rank, tensor by tensor, with the pass that needs each tensor.

The tensors are those that Megatron's modules keep after F. I needs the inputs of norms, the queries, keys and values,
and the softmax's sums. W needs the inputs of linear layers, which are outputs of norms and activations. A tensor that
two operations keep counts once. With 16-bit elements and no dropout, a GPT layer keeps ``32bsh``; with dropout masks it
keeps ``34bsh``. If norms, activation and masks are recomputed, it keeps ``20bsh`` (arXiv 2503.01328). Tests count the
same on Megatron's own modules, with fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from megatron_pipemem.model.counts import Matrix, MatrixCut, early_modules, matrices
from megatron_pipemem.model.model import Execution, Model, Sublayer
from megatron_pipemem.part_costs import Summed
from megatron_pipemem.schedule.action import Kind

_AHEAD = "next token's embedding"
_ATTENDED = "attention's output"
_CHOSEN = 4  # bytes of the number of a token that sparse attention chooses
_SUM = 4  # bytes of a statistic, a softmax's sum, or a logit's exponential: always fp32


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a layer keeps after F, for one microbatch."""

    name: str
    nbytes: float  # on one rank, for one microbatch
    needed: Literal["I", "W"]  # the last pass that needs it: ``W`` for inputs of linear layers, else ``I``
    recompute: tuple[str, ...] = ()  # modules of ``Recomputable`` that would make it again
    is_statistic: bool = False  # whether it has one or two numbers per token and norm, head or chosen expert
    early: bool = False  # whether the weight gradient that needs it is computed in I


@dataclass(frozen=True)
class KeptBytes(Summed):
    """The bytes of one microbatch that a part of a stage keeps after F and after I."""

    saved: float = 0.0  # from F to I
    after_input: float = 0.0  # from I to W: the inputs of linear layers, and the gradients of their outputs


def layer_tensors(model: Model, execution: Execution, kind: str | None = None) -> tuple[SavedTensor, ...]:
    """Return the tensors that one layer keeps, also those that recomputation drops. The layer's input is the first.

    ``kind`` names the layer's blocks (``Sublayer``), by default those of the model's first layer.
    """
    shrinks = execution.product_element / execution.element
    return tuple(
        tensor if tensor.needed == "I" else replace(tensor, nbytes=tensor.nbytes * shrinks)
        for block in kind or model.kinds[0]
        for tensor in _block_tensors(model, execution, Sublayer(block))
    )


def _block_tensors(model: Model, execution: Execution, block: Sublayer) -> Iterable[SavedTensor]:
    if block is Sublayer.MERGE:
        yield from _merge_tensors(model, execution)
        return
    between = message_bytes(model, execution)
    yield SavedTensor("input", between, "I")
    yield _statistics("norm's statistics", model, execution, ("layernorm",))
    # The router's weight gradient does not wait, and its input is never quantised.
    of_experts = model.shared_expert_ffn or model.expert_latent
    waits = block is not Sublayer.EXPERTS or (of_experts and execution.fp8 == "none")
    yield SavedTensor("norm's output", between, "W" if waits else "I", ("layernorm",))
    yield from _WITHIN[block](model, execution)
    if model.dropout:
        yield SavedTensor("dropout's mask", between / execution.element, "I", ("activation",))


def _statistics(name: str, model: Model, execution: Execution, recompute: tuple[str, ...] = ()) -> SavedTensor:
    rows = execution.tokens(model) / execution.sequence_ranks
    return SavedTensor(name, rows * _SUM * (2 if model.norm == "layernorm" else 1), "I", recompute, is_statistic=True)


def _attention_tensors(model: Model, execution: Execution) -> Iterable[SavedTensor]:
    """Yield the tensors that an attention block keeps, except its norm's input and output.

    Queries, keys and values are views of the projection's output, so each keeps the whole output. Transformer Engine's
    norms and its flash attention copy them instead, and its kernel of rotations keeps one table for all layers. If
    there are fewer key heads than tensor-parallel ranks, every rank gathers the output of all ranks to find its own
    part.
    """
    n, e, tp = execution.tokens(model), execution.element, execution.tp
    groups = execution.key_groups(model)
    heads, keys = (n * count * model.channels * e for count in (model.heads / tp, groups))
    projected = model.qkv_width + model.query_width * model.attention_gate
    output = n * projected * e / (1 if model.key_heads < tp else tp)
    rotated = model.position == "rope"
    copies = execution.implementation == "transformer_engine" and execution.attention == "flash"
    yield SavedTensor(_ATTENDED, heads, "W")
    if model.attention_gate:
        yield SavedTensor("attention's output before its gate", heads, "I")
        yield SavedTensor("attention's gate", heads * _SUM / e, "I")
    yield from _unquantised_output(execution, heads)
    fused = copies and execution.fused if execution.fused_rotations is None else execution.fused_rotations
    if rotated and not fused:
        yield _rotations(model, execution, model.channels)
    yield from _score_tensors(model, execution)
    if model.qk_norm:
        if groups > 1 or copies:  # with a single group they are a view
            yield SavedTensor("queries before their norm", heads, "I")
        if copies:
            yield SavedTensor("keys before their norm", keys, "I")
        yield SavedTensor(
            "query and key norms' statistics", n * (model.heads / tp + groups) * _SUM, "I", is_statistic=True
        )
    own = rotated or model.qk_norm  # whether queries and keys are not views of the projection's output
    if execution.attention == "unfused" and model.heads / tp > groups and not execution.recomputes("core_attn"):
        yield SavedTensor("repeated keys and values", 2 * heads * _key_shards(execution), "I")
        # With a single group they are a view of the projection's output.
        views = groups == 1 and not own
        yield SavedTensor("queries", output if views else heads, "I")
        if model.qk_norm:
            yield SavedTensor("keys before their norm", output, "I")
        return
    if _key_shards(execution) > 1:
        yield SavedTensor("keys and values of the whole sequence", 2 * keys * _key_shards(execution), "I")
        yield SavedTensor("queries", heads if rotated and not model.qk_norm else output, "I")
        return
    if copies and not execution.recomputes("core_attn"):
        yield SavedTensor("queries, keys and values", heads + 2 * keys, "I")
        return
    yield SavedTensor("queries, keys and values", output, "I")
    if own:
        yield SavedTensor("rotated or normal queries and keys", heads + keys, "I")
    elif model.heads / tp > groups > 1:  # with a single group they are a view
        yield SavedTensor("queries of all groups", heads, "I")


def _key_shards(execution: Execution) -> int:
    """Return the number of context-parallel ranks whose keys and values a layer keeps; 1 with flash attention."""
    return execution.cp if execution.attention == "unfused" else 1


def _unquantised_output(execution: Execution, nbytes: float) -> Iterable[SavedTensor]:
    """Yield the 16-bit output of flash attention if the next projection keeps it in 8 bits and so does not share it.

    ``nbytes`` are the bytes of this output.
    """
    if execution.fp8 != "none" and execution.attention == "flash":
        yield SavedTensor("attention's output in 16 bits", nbytes, "I", ("core_attn",))


def _rotations(model: Model, execution: Execution, channels: int, recompute: tuple[str, ...] = ()) -> SavedTensor:
    """Return the tables that a layer keeps unless a kernel rotates: sines and cosines, for queries and for keys."""
    rotated = int(channels * execution.rotary_percent)
    nbytes = 4 * model.sequence / execution.cp * rotated * execution.element
    return SavedTensor("tables of rotations", nbytes, "I", recompute)


def _score_tensors(model: Model, execution: Execution) -> Iterable[SavedTensor]:
    n, e, tp = execution.tokens(model), execution.element, execution.tp
    if execution.attention == "flash":
        yield SavedTensor("softmax's sums", n * model.heads / tp * _SUM, "I", ("core_attn",), is_statistic=True)
        return
    scores = n * model.sequence * model.heads / tp
    if _has_softmax_kernel(model, execution):
        yield SavedTensor("softmax's output", scores * e, "I", ("core_attn",))
    else:
        yield SavedTensor("softmax's output", scores * _SUM, "I", ("core_attn",))
        if e != _SUM:
            yield SavedTensor("softmax's output, rounded", scores * e, "I", ("core_attn",))
        # A layer's own, unless the batch brings one.
        yield SavedTensor("causal mask", model.sequence**2 / execution.cp, "I", ("core_attn",))
    if model.dropout:
        yield SavedTensor("attention's dropout", scores * (1 + e), "I", ("core_attn",))


def _has_softmax_kernel(model: Model, execution: Execution) -> bool:
    """Return whether the softmax of unfused attention is one kernel, by the limits of Megatron and Transformer Engine."""
    longest = 4096 if execution.implementation == "local" else 16384
    rows = execution.micro_batch * model.heads // execution.tp
    fits = 16 < model.sequence <= longest and model.sequence % 8 == 0 and rows % 4 == 0
    return execution.fused_softmax and execution.precision != "fp32" and fits


def _latent_tensors(model: Model, execution: Execution) -> Iterable[SavedTensor]:
    """Yield the tensors that multi-head latent attention keeps, except its norm's input and output.

    Every tensor-parallel rank has whole latents, of all tokens or with sequence parallelism of a part of them.
    """
    n, e, tp = execution.tokens(model), execution.element, execution.tp
    rows = n / execution.sequence_ranks * e
    # Megatron's own layers gather the latents. A rank's part of the queries' latent is a view of all of it.
    gathered = n * e if execution.implementation == "local" else rows
    # Transformer Engine's norm of a latent is part of the projection that follows.
    in_projection = ("mla_up_proj",) if execution.implementation == "transformer_engine" else ()
    positions = 0 if execution.sequence_parallel else model.qk_pos_emb_head_dim  # in one tensor with the latent
    for name, rank, before in (
        ("queries'", model.q_lora_rank or 0, gathered * (model.q_lora_rank or 0)),
        ("keys' and values'", model.kv_lora_rank or 0, rows * ((model.kv_lora_rank or 0) + positions)),
    ):
        if rank and model.qk_norm:
            yield SavedTensor(f"{name} latent before its norm", before, "I")
            yield _statistics(f"{name} latent's statistics", model, execution, in_projection)
        if rank:
            modules = in_projection if model.qk_norm else ()
            yield SavedTensor(f"{name} latent", rows * rank if model.qk_norm else before, "W", modules)
    if not execution.fused_rotations:
        yield _rotations(model, execution, model.qk_pos_emb_head_dim, ("mla_up_proj",))
    yield from _score_tensors(model, execution)
    heads = n * model.heads / tp * e
    shards = _key_shards(execution)
    yield SavedTensor("queries and keys", (1 + shards) * heads * model.latent_query_channels, "I", ("mla_up_proj",))
    yield SavedTensor("values", shards * heads * model.v_head_dim, "I", ("mla_up_proj",))
    yield SavedTensor(_ATTENDED, heads * model.v_head_dim, "W")
    yield from _unquantised_output(execution, heads * model.v_head_dim)


def _sparse_tensors(model: Model, execution: Execution, indexed: bool) -> Iterable[SavedTensor]:
    """Yield the tensors that sparse attention keeps with its fused kernels, except its norm's input and output.

    Heads share one key, the latent. ``indexed`` says whether the layer has an indexer. Its queries are those of every
    tensor-parallel rank.
    """
    n, e, tp = execution.tokens(model), execution.element, execution.tp
    # No kernel rotates for this attention.
    latents = _latent_tensors(model, replace(execution, attention="flash", fused_rotations=False))
    yield from (tensor for tensor in latents if tensor.name not in ("queries and keys", "values", _ATTENDED))
    heads, latent = n * model.heads / tp * e, model.kv_lora_rank or 0
    yield SavedTensor("queries", heads * model.latent_query_channels, "I", ("mla_up_proj",))
    yield SavedTensor("queries for the latent", heads * (latent + model.qk_pos_emb_head_dim), "I", ("mla_up_proj",))
    yield SavedTensor("keys", n * (latent + model.qk_pos_emb_head_dim) * e, "I", ("mla_up_proj",))
    yield SavedTensor("attended latents", heads * latent, "I")
    yield SavedTensor(_ATTENDED, heads * model.v_head_dim, "W")
    yield SavedTensor("chosen tokens", n * min(model.sequence, model.dsa_indexer_topk) * _CHOSEN, "I", ("core_attn",))
    if indexed:
        width, ranks = model.dsa_indexer_n_heads * model.dsa_indexer_head_dim, execution.sequence_ranks
        yield SavedTensor("queries of the index", n * width * e, "I")
        yield SavedTensor("keys of the index", 2 * n * model.dsa_indexer_head_dim * e, "I")
        yield SavedTensor("weights of the index", 2 * n * model.dsa_indexer_n_heads * e, "I")
        if ranks > 1:  # the indexer gathers its inputs
            yield SavedTensor("gathered inputs of the index", n * (model.hidden + (model.q_lora_rank or 0)) * e, "W")


def _delta_tensors(model: Model, execution: Execution) -> Iterable[SavedTensor]:
    """Yield the tensors that a gated delta net keeps with the kernels of ``fla``, except its norm's input and output.

    The kernels keep their inputs, and a triangular matrix for each part of 64 tokens.
    """
    n, e, tp = execution.tokens(model), execution.element, execution.tp
    keys, values = (n * width / tp * e for width in model.linear_widths)
    heads = n * model.linear_num_value_heads / tp
    projected = next(iter(matrices(model, execution, Sublayer.DELTA_NET))).width(tp)
    yield SavedTensor("projected input", n * projected * e, "I")
    yield SavedTensor("normal queries and keys", 2 * keys, "I")
    yield SavedTensor("queries and keys of all heads", 2 * heads * model.linear_key_head_dim * e, "I")
    yield SavedTensor("values and gate", 2 * values, "I")
    yield SavedTensor("decays and steps", heads * (2 * _SUM + 2 * e), "I", is_statistic=True)
    yield SavedTensor("triangular matrices", heads * 64 * e, "I")
    yield SavedTensor("recurrence's output", values, "I")
    yield SavedTensor("gated norm's statistics", heads * _SUM, "I", is_statistic=True)
    yield SavedTensor("normal output", values, "I")
    if not execution.fused:
        yield SavedTensor("gate in fp32", 2 * values * _SUM / e, "I")
    yield SavedTensor("output projection's input", values, "W")


def _ffn_tensors(model: Model, execution: Execution, width: int, within: tuple[str, ...]) -> Iterable[SavedTensor]:
    """Yield the tensors that a dense FFN of this width keeps, except the norm's input and output.

    ``within`` names the modules whose recomputation makes all of these tensors again.
    """
    inner = execution.tokens(model) * width / execution.tp * execution.element
    yield SavedTensor("activation's input", inner * (model.projections - 1), "I", within)
    yield SavedTensor("second projection's input", inner, "W", (*within, "activation"))
    if model.gated and not execution.fused:
        yield SavedTensor("gate", 2 * inner, "I", within)


def _expert_tensors(model: Model, execution: Execution) -> Iterable[SavedTensor]:
    """Yield the tensors that a mixture-of-experts block keeps, except its norm's input and output.

    A rank of an expert-tensor-parallel group has all tokens of the group, and a part of each expert.
    """
    n, e = execution.tokens(model), execution.element
    visits = n * execution.expert_visits(model)
    inner = visits * model.expert_width / execution.expert_tp * e
    early = early_modules(model, execution)
    yield SavedTensor("router's choice", _router_bytes(model) * n / execution.sequence_ranks, "I", ("moe",))
    yield SavedTensor("experts' shares", visits * e, "I", ("moe",), is_statistic=True)
    yield SavedTensor(
        "experts' inputs", visits * model.expert_channels * e, "W", ("moe",), early="experts_fc1" in early
    )
    if model.expert_latent:
        yield SavedTensor("experts' sum", n / execution.sequence_ranks * model.expert_latent * e, "W", ("moe",))
    yield SavedTensor("experts' activation's input", inner * (model.projections - 1), "I", ("moe",))
    modules = ("moe", "moe_act", "activation")
    yield SavedTensor("experts' second projection's input", inner, "W", modules, early="experts_fc2" in early)
    if not (execution.fused and model.fuses_experts):
        yield SavedTensor("experts' activation's output", inner * (3 if model.gated else 1), "I", ("moe", "moe_act"))
    if model.shared_expert_ffn:
        yield from _ffn_tensors(model, execution, model.shared_expert_ffn, ("moe", "shared_experts"))


def _router_bytes(model: Model) -> float:
    """Return the router's bytes per token: scores, chosen experts, and the order that sorts tokens by expert."""
    chosen, index = model.experts_per_token, 8
    sorting = index * (model.experts + chosen)
    if model.router_score == "softmax":
        return sorting + chosen * (index + _SUM)
    mask = model.experts * (model.router_groups > 0)
    return sorting + model.experts * _SUM + chosen * index + _SUM + mask


def _mamba_tensors(model: Model, execution: Execution) -> Iterable[SavedTensor]:
    """Yield the tensors that a Mamba block keeps with Megatron's default kernel, except its norm's input and output.

    ``mamba_split_conv1d_scan_combined`` of the package mamba_ssm keeps its input and its output before the gate, and
    scans again in I.
    """
    n, e, tp = execution.tokens(model), execution.element, execution.tp
    inner = n * model.mamba_width / tp * e
    projected = next(iter(matrices(model, execution, Sublayer.MAMBA))).width(tp)
    yield SavedTensor("projected input", n * projected * e, "I")
    yield SavedTensor("scan's output", inner, "I")
    yield SavedTensor("gated output", inner, "I")
    yield SavedTensor("gated norm's statistics", n * model.mamba_groups / tp * _SUM, "I", is_statistic=True)
    yield SavedTensor("output projection's input", inner, "W")


def _merge_tensors(model: Model, execution: Execution) -> Iterable[SavedTensor]:
    """Yield the tensors that multi-token prediction keeps outside its layer: before it, and for the norm after it."""
    between = message_bytes(model, execution)
    yield SavedTensor("hidden states", between, "I")
    for name in ("hidden states'", "embedding's", "final"):
        yield _statistics(f"{name} norm's statistics", model, execution)
    yield SavedTensor(_AHEAD, between, "I")
    yield SavedTensor("joined states", 2 * between, "W")
    yield SavedTensor("final norm's input", between, "I")
    if execution.implementation == "local":  # a rank's part of the layer's input is a view of the gathered tensor
        yield SavedTensor("gathered input", between * (execution.sequence_ranks - 1), "I")


_WITHIN = {
    Sublayer.ATTENTION: _attention_tensors,
    Sublayer.LATENT_ATTENTION: _latent_tensors,
    Sublayer.SPARSE_ATTENTION: lambda model, execution: _sparse_tensors(model, execution, True),
    Sublayer.REUSED_INDEX: lambda model, execution: _sparse_tensors(model, execution, False),
    Sublayer.DELTA_NET: _delta_tensors,
    Sublayer.FFN: lambda model, execution: _ffn_tensors(model, execution, model.ffn_width, ("mlp",)),
    Sublayer.EXPERTS: _expert_tensors,
    Sublayer.MAMBA: _mamba_tensors,
}


def layer_bytes(model: Model, execution: Execution, kind: str | None = None) -> KeptBytes:
    """Return the bytes that one layer keeps on one rank for one microbatch, with the run's recomputation.

    ``kind`` names the layer's blocks (``Sublayer``), by default those of the model's first layer. If the language model
    is frozen, nothing is kept after I.
    """
    kind = kind or model.kinds[0]
    tensors = layer_tensors(model, execution, kind)
    if not execution.layers_have_weights:
        return KeptBytes(sum(tensor.nbytes for tensor in _kept(tensors, execution)))
    after_input = sum(tensor.nbytes for tensor in tensors if tensor.needed == "W" and not tensor.early)
    after_input += _gradient_bytes(model, execution, kind) + _gathered_bytes(model, execution, kind)
    return KeptBytes(sum(tensor.nbytes for tensor in _kept(tensors, execution)), after_input)


def moved_bytes(model: Model, execution: Execution, kind: str | None = None) -> float:
    """Return the bytes of one layer that offload moves to the host for one microbatch; as many come back.

    These are all bytes that the layer keeps, except the few of norm statistics, softmax sums and experts' shares.
    ``kind`` names the layer's blocks, by default those of the model's first layer.
    """
    return sum(
        tensor.nbytes for tensor in _kept(layer_tensors(model, execution, kind), execution) if not tensor.is_statistic
    )


def _kept(tensors: Sequence[SavedTensor], execution: Execution) -> list[SavedTensor]:
    if execution.recompute == "full":
        inputs = (tensor for number, tensor in enumerate(tensors) if number == 0 or tensor.name == _AHEAD)
        return [*inputs] if execution.keeps_input else []
    kept = [tensor for tensor in tensors if not execution.recomputes(*tensor.recompute)]
    if not execution.layers_have_weights:  # flash attention's backward reads its output too
        kept = [tensor for tensor in kept if tensor.needed == "I" or tensor.name == _ATTENDED]
    return kept


def head_bytes(model: Model, execution: Execution) -> KeptBytes:
    """Return the bytes that final norm, output layer and loss keep on one rank for one microbatch.

    Most of them are the fp32 exponentials of the logits. With multi-token prediction, all but the norm's input and
    statistics count once for each predicted token.
    """
    between = message_bytes(model, execution)
    statistics = _statistics("final norm's statistics", model, execution).nbytes
    logits = execution.tokens(model) * execution.vocabulary_rows(model)
    once = KeptBytes(between + statistics, 0.0)
    waits = 0.0 if "head" in early_modules(model, execution) else between + logits * execution.element
    return once + KeptBytes(between + logits * _SUM, waits) * model.heads_of_output


def embedding_bytes(model: Model, execution: Execution) -> KeptBytes:
    """Return the bytes that the embedding keeps: only a dropout mask, because its output counts for the first layer."""
    mask = execution.tokens(model) * model.hidden / execution.sequence_ranks if model.dropout else 0.0
    return KeptBytes(mask, 0.0)


def stage_bytes(model: Model, execution: Execution, layers: Sequence[int]) -> dict[Kind, tuple[float, ...]]:
    """Return by how much F, I and W of one microbatch change the bytes of a rank, one value per stage of a replica.

    ``layers`` has the pieces of every stage: layers and, in a GPT, all multi-token prediction as one. In a hybrid model,
    multi-token prediction is on the last stage. Vision towers and adapters are not counted.
    """
    pieces = [
        layer_bytes(model, execution.at(place), kind)
        for kind, place in zip(model.kinds, places_of(layers, model.layers), strict=True)
    ]
    kinds_ahead = model.all_kinds[model.layers :]
    ahead = KeptBytes()
    if kinds_ahead:
        layer = layer_bytes(model, execution.of_prediction, kinds_ahead[0])
        ahead = (layer + embedding_bytes(model, execution)) * len(kinds_ahead)
    pieces = [*pieces, ahead][: model.pieces]
    ends = accumulate(layers)
    stages = [sum(pieces[end - count : end], KeptBytes()) for end, count in zip(ends, layers, strict=True)]
    stages[0] += embedding_bytes(model, execution)
    stages[-1] += head_bytes(model, execution) + (ahead if model.pattern is not None else KeptBytes())
    return {
        Kind.F: tuple(kept.saved for kept in stages),
        Kind.I: tuple(kept.after_input - kept.saved for kept in stages),
        Kind.W: tuple(-kept.after_input for kept in stages),
    }


def places_of(pieces: Sequence[int], layers: int) -> list[int]:
    """Return the place of each of the model's ``layers`` in its stage. ``pieces`` are the numbers of pieces of the stages."""
    return [place for count in pieces for place in range(count)][:layers]


def message_bytes(model: Model, execution: Execution) -> float:
    """Return the bytes of one microbatch's activations between two stages, on one rank; a gradient has as many."""
    return execution.tokens(model) * model.hidden / execution.sequence_ranks * execution.element


def _gradient_bytes(model: Model, execution: Execution, kind: str) -> float:
    """Return the bytes of the output gradients that a layer keeps from I to W on one rank, for one microbatch.

    Linear layers whose weight gradient does not wait for W keep none. With sequence parallelism, I gathers the output
    gradient of a linear layer whose inputs are cut. The whole is kept, unless W gathers it again.
    """
    widths = sum(
        matrix.width(execution.tp)
        * matrix.visits
        / (execution.sequence_ranks if _output_is_shard(matrix, execution) else 1)
        for block in kind
        for matrix in matrices(model, execution, block)
        if matrix.waits and not matrix.early
    )
    return execution.product_element * execution.tokens(model) * widths


def _gathered_bytes(model: Model, execution: Execution, kind: str) -> float:
    """Return the bytes by which pass I enlarges the kept inputs of a layer's linear layers, for one microbatch.

    With sequence parallelism, a linear layer with cut outputs keeps its rank's part of the sequence, and computes on
    all of it. Transformer Engine gathers the parts in I, and keeps the whole until W, unless W gathers it again.
    Megatron's own layers always gather again in W.
    """
    inputs = sum(
        matrix.inputs
        for block in kind
        for matrix in matrices(model, execution, block)
        if _is_gathered(matrix, "columns") and not _input_is_shard(matrix, execution)
    )
    return inputs * execution.tokens(model) * execution.product_element * (1 - 1 / execution.sequence_ranks)


def gathered_in_weight(model: Model, execution: Execution, layers: Iterable[Matrix]) -> list[float]:
    """Return the bytes of each whole tensor that W gathers over tensor-parallel ranks, for these linear layers."""
    if not execution.sequence_parallel:
        return []
    layers = list(layers)
    widths = [matrix.inputs for matrix in layers if _input_is_shard(matrix, execution)]
    widths += [matrix.outputs for matrix in layers if _output_is_shard(matrix, execution)]
    return [width * execution.tokens(model) * execution.product_element for width in widths]


def _input_is_shard(matrix: Matrix, execution: Execution) -> bool:
    """Return whether only a shard of a gathered input is kept until W, as always in Megatron's own layers.

    W then gathers the input again.
    """
    kept = execution.wgrad_inputs == "sharded" or execution.implementation == "local"
    return kept and _is_gathered(matrix, "columns")


def _output_is_shard(matrix: Matrix, execution: Execution) -> bool:
    """Return whether only a shard of the output gradient is kept until W, which gathers it.

    A gradient that is quantised while it is gathered is kept whole.
    """
    return execution.wgrad_inputs == "sharded" and execution.fp8 == "none" and _is_gathered(matrix, "rows")


def _is_gathered(matrix: Matrix, cut: MatrixCut) -> bool:
    """Return whether a matrix has this cut, and sequence parallelism, if it is on, gathers a tensor of the matrix.

    The tensor is the input of a matrix cut by columns, and the output gradient of one cut by rows.
    """
    return matrix.cut == cut and matrix.waits and not matrix.routed
