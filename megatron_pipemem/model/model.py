"""Describe the shape of a model, and the settings that decide the costs of a microbatch on one rank.

A layer is a sequence of blocks, written with Megatron's symbols for hybrid models. A GPT layer is attention and an FFN,
``*-``, or attention and experts, ``*E``. A layer of a hybrid model is one block. This text is the *kind* of the layer.
Layers of the same kind have the same costs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import ceil, inf
from typing import ClassVar, Literal, Self, get_args

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.values import (
    Amount,
    Count,
    CountOrZero,
    Layers,
    LayersOrZero,
    Limited,
    Part,
    refuse_if,
)

LATENT_ATTRIBUTES, DELTA_ATTRIBUTES, INDEXER_ATTRIBUTES = (
    {name: name for name in names}
    for names in (
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        (
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
            "linear_conv_kernel_dim",
        ),
        (
            *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq"),
            "dsa_indexer_skip_topk_offset",
        ),
    )
)
"""The sizes of latent attention, of gated delta nets, and of sparse attention: Megatron's attributes by fields of ``Model``."""
EXPERT_ATTRIBUTES = {
    "experts_per_token": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_expert_ffn": "moe_shared_expert_intermediate_size",
    "expert_latent": "moe_latent_size",
    "router_groups": "moe_router_num_groups",
    "router_groups_per_token": "moe_router_group_topk",
}
"""The sizes of experts, likewise."""
MAMBA_ATTRIBUTES = {
    "mamba_state": "mamba_state_dim",
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_groups": "mamba_num_groups",
}
"""The sizes of Mamba blocks, likewise."""
SIZE_ATTRIBUTES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "head_channels": "kv_channels",
    "ffn": "ffn_hidden_size",
    "experts": "num_experts",
    **EXPERT_ATTRIBUTES,
    **MAMBA_ATTRIBUTES,
    **LATENT_ATTRIBUTES,
    **DELTA_ATTRIBUTES,
    **INDEXER_ATTRIBUTES,
}
"""Megatron's arguments by the fields of ``Model`` for the sizes of layers."""
_VOCABULARY_MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by


class Sublayer(StrEnum):
    """The blocks of layers, with Megatron's symbols for hybrid models. Small letters are symbols of this package."""

    ATTENTION = "*"
    LATENT_ATTENTION = "+"
    SPARSE_ATTENTION = "D"
    """Latent attention of each token to the tokens that an indexer chooses."""
    REUSED_INDEX = "d"
    """Sparse attention to the tokens that the indexer of an earlier layer has chosen."""
    DELTA_NET = "G"
    """A gated delta net: linear attention with a state per head."""
    FFN = "-"
    EXPERTS = "E"
    MAMBA = "M"
    MERGE = "m"
    """The projection, at the start of a multi-token prediction layer, that joins hidden states and the next embedding."""


PATTERN_ITEM = re.compile(r"\[[^\[\]]*\]|.")
"""A layer or a group of layers (``[*E]``), between which a hybrid pattern can be cut."""


def kind_name(kind: str) -> str:
    """Return the blocks of a kind of layer in words: ``*-`` gives ``attention + FFN``."""
    blocks = map(Sublayer, kind)
    return " + ".join("FFN" if block is Sublayer.FFN else block.name.lower().replace("_", " ") for block in blocks)


def without_groups(pattern: str) -> str:
    """Return a hybrid pattern without the brackets of its groups: ``M-[*E]`` gives ``M-*E``."""
    return pattern.replace("[", "").replace("]", "")


def grouped_layers(pattern: str) -> list[bool]:
    """Return, per layer of a hybrid pattern without ``|``, whether it shares brackets with the layer before it."""
    return [place > 0 for item in PATTERN_ITEM.findall(pattern) for place in range(len(without_groups(item)))]


