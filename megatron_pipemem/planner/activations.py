"""List the bytes that one microbatch keeps on a rank, tensor by tensor, by what needs them.

What is listed is what Megatron's modules keep between F and the pass that needs it: inputs of norms, outputs of norms and
activations as inputs of linear layers (needed by W), queries, keys, values and the softmax's sums (needed by I). A tensor
that two operations keep counts once. With 16-bit elements and no dropout a GPT layer keeps ``32bsh``, with dropout masks
``34bsh``, and ``20bsh`` when norms, activation and masks are recomputed (arXiv 2503.01328).
``pipemem profile --fake`` counts the same on Megatron's own modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_pipemem.config.model import Execution, Model, groups_per_rank, padded_vocabulary, tokens

_SUM = 4  # bytes of a statistic, a softmax's sum, or a logit's exponential: always fp32


@dataclass(frozen=True)
class Saved:
    """A tensor kept from F on.

    Args:
        name: which.
        nbytes: on one rank, for one microbatch.
        needed: until which pass: ``I``, or ``W`` for inputs of linear layers, whoever else needs them.
        recompute: which of ``RECOMPUTABLE`` would make it again, if one does.
        statistic: whether it is one number per token and norm or head.
    """

    name: str
    nbytes: float
    needed: Literal["I", "W"]
    recompute: str | None = None
    statistic: bool = False


@dataclass(frozen=True)
class Kept:
    """Bytes that a part of a stage keeps of one microbatch.

    Args:
        saved: from F to I.
        after_input: from I to W: the inputs of linear layers, and the gradients of their outputs.
    """

    saved: float = 0.0
    after_input: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.saved + other.saved, self.after_input + other.after_input)

    def __mul__(self, factor: float) -> Kept:
        return Kept(self.saved * factor, self.after_input * factor)


def layer_tensors(model: Model, execution: Execution, experts: bool | None = None) -> tuple[Saved, ...]:
    """Return what one layer would keep if nothing were recomputed.

    Args:
        model: its shape.
        execution: how a microbatch of it runs on one rank.
        experts: whether the layer has experts; ``None`` says as the model's layers do.
    """
    experts = model.has_experts(0) if experts is None else experts
    n, e, tp = tokens(model, execution), execution.element, execution.tp
    between = n * model.hidden / execution.sequence_ranks  # what lies between tensor-parallel parts
    statistics = n / execution.sequence_ranks * _SUM * (2 if model.norm == "layernorm" else 1)
    heads = n * model.query_width / tp * e
    found = [
        Saved("input", between * e, "I"),
        Saved("input norm's statistics", statistics, "I", "layernorm", statistic=True),
        Saved("qkv projection's input", between * e, "W", "layernorm"),
        Saved("attention's output", heads, "W"),
        Saved("FFN norm's input", between * e, "I"),
        Saved("FFN norm's statistics", statistics, "I", "layernorm", statistic=True),
        Saved("FFN's input", between * e, "W", "layernorm"),
        *_attention_tensors(model, execution),
    ]
    if model.dropout:
        found.append(Saved("dropout's masks", 2 * between, "I", "activation"))
    return (
        *found,
        *(_expert_tensors(model, execution) if experts else _ffn_tensors(model, execution, model.ffn_width)),
    )


def _attention_tensors(model: Model, execution: Execution) -> Iterable[Saved]:
    """List the tensors of attention's core. Queries, keys and values are views of the projection's output, which any of
    them keeps whole.

    Where there are fewer key heads than tensor-parallel ranks, every rank gathers the output of all of them to find its own.
    """
    n, e, tp = tokens(model, execution), execution.element, execution.tp
    groups = groups_per_rank(model, execution)
    heads, keys = (n * count * model.channels * e for count in (model.heads / tp, groups))
    output = n * model.qkv_width * e / (1 if model.key_heads < tp else tp)
    rotated = model.position == "rope"
    if rotated:
        tables = 4 * n / execution.micro_batch * model.channels * e
        yield Saved("tables of rotations", tables, "I")
    if execution.attention == "unfused":
        scores = n * model.sequence * model.heads / tp
        yield Saved("softmax's output", scores * _SUM, "I", "core_attn")
        if e != _SUM:
            yield Saved("softmax's output, rounded", scores * e, "I", "core_attn")
        yield Saved("causal mask", model.sequence**2, "I", "core_attn")  # a layer's own, but where the batch brings one
        if model.dropout:
            yield Saved("attention's dropout", scores * (1 + e), "I", "core_attn")
        if model.heads / tp > groups and not execution.recomputes("core_attn"):
            yield Saved("repeated keys and values", 2 * heads, "I")
            # Of a single group they are a view of the projection's output.
            views = groups == 1 and not rotated
            yield Saved("queries", output if views else heads, "I")
            return
    else:
        yield Saved("softmax's sums", n * model.heads / tp * _SUM, "I", "core_attn", statistic=True)
    yield Saved("queries, keys and values", output, "I")
    if rotated:
        yield Saved("rotated queries and keys", heads + keys, "I")
    elif model.heads / tp > groups > 1:  # of a single group they are a view
        yield Saved("queries of all groups", heads, "I")


def _ffn_tensors(model: Model, execution: Execution, width: int) -> Iterable[Saved]:
    inner = tokens(model, execution) * width / execution.tp * execution.element
    yield Saved("activation's input", inner * (model.projections - 1), "I", "mlp")
    yield Saved("second projection's input", inner, "W", "activation")
    if model.gated and not execution.fused:
        yield Saved("gate", 2 * inner, "I", "mlp")


def _expert_tensors(model: Model, execution: Execution) -> Iterable[Saved]:
    """List the tensors of experts, taken as evenly used: every rank computes as many tokens as it sends away."""
    n, e = tokens(model, execution), execution.element
    visits = n * model.experts_per_token
    inner = visits * model.expert_width / execution.tp * e
    yield Saved("router's weights", 2 * n * model.experts * _SUM, "I")
    yield Saved("experts' inputs", visits * model.hidden / execution.sequence_ranks * e, "W")
    yield Saved("experts' activation's input", inner * (model.projections - 1), "I", "mlp")
    yield Saved("experts' second projection's input", inner, "W", "activation")
    yield Saved("experts' outputs", visits * model.hidden / execution.sequence_ranks * e, "I")
    if model.shared_expert_ffn:
        yield from _ffn_tensors(model, execution, model.shared_expert_ffn)


def layer_bytes(model: Model, execution: Execution, experts: bool | None = None) -> Kept:
    """Return the bytes that one layer keeps, recomputation considered.

    Args:
        model: its shape.
        execution: how a microbatch of it runs on one rank.
        experts: whether the layer has experts; ``None`` says as the model's layers do.
    """
    experts = model.has_experts(0) if experts is None else experts
    tensors = layer_tensors(model, execution, experts)
    after_input = sum(each.nbytes for each in tensors if each.needed == "W")
    after_input += _gradient_bytes(model, execution, experts) + gathered_bytes(model, execution, experts)
    return Kept(sum(each.nbytes for each in _kept(tensors, execution)), after_input)


def moved_bytes(model: Model, execution: Execution, experts: bool | None = None) -> float:
    """Return the bytes that offloading one layer moves each way: all it keeps but statistics and sums, which are few
    and stay.

    Args:
        model: its shape.
        execution: how a microbatch of it runs on one rank.
        experts: whether the layer has experts; ``None`` says as the model's layers do.
    """
    return sum(each.nbytes for each in _kept(layer_tensors(model, execution, experts), execution) if not each.statistic)


def _kept(tensors: Sequence[Saved], execution: Execution) -> list[Saved]:
    if execution.recompute == "full":
        return [each for each in tensors if each.name == "input"]
    modules = set(execution.recompute_modules) if execution.recompute == "selective" else set()
    if "mlp" in modules:
        modules.add("activation")
    return [each for each in tensors if each.recompute not in modules]


def head_bytes(model: Model, execution: Execution) -> Kept:
    """Return the bytes that final norm, output layer and loss keep: above all the exponentials of the logits, in fp32."""
    n = tokens(model, execution)
    between = n * model.hidden / execution.sequence_ranks * execution.element
    statistics = n / execution.sequence_ranks * _SUM * (2 if model.norm == "layernorm" else 1)
    logits = n * padded_vocabulary(model, execution.tp) / execution.tp
    return Kept(2 * between + statistics + logits * _SUM, between + logits * execution.element)


def embedding_bytes(model: Model, execution: Execution) -> Kept:
    """Return the bytes that the embedding keeps: its output is its first layer's input, so only a dropout's mask."""
    mask = tokens(model, execution) * model.hidden / execution.sequence_ranks if model.dropout else 0.0
    return Kept(mask, 0.0)


def message_bytes(model: Model, execution: Execution) -> float:
    """Return the bytes of one microbatch's activations between two stages, as of their gradients."""
    return tokens(model, execution) * model.hidden / execution.sequence_ranks * execution.element


