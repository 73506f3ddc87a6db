"""Describe the shape of a model and how a microbatch of it runs on one rank.

A layer is a sequence of blocks, written with Megatron's symbols of hybrid models: a GPT layer is attention and an FFN, ``*-``,
or attention and experts, ``*E``; a layer of a hybrid model is one block. This text is the layer's *kind*, and everything that
prices layers asks for it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import ceil
from typing import Annotated, ClassVar, Literal, Self, get_args

from megatron_pipemem.config.values import Amount, Count, CountOrZero, Limit, Limited
from megatron_pipemem.errors import ConfigError

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields of latent attention, which Megatron calls as a model does."""
_VOCABULARY_MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by


class Sublayer(StrEnum):
    """Name what a layer is made of, by Megatron's symbols of hybrid models (MERGE is ours)."""

    ATTENTION = "*"
    LATENT_ATTENTION = "+"
    FFN = "-"
    EXPERTS = "E"
    MAMBA = "M"
    MERGE = "m"
    """Joins hidden states and the next token's embedding at the beginning of a multi-token prediction layer."""


@dataclass(frozen=True)
class Model(Limited):
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
        shared_expert_ffn: channels of the experts together that all tokens visit, 0 for none.
        moe_every: every how many layers one has experts, counted from the first.
        dense_layers: how many layers at the beginning have none.
        router_score: by which function of its logits the router chooses.
        router_bias: whether it corrects its choice by a bias per expert, which balances them.
        router_groups: groups of experts, 0 for none, of which every token visits ``router_groups_per_token``.
        router_groups_per_token: of them.
        router_scale: factor of the chosen experts' weights.
        qk_norm: whether queries and keys have norms; with latent attention, the latents.
        kv_lora_rank: channels of the latent of keys and values (multi-head latent attention); ``None`` for plain attention.
        q_lora_rank: channels of the queries' latent; ``None`` where they have none.
        qk_head_dim: channels of a latent head's queries and keys, beside those with positions.
        qk_pos_emb_head_dim: those with positions.
        v_head_dim: channels of a latent head's values.
        mtp_layers: layers that predict tokens further ahead (multi-token prediction), which stand before the head.
        pattern: the layers of a hybrid model, one symbol each; ``None`` for a GPT.
        mtp_pattern: likewise of one layer of its multi-token prediction.
        mamba_state: channels of the state of a Mamba block.
        mamba_heads: its heads; default as many as fill ``2 hidden``.
        mamba_head_dim: channels per head.
        mamba_groups: groups of heads with the same inputs to the state.
        mamba_convolution: tokens that its convolution sees.
        source: where the shape is from.
    """

    config_folder: ClassVar[str] = "models"

    layers: Annotated[int, Limit(1, 100_000)]
    hidden: Count
    heads: Count
    vocabulary: Count
    sequence: Count
    kv_heads: Count | None = None
    head_channels: Count | None = None
    ffn: Count | None = None
    activation: Literal["gelu", "squared_relu", "swiglu", "geglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope", "none"] = "learned"
    bias: Literal["all", "qkv_only", "none"] = "all"
    tied: bool = False
    dropout: float = 0.0
    experts: CountOrZero = 0
    experts_per_token: Count = 1
    expert_ffn: Count | None = None
    shared_expert_ffn: CountOrZero = 0
    moe_every: Count = 1
    dense_layers: CountOrZero = 0
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    router_groups: CountOrZero = 0
    router_groups_per_token: CountOrZero = 0
    router_scale: float = 1.0
    qk_norm: bool = False
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_head_dim: Count = 128
    qk_pos_emb_head_dim: Count = 64
    v_head_dim: Count = 128
    mtp_layers: CountOrZero = 0
    pattern: str | None = None
    mtp_pattern: str | None = None
    mamba_state: Count = 128
    mamba_heads: Count | None = None
    mamba_head_dim: Count = 64
    mamba_groups: Count = 8
    mamba_convolution: Count = 4
    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ConfigError("bad-number", f"is {self.dropout}; give a rate of at least 0 and below 1", key="dropout")
        if self.head_channels is None and self.hidden % self.heads:
            raise ConfigError(
                "does-not-divide",
                f"{self.heads} heads do not divide hidden {self.hidden}; give head_channels",
                key="heads",
            )
        if self.heads % self.key_heads:
            raise ConfigError(
                "does-not-divide", f"{self.key_heads} kv_heads do not divide {self.heads} heads", key="kv_heads"
            )
        if self.experts and self.experts_per_token > self.experts:
            raise ConfigError(
                "bad-number", f"is {self.experts_per_token}, of {self.experts} experts", key="experts_per_token"
            )
        self._check_patterns()

    def _check_patterns(self) -> None:
        allowed = [block.value for block in Sublayer if block is not Sublayer.MERGE]
        for key in ("pattern", "mtp_pattern"):
            unknown = set(getattr(self, key) or "") - set(allowed)
            if unknown:
                raise ConfigError(
                    "bad-syntax", f"has {min(unknown)!r}; write one of {' '.join(allowed)} per layer", key=key
                )
        if self.pattern is not None and len(self.pattern) != self.layers:
            raise ConfigError(
                "bad-syntax",
                f"has {len(self.pattern)} symbols for {self.layers} layers; write one each",
                key="pattern",
            )
        if self.pattern is not None and bool(self.mtp_pattern) != bool(self.mtp_layers):
            raise ConfigError("needs-option", "goes with mtp_layers; give both or neither", key="mtp_pattern")
        blocks = {block for kind in self.all_kinds for block in kind}
        if Sublayer.LATENT_ATTENTION in blocks and self.kv_lora_rank is None:
            raise ConfigError("needs-option", "is needed by the pattern's latent attention, +", key="kv_lora_rank")
        if Sublayer.EXPERTS in blocks and not self.experts:
            raise ConfigError("needs-option", "is needed by the pattern's experts, E", key="experts")

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

    @property
    def fuses_experts(self) -> bool:
        """Whether Megatron has a fused activation for the experts: for gated ones it has none with biases."""
        return not (self.gated and self.bias == "all")

    @property
    def latent_query_channels(self) -> int:
        """Per head of latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def scan_heads(self) -> int:
        """Heads of a Mamba block."""
        return self.mamba_heads or 2 * self.hidden // self.mamba_head_dim

    @property
    def mamba_width(self) -> int:
        """Channels of all heads of a Mamba block."""
        return self.mamba_head_dim * self.scan_heads

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The blocks of every layer, in order; without those of multi-token prediction."""
        if self.pattern is not None:
            return tuple(self.pattern)
        attention = Sublayer.ATTENTION if self.kv_lora_rank is None else Sublayer.LATENT_ATTENTION
        dense, expert = attention + Sublayer.FFN, attention + Sublayer.EXPERTS
        return tuple(
            expert if self.experts and layer >= self.dense_layers and layer % self.moe_every == 0 else dense
            for layer in range(self.layers)
        )

    @cached_property
    def all_kinds(self) -> tuple[str, ...]:
        """The blocks of every layer, multi-token prediction's behind the others."""
        own = self.mtp_pattern if self.pattern is not None else self.kinds[-1]
        return self.kinds + (f"{Sublayer.MERGE}{own}",) * self.mtp_layers

    @property
    def pieces(self) -> int:
        """How many pieces stages share: the layers and, in a GPT, multi-token prediction as one more behind them."""
        return self.layers + (self.mtp_layers > 0 and self.pattern is None)

    @property
    def main_kind(self) -> str:
        """The kind of most layers."""
        return max(dict.fromkeys(self.kinds), key=self.kinds.count)

    @property
    def heads_of_output(self) -> int:
        """How many predictions the output layer makes for every token."""
        return 1 + self.mtp_layers