@dataclass(frozen=True)
class Tower(Limited):
    """The vision encoder of a model, and the projection of its patches to tokens. Both are on the first stage.

    The patches of an image attend to one another.
    """

    layers: Count  # of the encoder
    hidden: Count
    heads: Count
    ffn: Count  # width inside the FFN
    patch: Count  # side of a patch in pixels
    kv_heads: Count | None = None  # default: heads
    images: Count = 1  # per sequence
    patches: Count = 1024  # per image
    merge: Count = 4  # patches of a token
    projection: CountOrZero | None = None  # width within the projection; default: of ``merge`` patches; 0: one matrix
    frames: Count = 1  # of a patch
    deepstack: CountOrZero = 0  # further projections, added to the output of as many first layers of the model
    gated: bool = False  # activation of the FFN
    shared: bool = False  # cut by tensor parallelism, as layers of Megatron; otherwise every rank has all of it

    def model(self) -> Model:
        """Return the encoder's layers as a model whose sequences are images."""
        return Model(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocabulary=1,
            sequence=self.patches,
            activation="swiglu" if self.gated else "gelu",
            position="rope",
        )

    @property
    def joined(self) -> int:
        """Input channels of the projection: of all patches of a token, or of one patch if a matrix projects their mean."""
        return self.hidden * (1 if self.projection == 0 else self.merge)