def _gradient_bytes(model: Model, execution: Execution, experts: bool) -> float:
    """Return gradients of the outputs of all linear layers, which wait with their inputs for W."""
    n, e, tp = tokens(model, execution), execution.element, execution.tp
    inner = (model.projections - 1) * (
        model.experts_per_token * model.expert_width + model.shared_expert_ffn if experts else model.ffn_width
    )
    outputs = model.experts_per_token if experts else 1
    # Sequence parallelism gathers the gradients of what it scatters, hence all of hidden.
    return e * n * ((model.qkv_width + inner) / tp + model.hidden * (1 + outputs))


def gathered_bytes(model: Model, execution: Execution, experts: bool | None = None) -> float:
    """Return by how much the inputs of one layer's linear layers grow in I, where they wait for W.

    With sequence parallelism a layer whose output is cut gets a part of the sequence and computes on all of it. Transformer
    Engine gathers the parts in I and keeps them so; Megatron's own layers, split by us, gather them again in W.

    Args:
        model: its shape.
        execution: how a microbatch of it runs on one rank.
        experts: whether the layer has experts; ``None`` says as the model's layers do.
    """
    if execution.implementation != "transformer_engine" or not execution.sequence_parallel:
        return 0.0
    experts = model.has_experts(0) if experts is None else experts
    layers = 1 + (model.shared_expert_ffn > 0 if experts else 1)  # experts get their tokens from a dispatcher
    whole = tokens(model, execution) * model.hidden * execution.element
    return layers * whole * (1 - 1 / execution.sequence_ranks)