Recompute = Literal["none", "selective", "full"]
Recomputable = Literal["core_attn", "layernorm", "mlp", "activation", "mla_up_proj", "moe", "moe_act", "shared_experts"]
"""What ``recompute: selective`` can name."""

Fp8 = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]
"""Recipes of 8-bit matrix products."""
_SCALES = {"blockwise": 4 / 128, "mxfp8": 1 / 32}
"""Bytes per element of a quantised tensor's scales, of recipes with scales of blocks."""


@dataclass(frozen=True)
class Execution(Limited):
    """Describe how a microbatch runs on one rank: the flags that its costs depend on.

    Args:
        micro_batch: sequences per microbatch.
        tp: tensor-parallel ranks.
        sequence_parallel: whether norms and dropout are split over the tensor-parallel ranks too.
        cp: context-parallel ranks, which share every sequence.
        ep: expert-parallel ranks.
        recompute: ``selective`` recomputes ``recompute_modules`` in the backward, ``full`` whole layers.
        recompute_modules: what ``selective`` recomputes: ``core_attn`` (all of attention between its projections),
            ``layernorm``, ``mlp`` (of dense layers), ``activation`` (of the FFN, with dropout's masks; no module of Megatron),
            ``mla_up_proj`` (latent attention from its latents to its core), ``moe`` (router, all experts), ``moe_act`` (the
            experts' activation), ``shared_experts``.
        attention: ``flash`` never keeps the scores, ``unfused`` keeps them as Megatron's local implementation does.
        precision: of parameters and activations.
        fp8: the recipe by which the layers' linear layers multiply 8-bit numbers; attention and the head do not.
        fused: whether biases, activations and dropout run in Megatron's fused forms, as they do by default.
        implementation: whose linear layers and norms.
        expert_load: tokens that the experts of a rank get at most, over an even share: above 1 for uneven routing.
        tp_overlap: whether tensor-parallel messages run beside the matrix products that make or take them.
        ep_overlap: whether tokens go to experts and back while another microbatch computes.
        weight_inputs: what waits for W of tensors that sequence parallelism gathers.
        early_weights: modules whose weight gradients are computed in I, see ``options.early_weights``.
    """

    micro_batch: Count = 1
    tp: Count = 1
    sequence_parallel: bool = False
    cp: Count = 1
    ep: Count = 1
    recompute: Recompute = "none"
    recompute_modules: tuple[Recomputable, ...] = ("core_attn",)
    attention: Literal["flash", "unfused"] = "flash"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp8: Fp8 = "none"
    fused: bool = True
    implementation: Literal["local", "transformer_engine"] = "local"
    expert_load: Amount = 1.0
    tp_overlap: bool = False
    ep_overlap: bool = False
    weight_inputs: Literal["sharded", "gathered"] = "sharded"
    early_weights: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_parallel and self.tp == 1:
            object.__setattr__(self, "sequence_parallel", False)  # Megatron drops it too

    @property
    def element(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.precision == "fp32" else 2

    @property
    def product_element(self) -> float:
        """Bytes of an element that a linear layer multiplies, with its share of the scales: what waits for W."""
        return self.element if self.fp8 == "none" else 1 + _SCALES.get(self.fp8, 0.0)

    @property
    def sequence_ranks(self) -> int:
        """Over how many tensor-parallel ranks what lies between layers is split."""
        return self.tp if self.sequence_parallel else 1

    def tokens(self, model: Model) -> float:
        """Return the tokens of a microbatch on one context-parallel rank."""
        return self.micro_batch * model.sequence / self.cp

    def vocabulary_rows(self, model: Model) -> int:
        """Return the rows of the embedding on one tensor-parallel rank, padded as Megatron does."""
        return ceil(model.vocabulary / (_VOCABULARY_MULTIPLE * self.tp)) * _VOCABULARY_MULTIPLE

    def key_groups(self, model: Model) -> int:
        """Return the key heads that a tensor-parallel rank attends with. Several ranks share one if there are too few."""
        return max(1, model.key_heads // self.tp)

    def expert_visits(self, model: Model) -> float:
        """Return how many experts of a rank a token of the rank meets: as many as it visits, where all are used evenly."""
        return model.experts_per_token * self.expert_load

    def recomputes(self, *modules: str) -> bool:
        """Return whether one of these modules is recomputed selectively."""
        return self.recompute == "selective" and not set(modules).isdisjoint(self.recompute_modules)

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
                raise ConfigError("does-not-divide", f"{ranks} does not divide {count} {what}", key=key)
        if model.experts and self.tp > 1 and not self.sequence_parallel:
            raise ConfigError(
                "needs-option", "is needed where tensor-parallel ranks share experts", key="sequence_parallel"
            )
        if self.fp8 not in get_args(Fp8):
            raise ConfigError("bad-choice", f"is {self.fp8!r}; give one of {', '.join(get_args(Fp8))}", key="fp8")
        if self.fp8 != "none" and (self.precision == "fp32" or self.implementation == "local"):
            raise ConfigError("needs-option", "needs Transformer Engine's layers and 16-bit activations", key="fp8")
        if self.recomputes("mla_up_proj") and model.kv_lora_rank is None:
            raise ConfigError(
                "needs-option", "has mla_up_proj, and the model has no latent attention", key="recompute_modules"
            )
        if self.ep > 1 and not model.experts:
            raise ConfigError("needs-option", f"is {self.ep}, but the model has no experts", key="ep")


class Summed:
    """Add dataclasses up and multiply them, field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(each * factor for each in vars(self).values()))


@dataclass(frozen=True)
class Passes(Summed):
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
