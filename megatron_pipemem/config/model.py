"""Describe the shape of a model and how a microbatch of it runs on one rank, and count parameters and FLOPs.

FLOPs of one linear layer with ``k`` inputs and ``n`` outputs are ``2 k n`` per token in each of F, I and W. Attention scores
and their product with the values take ``4 s^2`` per sequence and query channel in F, twice that in I and nothing in W. The
causal half is counted in full, as the papers and MFU do; norms, activations and softmax count nothing. For ``a`` heads of
``h/a`` channels and an FFN of ``4h`` a layer thus takes ``bsh(24h + 4s)`` in F, ``bsh(24h + 8s)`` in I and ``24bsh^2`` in W,
and the head ``2bshV`` in each (arXiv 2401.10241, arXiv 2411.05288).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar, Literal

from megatron_pipemem.config.limits import check_counts
from megatron_pipemem.errors import ConfigError

_VOCABULARY_MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by


_MOST_LAYERS = 100_000


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, as ``configs/models/NAME.yaml`` describes it.

    Args:
        layers: transformer layers.
        hidden: channels between layers.
        heads: attention heads.
        vocabulary: tokens, before padding.
        sequence: tokens per sequence in training.
        kv_heads: heads of keys and values (grouped-query attention); default ``heads``.
        head_channels: channels per head; default ``hidden / heads``.
        ffn: channels within the FFN; default ``4 hidden``.
        activation: of the FFN; ``swiglu`` and ``geglu`` have a second input projection as a gate.
        norm: kind of all norms.
        position: learned embeddings have parameters, rotary ones none.
        bias: whether linear layers have one; ``qkv_only`` for just the attention's input projection.
        tied: whether head and embedding are one matrix.
        dropout: of attention and hidden states; above 0 its masks are kept for the backward.
        experts: experts of a mixture-of-experts layer; 0 for a dense model.
        experts_per_token: how many of them every token visits.
        expert_ffn: channels within one expert; default ``ffn``.
        shared_expert_ffn: channels of an expert that all tokens visit, 0 for none.
        moe_every: every how many layers one has experts, counted from the first.
        source: where the shape is from.
    """

    config_folder: ClassVar[str] = "models"

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int | None = None
    head_channels: int | None = None
    ffn: int | None = None
    activation: Literal["gelu", "squared_relu", "swiglu", "geglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope", "none"] = "learned"
    bias: Literal["all", "qkv_only", "none"] = "all"
    tied: bool = False
    dropout: float = 0.0
    experts: int = 0
    experts_per_token: int = 1
    expert_ffn: int | None = None
    shared_expert_ffn: int = 0
    moe_every: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        positive = ("layers", "hidden", "heads", "vocabulary", "sequence", "experts_per_token", "moe_every")
        optional = ("kv_heads", "head_channels", "ffn", "expert_ffn")
        check_counts(self, (*positive, *(key for key in optional if getattr(self, key) is not None)))
        check_counts(self, ("layers",), most=_MOST_LAYERS)
        check_counts(self, ("experts", "shared_expert_ffn"), least=0)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"is {self.dropout}; give a rate of at least 0 and below 1", key="dropout")
        if self.head_channels is None and self.hidden % self.heads:
            raise ConfigError(f"{self.heads} heads do not divide hidden {self.hidden}; give head_channels", key="heads")
        if self.heads % self.key_heads:
            raise ConfigError(f"{self.key_heads} kv_heads do not divide {self.heads} heads", key="kv_heads")
        if self.experts and self.experts_per_token > self.experts:
            raise ConfigError(f"is {self.experts_per_token}, of {self.experts} experts", key="experts_per_token")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def channels(self) -> int:
        """Per head."""
        return self.head_channels or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Channels of all query heads, and of what attention returns."""
        return self.heads * self.channels

    @property
    def qkv_width(self) -> int:
        """Channels of queries, keys and values together."""
        return (self.heads + 2 * self.key_heads) * self.channels

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        return self.expert_ffn or self.ffn_width

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def projections(self) -> int:
        """Matrices of an FFN."""
        return 3 if self.gated else 2

    def has_experts(self, layer: int) -> bool:
        """Return whether layer ``layer``, counted from 0, is a mixture of experts."""
        return self.experts > 0 and layer % self.moe_every == 0

    @property
    def expert_layers(self) -> int:
        """Return how many layers are mixtures of experts."""
        return sum(map(self.has_experts, range(self.layers)))


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Execution:
    """Describe how a microbatch runs on one rank: the part of Megatron's flags that its costs depend on.

    Args:
        micro_batch: sequences per microbatch.
        tp: tensor-parallel ranks.
        sequence_parallel: whether norms and dropout are split over the tensor-parallel ranks too.
        cp: context-parallel ranks, which share every sequence.
        ep: expert-parallel ranks.
        recompute: ``selective`` recomputes ``recompute_modules`` in the backward, ``full`` whole layers.
        recompute_modules: what ``selective`` recomputes: ``core_attn`` (all of attention between its projections),
            ``layernorm``, ``mlp``, ``activation`` (of the FFN, with dropout's masks; Megatron has no such module).
        attention: ``flash`` never keeps the scores, ``unfused`` keeps them as Megatron's local implementation does.
        precision: of parameters and activations.
        fused: whether biases, activations and dropout run in Megatron's fused forms, as they do by default.
        implementation: whose linear layers and norms; they differ in what waits for W.
    """

    micro_batch: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    attention: Literal["flash", "unfused"] = "flash"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fused: bool = True
    implementation: Literal["local", "transformer_engine"] = "local"

    def __post_init__(self) -> None:
        check_counts(self, ("micro_batch", "tp", "cp", "ep"))
        unknown = set(self.recompute_modules) - set(RECOMPUTABLE)
        if unknown:
            raise ConfigError(
                f"has {sorted(unknown)[0]!r}; known are {', '.join(RECOMPUTABLE)}", key="recompute_modules"
            )
        if self.sequence_parallel and self.tp == 1:
            object.__setattr__(self, "sequence_parallel", False)  # Megatron drops it too

    @property
    def element(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.precision == "fp32" else 2

    @property
    def sequence_ranks(self) -> int:
        """Over how many tensor-parallel ranks what lies between layers is split."""
        return self.tp if self.sequence_parallel else 1

    def recomputes(self, module: str) -> bool:
        return self.recompute == "selective" and module in self.recompute_modules

    def check(self, model: Model) -> None:
        """Refuse what Megatron cannot cut.

        Raises:
            ConfigError: a count of ranks does not divide what it shares.
        """
        shares = [
            ("tp", self.tp, "heads", model.heads),
            ("tp", self.tp, "channels of the FFN", model.ffn_width),
            ("cp", 2 * self.cp if self.cp > 1 else 1, "tokens of the sequence (in two parts per rank)", model.sequence),
        ]
        if model.key_heads % self.tp and self.tp % model.key_heads:
            shares.append(("tp", self.tp, "kv_heads", model.key_heads))
        if self.sequence_parallel:
            shares.append(("tp", self.tp * self.cp, "tokens of the sequence (sequence_parallel)", model.sequence))
        if self.ep > 1:
            shares.append(("ep", self.ep, "experts", model.experts))
        for key, ranks, what, count in shares:
            if count % ranks:
                raise ConfigError(f"{ranks} does not divide {count} {what}", key=key)
        if self.ep > 1 and not model.experts:
            raise ConfigError(f"is {self.ep}, but the model has no experts", key="ep")


RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "activation")
"""What ``recompute: selective`` can name."""


@dataclass(frozen=True)
class Passes:
    """Hold one number per pass: seconds, FLOPs or bytes of F, I and W.

    Args:
        forward: of F.
        input: of I, the input gradient.
        weight: of W, the weight gradient.
    """

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.input + other.input, self.weight + other.weight)

    def __mul__(self, factor: float) -> Passes:
        return Passes(self.forward * factor, self.input * factor, self.weight * factor)


def padded_vocabulary(model: Model, tp: int) -> int:
    """Return the rows of the embedding as Megatron pads them."""
    multiple = _VOCABULARY_MULTIPLE * tp
    return ceil(model.vocabulary / multiple) * multiple


def groups_per_rank(model: Model, execution: Execution) -> int:
    """Return the key heads that a tensor-parallel rank attends with. Where they are fewer than ranks, several ranks
    share one.
    """
    return max(1, model.key_heads // execution.tp)


def tokens(model: Model, execution: Execution) -> float:
    """Return the tokens of a microbatch on one context-parallel rank."""
    return execution.micro_batch * model.sequence / execution.cp


def layer_flops(model: Model, execution: Execution, experts: bool | None = None) -> Passes:
    """Return the FLOPs of one layer, one microbatch and one rank. Recomputation is included: it belongs to I.

    Args:
        model: the shape.
        execution: how it runs.
        experts: whether the layer is a mixture of experts; by default as the model's first layer.
    """
    experts = model.has_experts(0) if experts is None else experts
    attention = model.hidden * model.qkv_width + model.query_width * model.hidden
    ffn = 2 * tokens(model, execution) * _ffn_weights_visited(model, execution, experts)
    linear = 2 * tokens(model, execution) * attention / execution.tp + ffn
    core = 4 * tokens(model, execution) * model.sequence * model.query_width / execution.tp
    flops = Passes(linear + core, linear + 2 * core, linear)
    if execution.recompute == "full":
        again = flops.forward
    else:
        again = core * execution.recomputes("core_attn") + ffn * execution.recomputes("mlp")
    return replace(flops, input=flops.input + again)


def head_flops(model: Model, execution: Execution) -> Passes:
    """Return the FLOPs of the output layer, one microbatch and one rank."""
    product = 2 * tokens(model, execution) * model.hidden * padded_vocabulary(model, execution.tp) / execution.tp
    return Passes(product, product, product)


def model_flops(model: Model) -> float:
    """Return the FLOPs of one whole sequence, forward and backward, nothing recomputed: what MFU counts."""
    one = Execution()
    dense, expert = layer_flops(model, one, False).total, layer_flops(model, one, True).total
    head = 6 * model.sequence * model.hidden * model.vocabulary
    return (model.layers - model.expert_layers) * dense + (model.expert_layers and model.expert_layers * expert) + head


def layer_parameters(model: Model, execution: Execution, experts: bool | None = None) -> int:
    """Return the number of parameters of one layer on one rank.

    Args:
        model: its shape.
        execution: how it is cut over ranks.
        experts: whether the layer has experts; ``None`` says as the model's layers do.
    """
    experts = model.has_experts(0) if experts is None else experts
    per_norm = model.hidden * (2 if model.norm == "layernorm" else 1)
    qkv_bias = model.qkv_width if model.bias != "none" else 0
    all_biases = model.bias == "all"
    split = model.hidden * model.qkv_width + qkv_bias + model.query_width * model.hidden
    whole = 2 * per_norm + (model.hidden if all_biases else 0)

    def ffn(width: int) -> tuple[int, int]:
        into = (model.projections - 1) * width
        return into * model.hidden + width * model.hidden + (into if all_biases else 0), model.hidden * all_biases

    if not experts:
        inner, outer = ffn(model.ffn_width)
        return (split + inner) // execution.tp + whole + outer
    inner, outer = ffn(model.expert_width)
    count = (split + ffn(model.shared_expert_ffn)[0] * bool(model.shared_expert_ffn)) // execution.tp + whole
    return count + (inner // execution.tp + outer) * model.experts // execution.ep + model.hidden * model.experts


def embedding_parameters(model: Model, execution: Execution) -> int:
    """Return the number of parameters of the input embedding on one rank, learned positions included."""
    rows = padded_vocabulary(model, execution.tp) // execution.tp
    return model.hidden * (rows + (model.sequence if model.position == "learned" else 0))


def head_parameters(model: Model, execution: Execution) -> int:
    """Return the number of parameters of final norm and output layer on one rank. A tied head far from its embedding
    has a copy of it, which is counted too.
    """
    rows = padded_vocabulary(model, execution.tp) // execution.tp
    return model.hidden * (rows + (2 if model.norm == "layernorm" else 1))


def _ffn_weights_visited(model: Model, execution: Execution, experts: bool) -> float:
    """Return the number of weights of the FFN that one token meets on one rank; experts are taken as evenly used."""
    if not experts:
        return model.projections * model.hidden * model.ffn_width / execution.tp
    visited = model.experts_per_token * model.expert_width + model.shared_expert_ffn
    return model.projections * model.hidden * visited / execution.tp + model.hidden * model.experts