@dataclass(frozen=True)
class Model(Limited):
    """A decoder-only transformer, as in ``configs/models/NAME.yaml``. Widths are numbers of channels."""

    config_folder: ClassVar[str] = "models"

    layers: Layers
    hidden: Count
    heads: Count
    vocabulary: Count  # number of tokens in the vocabulary, before padding
    sequence: Count  # tokens per sequence in training
    kv_heads: Count | None = None  # grouped-query attention; default: heads
    head_channels: Count | None = None  # default: hidden / heads
    ffn: Count | None = None  # width inside the FFN; default: 4 times hidden
    activation: Literal["gelu", "squared_relu", "swiglu", "geglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope", "none"] = "learned"
    bias: Literal["all", "qkv_only", "none"] = "all"  # which linear layers have a bias
    tied: bool = False  # head and embedding are one matrix
    dropout: float = 0.0  # probability of dropout in attention and hidden states
    experts: CountOrZero = 0  # number of experts of a mixture-of-experts layer; 0 for a dense model
    experts_per_token: Count = 1
    expert_ffn: Count | None = None  # width of one expert; default: ffn
    shared_expert_ffn: CountOrZero = 0  # width of all shared experts together
    expert_latent: CountOrZero = 0  # width of the latent in which experts compute; 0 if they have the model's width
    moe_layer_freq: int | tuple[int, ...] = 1
    """Every n-th layer has experts, beginning with the first; or 1 for each layer with experts, and 0 for each without."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False  # a bias per expert balances the router's choice
    router_groups: CountOrZero = 0  # number of groups of experts; a token visits router_groups_per_token of them
    router_groups_per_token: CountOrZero = 0
    router_scale: float = 1.0  # factor of the weights of the chosen experts
    qk_norm: bool = False  # norms of queries and keys; in latent attention, norms of the latents
    kv_lora_rank: Count | None = None  # width of the latent of keys and values; None for plain attention
    q_lora_rank: Count | None = None  # width of the latent of queries; None for queries without a latent
    qk_head_dim: Count = 128  # channels of a head of latent attention without position
    qk_pos_emb_head_dim: Count = 64  # channels of a head of latent attention with position
    v_head_dim: Count = 128
    attention_gate: bool = False  # a gate per channel multiplies attention's output
    linear_attention_freq: int | tuple[int, ...] = 1
    """Every n-th layer has attention, and the layers before it have gated delta nets; or 1 for each layer with a gated delta
    net, and 0 for each with attention."""
    linear_num_key_heads: Count = 16  # of a gated delta net, for keys and for queries
    linear_num_value_heads: Count = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4  # width of the convolution in tokens
    dsa_indexer_n_heads: Count = 64
    dsa_indexer_head_dim: Count = 128
    dsa_indexer_topk: CountOrZero = 0  # number of tokens that a token attends to; 0 for all
    dsa_indexer_topk_freq: Count = 1  # number of layers that share an index
    dsa_indexer_skip_topk_offset: CountOrZero = 0  # layers at the beginning of the model with an index of their own
    mtp_layers: LayersOrZero = 0  # number of layers for multi-token prediction
    pattern: str | None = None  # layers of a hybrid model, one symbol each, with groups (``[*E]``); None for a GPT
    mtp_pattern: str | None = None  # blocks of a hybrid model's layer for multi-token prediction
    mamba_state: Count = 128
    mamba_heads: Count | None = None  # default: as many as fill 2 times hidden
    mamba_head_dim: Count = 64
    mamba_groups: Count = 8  # number of groups; the heads of a group share the inputs to the state
    mamba_convolution: Count = 4  # width of the convolution in tokens
    tower: Tower | None = None  # vision encoder
    source: str = ""  # where the shape comes from

    def __post_init__(self) -> None:
        super().__post_init__()
        rate, width = self.dropout, self.head_channels
        refuse_if(not 0 <= rate < 1, "bad-number", "dropout", f"is {rate}; give a rate of at least 0 and below 1")
        divides = f"is {self.heads} and does not divide hidden_size {self.hidden}; give kv_channels"
        refuse_if(width is None and self.hidden % self.heads, "does-not-divide", "heads", divides)
        groups = f"is {self.key_heads} and does not divide {self.heads} attention heads; change one of the two"
        refuse_if(self.heads % self.key_heads, "does-not-divide", "kv_heads", groups)
        for key in ("moe_layer_freq", "linear_attention_freq"):
            frequency = getattr(self, key)
            entries = self.layers if isinstance(frequency, int) else len(frequency)
            uneven = f"has {entries} entries for {self.layers} layers; write one each"
            refuse_if(entries != self.layers, "bad-syntax", key, uneven)
            is_number = isinstance(frequency, int)
            refuse_if(
                is_number and frequency < 1,
                "bad-number",
                key,
                f"is {frequency}; give at least 1, or one entry per layer",
            )
        visits = f"is {self.experts_per_token}, and the model has {self.experts} experts; give at most that number"
        refuse_if(0 < self.experts < self.experts_per_token, "bad-number", "experts_per_token", visits)
        deep = f"adds to the model's first {self.least_first} layers, and the model has {self.layers}; give a smaller number"
        refuse_if(self.least_first > self.layers, "bad-number", "tower.deepstack", deep)
        self._check_patterns()

    def _check_patterns(self) -> None:
        allowed = " ".join(block for block in Sublayer if not block.islower())
        for key in ("pattern", "mtp_pattern"):
            text = getattr(self, key) or ""
            for symbol in sorted(set(text) - {*allowed.split(), *"[]"}):
                raise ConfigError("bad-syntax", f"has {shortened(symbol)}; write one of {allowed} per layer", key=key)
            open_groups = "has a bracket without the other one; write a group of layers like [*E]"
            refuse_if(any(item in "[]" for item in PATTERN_ITEM.findall(text)), "bad-syntax", key, open_groups)
        if self.pattern is not None:
            count = f"has {len(self.kinds)} symbols for {self.layers} layers; write one each"
            refuse_if(len(self.kinds) != self.layers, "bad-syntax", "pattern", count)
            both = "goes with mtp_layers; give both or neither"
            refuse_if(bool(self.mtp_pattern) != bool(self.mtp_layers), "needs-option", "mtp_pattern", both)
        blocks = "".join(self.all_kinds)
        latent = bool({"+", "D"} & {*blocks}) and self.kv_lora_rank is None
        refuse_if(
            latent, "needs-option", "kv_lora_rank", "is missing, and the pattern has latent attention, + or D; give it"
        )
        experts = Sublayer.EXPERTS in blocks and not self.experts
        refuse_if(experts, "needs-option", "experts", "is missing, and the pattern has experts, E; give their number")

    @property
    def least_first(self) -> int:
        """The least number of layers on the first stage: those to which the tower adds."""
        return self.tower.deepstack if self.tower is not None else 0

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def channels(self) -> int:
        """Channels of an attention head."""
        return self.head_channels or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Channels of all query heads together, which is also the width of attention's output."""
        return self.heads * self.channels

    @property
    def qkv_width(self) -> int:
        """Channels of all queries, keys and values of attention together."""
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
        """Number of weight matrices of an FFN."""
        return 3 if self.gated else 2

    @property
    def fuses_experts(self) -> bool:
        """Whether Megatron has a fused activation function for the experts. It has none for gated experts with
        biases.
        """
        return not (self.gated and self.bias == "all")

    @property
    def latent_query_channels(self) -> int:
        """Channels of a query head in latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Channels of all keys, and of all values, of a gated delta net."""
        return (
            self.linear_num_key_heads * self.linear_key_head_dim,
            self.linear_num_value_heads * self.linear_value_head_dim,
        )

    @property
    def expert_channels(self) -> int:
        """Channels of the inputs and outputs of experts."""
        return self.expert_latent or self.hidden

    @cached_property
    def tied_layers(self) -> frozenset[int]:
        """The layers, counted from 0, that must be on the stage of the layer before.

        They reuse an earlier layer's index, or are in one group with the layer before.
        """
        own, period = max(self.dsa_indexer_skip_topk_offset, 1), self.dsa_indexer_topk_freq
        reusing = {layer for layer in range(own, self.layers) if (layer + 1 - own) % period}
        return frozenset(reusing | {layer for layer, tied in enumerate(grouped_layers(self.pattern or "")) if tied})

    @property
    def scan_heads(self) -> int:
        """Number of heads of a Mamba block."""
        return self.mamba_heads or 2 * self.hidden // self.mamba_head_dim

    @property
    def mamba_width(self) -> int:
        """Channels of all heads of a Mamba block together."""
        return self.mamba_head_dim * self.scan_heads

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, such as ``*-``, in order. Multi-token prediction is not included."""
        if self.pattern is not None:
            return tuple(without_groups(self.pattern))
        return tuple(self._attention(layer) + self._ffn(layer) for layer in range(self.layers))

    def _ffn(self, layer: int) -> Sublayer:
        frequency = self.moe_layer_freq
        has_experts = layer % frequency == 0 if isinstance(frequency, int) else frequency[layer]
        return Sublayer.EXPERTS if self.experts and has_experts else Sublayer.FFN

    def _attention(self, layer: int) -> Sublayer:
        frequency = self.linear_attention_freq
        if (layer + 1) % frequency if isinstance(frequency, int) else frequency[layer]:
            return Sublayer.DELTA_NET
        if self.kv_lora_rank is None:
            return Sublayer.ATTENTION
        if not self.dsa_indexer_topk:
            return Sublayer.LATENT_ATTENTION
        return Sublayer.REUSED_INDEX if layer in self.tied_layers else Sublayer.SPARSE_ATTENTION

    @cached_property
    def all_kinds(self) -> tuple[str, ...]:
        """The kind of each layer, followed by the kinds of the layers for multi-token prediction."""
        own = self.kinds[-1] if self.pattern is None else without_groups(self.mtp_pattern or "")
        return self.kinds + (f"{Sublayer.MERGE}{own}",) * self.mtp_layers

    @property
    def pieces(self) -> int:
        """Number of pieces to divide among stages: the layers and, in a GPT, multi-token prediction as one more."""
        return self.layers + (self.mtp_layers > 0 and self.pattern is None)

    @property
    def main_kind(self) -> str:
        """The kind that most layers have."""
        return max(dict.fromkeys(self.kinds), key=self.kinds.count)

    @property
    def heads_of_output(self) -> int:
        """Number of tokens that the output layer predicts at each position."""
        return 1 + self.mtp_layers


Recompute = Literal["none", "selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
Recomputable = Literal["core_attn", "layernorm", "mlp", "activation", "mla_up_proj", "moe", "moe_act", "shared_experts"]
"""Modules that ``recompute: selective`` can name."""
BY_ACTION: tuple[Recomputable, ...] = ("core_attn", "layernorm", "activation")
"""The modules that ``--pipemem-recompute selective`` recomputes, if attention is unfused and norms are modules of their
own.
"""

Trainable = Literal["language", "tower", "projection"]
"""Parts of a model with a vision tower that a run may freeze."""

Fp8 = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]
"""Recipes of 8-bit matrix products."""
_SCALES = {"blockwise": 4 / 128, "mxfp8": 1 / 32}
"""Bytes of scales per element of a quantised tensor, for recipes with a scale per block."""


@dataclass(frozen=True)
class Execution(Limited):
    """The settings of a run that decide the costs of a microbatch on one rank."""

    micro_batch: Count = 1  # sequences per microbatch
    tp: Count = 1
    sequence_parallel: bool = False  # split norms and dropout over the tensor-parallel ranks too
    cp: Count = 1
    # whether context-parallel ranks gather keys and values before they attend, and form no ring that attention hides
    gathers_keys: bool = False
    ep: Count = 1  # ranks among which the experts of a layer are divided
    etp: Count | None = None  # tensor-parallel ranks over which an expert is cut; default: tp
    # during the backward: ``selective`` recomputes recompute_modules, ``full`` whole layers
    recompute: Recompute = "none"
    recompute_modules: tuple[Recomputable, ...] = ("core_attn",)
    """``core_attn`` is attention between its projections, ``mlp`` the FFN of dense layers, ``activation`` the FFN's with the
    masks of dropout (not a module of Megatron), ``mla_up_proj`` latent attention from the latents to the core, ``moe`` router
    and experts, and ``moe_act`` the activation of the experts."""
    recompute_method: RecomputeMethod = "uniform"
    """What ``full`` recomputes in each stage: ``uniform`` all layers, ``block`` the first ``recompute_num_layers``."""
    recompute_num_layers: Count = 1  # also, for ``uniform``, the layers of a unit, which keeps its input alone
    keeps_input: bool = True  # whether a layer that is recomputed keeps its input
    attention: Literal["flash", "unfused"] = "flash"  # unfused keeps the scores, as Megatron's local attention does
    fused_softmax: bool = (
        False  # whether a kernel computes the softmax of unfused attention, and keeps its output alone
    )
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp8: Fp8 = "none"  # recipe of the linear layers inside layers; attention and head use 16 bits
    fused: bool = True  # Megatron's default: biases, activations and dropout run in fused kernels
    implementation: Literal["local", "transformer_engine"] = "local"  # the implementation of linear layers and norms
    expert_load: Amount = 1.0  # tokens of the fullest rank's experts, as a multiple of even routing
    fused_rotations: bool | None = None  # whether kernels rotate queries and keys; default: with fused flash attention
    rotary_percent: Part = 1.0  # share of a head's channels that rotary embeddings rotate
    tp_overlap: bool = False  # tensor-parallel messages run during the matrix products that send or need them
    # the form in which inputs that sequence parallelism gathers are kept for W
    wgrad_inputs: Literal["sharded", "gathered"] = "sharded"
    early_wgrad: str = "auto"  # modules whose weight gradients are computed in I (see options.early_wgrad)
    frozen: tuple[Trainable, ...] = ()  # parts without gradients
    adapters: CountOrZero = (
        0  # rank of a low-rank adapter on each linear layer, whose own weights are frozen; 0 for none
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_parallel and self.tp == 1:
            object.__setattr__(self, "sequence_parallel", False)  # Megatron drops it too

    @property
    def element(self) -> int:
        """Bytes of one element of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def product_element(self) -> float:
        """Bytes per element of a linear layer's input or output gradient that is kept for W, with fp8 scales."""
        return self.element if self.fp8 == "none" else 1 + _SCALES.get(self.fp8, 0.0)

    @property
    def layers_have_weights(self) -> bool:
        """Whether layers have weights that the run trains, their own or those of adapters."""
        return self.adapters > 0 or "language" not in self.frozen

    @property
    def sequence_ranks(self) -> int:
        """Number of tensor-parallel ranks over which activations between layers are split."""
        return self.tp if self.sequence_parallel else 1

    @property
    def expert_tp(self) -> int:
        """Number of tensor-parallel ranks over which an expert is cut."""
        return self.etp or self.tp

    def expert_replicas(self, replicas: float) -> float:
        """Return the number of ranks with equal expert weights, if ``replicas`` ranks have equal other weights."""
        return replicas * self.tp / (self.expert_tp * self.ep)

    def tokens(self, model: Model) -> float:
        """Return the number of tokens of a microbatch on one context-parallel rank."""
        return self.micro_batch * model.sequence / self.cp

    def vocabulary_rows(self, model: Model) -> int:
        """Return the number of rows of the embedding on one tensor-parallel rank, padded as in Megatron."""
        return ceil(model.vocabulary / (_VOCABULARY_MULTIPLE * self.tp)) * _VOCABULARY_MULTIPLE

    def key_groups(self, model: Model) -> int:
        """Return the number of key heads on one tensor-parallel rank. It is 1 if there are fewer heads than ranks."""
        return max(1, model.key_heads // self.tp)

    def expert_visits(self, model: Model) -> float:
        """Return the number of token visits that the experts of one rank get, per token of a microbatch.

        A token visits several experts. Tokens of all tensor-parallel ranks count.
        """
        return model.experts_per_token * self.expert_load * self.expert_tp / self.tp

    def recomputes(self, *modules: str) -> bool:
        """Return whether selective recompute includes one of these modules."""
        return self.recompute == "selective" and not set(modules).isdisjoint(self.recompute_modules)

    def at(self, place: int) -> Self:
        """Return the settings of a stage's layer number ``place``, counted from 0, by Megatron's rule of recomputation."""
        if self.recompute != "full" or self.recompute_num_layers == 1 and self.recompute_method == "uniform":
            return self
        if self.recompute_method == "uniform":
            return replace(self, keeps_input=place % self.recompute_num_layers == 0)
        return self if place < self.recompute_num_layers else replace(self, recompute="none")

    @property
    def of_prediction(self) -> Self:
        """The settings of multi-token prediction, which ``block`` does not recompute."""
        is_block = self.recompute == "full" and self.recompute_method == "block"
        return replace(self, recompute="none") if is_block else self

    def check(self, model: Model) -> None:
        """Raise a ConfigError if Megatron cannot cut the model in this way, or has no layers for these settings."""
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
        if Sublayer.DELTA_NET in "".join(model.kinds):
            for heads in ("linear_num_key_heads", "linear_num_value_heads"):
                shares.append(("tp", self.tp * self.cp, f"{heads} (tp x cp)", getattr(model, heads)))
        if model.tower is not None and model.tower.shared:
            shares.append(("tp", self.tp, "heads of the vision tower", model.tower.heads))
        for key, ranks, shared, count in shares:
            refuse_if(count % ranks, "does-not-divide", key, f"{ranks} does not divide {count} {shared}")
        split = (model.experts or model.dsa_indexer_topk) and self.tp > 1 and not self.sequence_parallel
        needed = "must be true, because tensor-parallel ranks share experts or sparse attention"
        refuse_if(bool(split), "needs-option", "sequence_parallel", needed)
        recipes = get_args(Fp8)
        refuse_if(
            self.fp8 not in recipes, "bad-choice", "fp8", f"is {shortened(self.fp8)}; give one of {', '.join(recipes)}"
        )
        plain = self.precision == "fp32" or self.implementation == "local"
        layers = "needs implementation transformer_engine and a precision of 16 bits; set both, or leave fp8 out"
        refuse_if(self.fp8 != "none" and plain, "needs-option", "fp8", layers)
        projected = self.recomputes("mla_up_proj") and model.kv_lora_rank is None
        latent = "has mla_up_proj, and the model has no latent attention; leave it out"
        refuse_if(projected, "needs-option", "recompute_modules", latent)
        dense = f"is {self.ep}, but the model has no experts; give 1"
        refuse_if(self.ep > 1 and not model.experts, "needs-option", "ep", dense)


def attention_of(
    on_gpu: bool, backend: str, implementation: str, precision: str, fuses_softmax: bool
) -> tuple[Literal["flash", "unfused"], bool]:
    """Return whether attention keeps the scores, and whether a kernel computes their softmax: fields of ``Execution``.

    ``backend`` is the value of ``--attention-backend``. No kernel of flash attention computes in fp32.
    """
    is_unfused = not on_gpu or backend in ("unfused", "local") or implementation == "local" or precision == "fp32"
    if not is_unfused:
        return "flash", False
    return "unfused", on_gpu and (fuses_softmax or implementation != "local")


def fullest_load(ep: int, capacity: float | None, pads: bool, load: float = 1.0) -> float:
    """Return the tokens that the experts of the fullest of ``ep`` ranks get, as a multiple of even routing.

    Megatron drops tokens beyond the ``capacity``, unless it is ``None``. The result is ``load`` up to that capacity, and
    the capacity for a ``load`` of at most 1. If experts are padded to their capacity, it is the capacity. Otherwise it
    is 1 if a rank has all experts.
    """
    if capacity is not None and pads:
        return capacity
    if ep == 1:
        return 1.0
    return load if capacity is None else min(load if load > 1 else inf, capacity)
