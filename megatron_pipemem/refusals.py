"""Refuse options of Megatron that exclude a feature of this package, with the reason and the remedy.

A run checks Megatron's configuration objects. The launcher checks the flags from which Megatron will make them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import Limit

ValueOf = Callable[[str], Any]
"""Returns the value of an attribute of Megatron's configuration, or ``None`` if the attribute does not exist."""
_FLAGS = {
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "fp8_param": "fp8-param-gather",
    "fp4_param": "fp4-param-gather",
    "cpu_offloading": "cpu-offloading-num-layers",
    "gtp_weight_remat_size": "tensor-parallel-num-weight-shards",
    "expert_gtp_weight_remat_size": "expert-tensor-parallel-num-weight-shards",
    "num_moe_experts": "num-experts",
    "use_te_rng_tracker": "te-rng-tracker",
    "is_inference_rng_tracker": "inference-rng-tracker",
}
"""The flag of an attribute, if it has another name than the attribute."""
_DEFAULTS = {
    "add_bias_linear": True,
    "clip_grad": 1.0,
    "fp8_recipe": "delayed",
    "recompute_modules": "core_attn",
    "rerun_mode": "validate_results",
}
"""The value of an attribute in Megatron if its flag is not given."""
_UNCOUNTED = ("quantile_balancing", "global_aux_loss")
_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "context_parallel_size": lambda number: (number or 1) > 1,
    "cuda_graph_impl": lambda impl: impl not in (None, "none"),
    "cuda_graph_warmup_steps": lambda number: number == 0,
    "num_microbatches_with_partial_activation_checkpoints": lambda number: number is not None,
    "moe_router_load_balancing_type": lambda kinds: any(kind in (kinds or "") for kind in _UNCOUNTED),
    "num_distributed_optimizer_instances": lambda number: (number or 1) > 1,
    "moe_token_dispatcher_type": lambda dispatcher: dispatcher == "flex",
    "gtp_weight_remat_size": lambda number: (number or 1) > 1,
    "expert_gtp_weight_remat_size": lambda number: (number or 1) > 1,
    "rerun_mode": lambda mode: mode not in (None, "disabled"),
    "tensor_model_parallel_size": lambda number: (number or 1) > 1,
    "recompute_granularity": lambda granularity: granularity == "full",
    "recompute_modules": lambda modules: "moe" in _listed(modules),
    "optimizer": lambda name: name not in (None, "adam", "sgd"),
    "grad_norm_skip_threshold": lambda threshold: threshold is not None and math.isfinite(threshold),
}
"""A function that says whether a value of the attribute is refused. For all other attributes, every true value is
refused.
"""
_NUMBERS = {
    "attention_dropout",
    "clip_grad",
    "context_parallel_size",
    "cuda_graph_warmup_steps",
    "expert_gtp_weight_remat_size",
    "grad_norm_skip_threshold",
    "gtp_weight_remat_size",
    "micro_batch_size",
    "mtp_num_layers",
    "num_distributed_optimizer_instances",
    "tensor_model_parallel_size",
}
"""The attributes that are compared as numbers, while their flags may be text."""


def _listed(words: str | Sequence[str] | None) -> Sequence[str]:
    """Return the words of a flag with several values, which may be one text."""
    return words.split() if isinstance(words, str) else words or ()


def _flag(attribute: str) -> str:
    return _FLAGS.get(attribute, attribute.replace("_", "-"))


class Refusals:
    """The attributes of Megatron's configuration that one feature refuses, with the reason and the remedy for each.

    ``feature`` ends the sentence "... is not supported". A remedy may follow a reason after a semicolon. Without one, it is
    to drop the attribute's flag. ``otherwise`` is a second remedy for all attributes. ``only`` has functions that return
    whether this feature refuses a value, for attributes of which others refuse more values.
    """

    def __init__(
        self,
        feature: str,
        reasons: Mapping[str, str],
        otherwise: str = "",
        only: Mapping[str, Callable[[Any], bool]] | None = None,
    ):
        remedies = {name: "" if "; " in text else f"; drop --{_flag(name)}" for name, text in reasons.items()}
        self.feature, self.only = feature, only or {}
        self.sentences = {name: f"{text}{remedies[name]}{otherwise}" for name, text in reasons.items()}

    def errors(self, value_of: ValueOf) -> Iterator[UnsupportedError]:
        """Yield an error for each attribute whose value is refused."""
        for attribute, sentence in self.sentences.items():
            value = value_of(attribute)
            if self.only.get(attribute, _REFUSED.get(attribute, bool))(value):
                yield UnsupportedError(
                    "unsupported-setting",
                    f"{attribute} = {shortened(value)} is not supported{self.feature}: {sentence}",
                )


class Rule(NamedTuple):
    """A refusal that depends on several attributes together."""

    is_met: Callable[[ValueOf], object]
    sentence: str
    code: str = "unsupported-setting"

    def errors(self, value_of: ValueOf) -> Iterator[UnsupportedError]:
        """Yield the error if the attributes are refused."""
        if self.is_met(value_of):
            yield UnsupportedError(self.code, self.sentence)


_STOCK_ORDER = "it assumes the stock order of passes"
_NO_GRAPHS = "; pass --cuda-graph-impl none"
GRAPHS_OF_LAYERS = "transformer_engine"
"""The value of ``cuda_graph_impl`` with which Transformer Engine captures a graph per layer, microbatch and direction."""
DELTA_NET = "gated_delta_net"
"""The value of ``experimental_attention_variant`` with which layers are gated delta nets."""
KEYS_FLAG, GATHERED_KEYS = "cp-comm-type", "all_gather"
"""The flag of the messages between context-parallel ranks, and the value with which each of them gathers all keys."""
GRAPH_OF_STEP = "full_iteration"
"""The value of ``cuda_graph_impl`` with which Megatron captures forwards and backwards of a step in one graph."""
FSDP = (
    "FSDP gathers weights around every forward and backward, which a split backward breaks; use Megatron's "
    "DistributedDataParallel (drop --use-megatron-fsdp / --use-torch-fsdp2)"
)
SCHEDULES = Refusals(
    "",
    {
        "use_megatron_fsdp": FSDP,
        "use_torch_fsdp2": FSDP,
        "num_distributed_optimizer_instances": "their reductions cannot start per chunk; pass "
        "--num-distributed-optimizer-instances 1",
        "fine_grained_activation_offloading": f"{_STOCK_ORDER}; pass --pipemem-offload in place of "
        "--fine-grained-activation-offloading",
        "cpu_offloading": "Transformer Engine offloads layers without regard to the pipeline; pass --pipemem-offload in place "
        "of --cpu-offloading-num-layers",
        "moe_paged_stash": _STOCK_ORDER,
        "num_microbatches_with_partial_activation_checkpoints": f"{_STOCK_ORDER}; recompute fully or selectively on "
        "every microbatch",
        "hybrid_context_parallel": "it has a schedule of its own",
        "gtp_weight_remat_size": _STOCK_ORDER,
        "expert_gtp_weight_remat_size": _STOCK_ORDER,
        # Of Megatron versions to come.
        "sequence_packing_scheduler": "packed batches change the number of microbatches",
        "dynamic_context_parallel": "every microbatch would have context-parallel groups of its own",
    },
)
UNCAPTURED = Refusals(
    " by a run that was enabled without it",
    {
        "cuda_graph_impl": "Megatron's own graphs follow the stock schedule, or take every W for a part of the latest "
        "backward; pass the flag on the command line or call enable(..., graphs=True) before the model is built"
        f"{_NO_GRAPHS.replace('; pass', ', or pass')}",
    },
    only={"cuda_graph_impl": lambda impl: impl not in (None, "none", GRAPH_OF_STEP)},
)
_ONE_SHAPE = "a graph holds one shape"
_NOT_REPLAYED = "a replay does not make the calls that keep its values"
_NOT_PROVED = "it is not proved in graphs"
GRAPHED = Refusals(
    " with a CUDA graph per pass",
    {
        "qk_clip": _NOT_REPLAYED,
        "log_max_attention_logit": _NOT_REPLAYED,
        "enable_autocast": _NOT_REPLAYED,
        "save_activations_interval": _NOT_REPLAYED,
        "save_wgrads_interval": _NOT_REPLAYED,
        "save_dgrads_interval": _NOT_REPLAYED,
        "use_transformer_engine_op_fuser": _NOT_REPLAYED,
        "enable_hyper_connections": _NOT_REPLAYED,
        "variable_seq_lengths": _ONE_SHAPE,
        "sft": _ONE_SHAPE,
        "dataloader_inter_document_masking": _ONE_SHAPE,
        "context_parallel_size": "parts of attention run on streams of their own; pass --context-parallel-size 1",
        "experimental_attention_variant": _NOT_PROVED,
    },
    _NO_GRAPHS.replace("; pass", ", or pass"),
    only={"experimental_attention_variant": lambda variant: variant not in (None, DELTA_NET)},
)
GRAPHED_DELTA_NETS = Refusals(
    " with gated delta nets and a CUDA graph per pass",
    {"deterministic_mode": "their recurrence in PyTorch copies a tensor from the host, which a capture cannot do"},
    _NO_GRAPHS.replace("; pass", ", or pass"),
)
_PROVED_MODULES = {"layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts"}
GRAPHED_MODULES = Refusals(
    " with selective recomputation and a CUDA graph per pass",
    {
        "recompute_modules": "core_attn reads a number on the host, moe would run experts within a graph, and others are not "
        f"proved in graphs; pass --recompute-modules with some of {', '.join(sorted(_PROVED_MODULES))}",
    },
    _NO_GRAPHS.replace("; pass", ", or pass"),
    only={"recompute_modules": lambda modules: not {*_listed(modules)} <= _PROVED_MODULES},
)
_DRAWN_AGAIN = "a layer that runs again would draw other numbers"
GRAPHED_RECOMPUTATION = Refusals(
    " with recomputation and a CUDA graph per pass",
    {
        "attention_dropout": f"{_DRAWN_AGAIN}; pass --attention-dropout 0",
        "hidden_dropout": f"{_DRAWN_AGAIN}; pass --hidden-dropout 0",
    },
    _NO_GRAPHS.replace("; pass", ", or pass"),
)
_PROVED_RECIPES = ("tensorwise", "mxfp8")
GRAPHED_FP8 = Refusals(
    " with fp8 and a CUDA graph per pass",
    {
        "fp8_recipe": "delayed scaling updates its scales by calls that a replay does not make, and other recipes are not "
        "proved in graphs; pass --fp8-recipe tensorwise or mxfp8",
        "fp8_dot_product_attention": _NOT_PROVED,
        "fp8_multi_head_attention": _NOT_PROVED,
        "fp8_output_proj": _NOT_PROVED,
    },
    _NO_GRAPHS.replace("; pass", ", or pass"),
    only={"fp8_recipe": lambda recipe: recipe not in _PROVED_RECIPES},
)
GRAPHED_FP4 = Refusals(
    " with fp4 and a CUDA graph per pass",
    {
        "fp4_recipe": f"{_NOT_PROVED}; pass --fp4-recipe nvfp4",
        "fp4_param": _NOT_PROVED,
        "tensor_model_parallel_size": f"{_NOT_PROVED}; pass --tensor-model-parallel-size 1",
        "recompute_granularity": _NOT_PROVED,
    },
    _NO_GRAPHS.replace("; pass", ", or pass"),
    only={
        "fp4_recipe": lambda recipe: recipe not in (None, "nvfp4"),
        "recompute_granularity": bool,
    },
)
_ON_HOST = "the host reads a number of tokens before it puts them in order"
_PROVED_BACKENDS = ("deepep", "hybridep")
GRAPHED_EXPERTS = Refusals(
    " with a CUDA graph per pass, which ends where tokens travel to experts",
    {
        "recompute_granularity": "a layer that runs again would run its experts within a graph; drop --recompute-granularity",
        "moe_flex_dispatcher_backend": f"{_NOT_PROVED}; pass --moe-flex-dispatcher-backend hybridep or deepep",
        "moe_hybridep_pad_uneven_dispatch_inputs": _ON_HOST,
        "moe_hybridep_pad_variable_tokens": _ON_HOST,
        "moe_expert_capacity_factor": _ON_HOST,
        "moe_router_padding_for_quantization": _ON_HOST,
        "moe_latent_size": _NOT_PROVED,
        "moe_router_force_biased": _NOT_PROVED,
        "moe_router_load_balancing_type": f"{_NOT_PROVED}; pass "
        "--moe-router-load-balancing-type aux_loss, seq_aux_loss or global_aux_loss",
        "moe_enable_routing_replay": _NOT_REPLAYED,
        "moe_routing_trace_path": _NOT_REPLAYED,
        "save_tokens_per_expert_interval": _NOT_REPLAYED,
        "overlap_dispatch_backward_with_experts_wgrad": "it computes on a stream of its own, outside of the graph",
    },
    _NO_GRAPHS.replace("; pass", ", or pass"),
    only={
        "moe_router_load_balancing_type": lambda kinds: any(
            kind in (kinds or "") for kind in ("sinkhorn", "quantile_balancing")
        ),
        "moe_flex_dispatcher_backend": lambda backend: backend not in (None, *_PROVED_BACKENDS),
    },
)
_CAPTURED_PARTS = {"moe_router", "moe_preprocess"}
EXPERT_MODULES = Rule(
    lambda value_of: not {*_graph_modules(value_of)} >= _CAPTURED_PARTS,
    "with experts, a CUDA graph ends where tokens travel to them, as Megatron's does with the modules moe_router and "
    "moe_preprocess; pass --cuda-graph-modules attn moe_router moe_preprocess, or --cuda-graph-impl none",
)
WHOLE_STEP = Refusals(
    " by a step in which the host acts between passes",
    {
        "cuda_graph_impl": "only steps with one stage per rank are captured whole; take 1f1b, gpipe or zb-h1 without offload, "
        "recomputation in the schedule, slices, a cut vocabulary, microbatch costs, reports and profiles, or pass "
        "--cuda-graph-impl none",
    },
    only={"cuda_graph_impl": lambda impl: impl == GRAPH_OF_STEP},
)
CAPTURED = Refusals(
    " with CUDA graphs",
    {
        "cuda_graph_warmup_steps": "ranks agree on a schedule in the first step, before anything can be captured; pass "
        "--cuda-graph-warmup-steps 1 or more",
    },
)
REORDERED = Refusals(
    " by a schedule that runs forwards in another order than Megatron's own",
    {
        "moe_enable_routing_replay": "routers are recorded and replayed in the order of Megatron's forwards; take a schedule "
        "with one model chunk per rank, or interleaved, and no --pipemem-microbatch-costs",
    },
)
_NO_STREAM = "its generators cannot be set to the stream of a layer"
_STREAMS = "the shards of a weight draw from random streams of their own"
LAYERWISE = Refusals(
    " with layerwise random numbers",
    {
        "cuda_graph_impl": f"a captured graph draws from the generators of its capture{_NO_GRAPHS}",
        "use_te_rng_tracker": _NO_STREAM,
        "is_inference_rng_tracker": _NO_STREAM,
        "overlap_moe_expert_parallel_comm": "combined 1F1B runs layers in pieces of two microbatches",
        "init_model_with_meta_device": "initial weights are drawn after the model is built",
        "mtp_hsm": "hidden states are mixed by a random stream that belongs to no layer",
        "gtp_weight_remat_size": _STREAMS,
        "expert_gtp_weight_remat_size": _STREAMS,
    },
)
UNPAIRED = Refusals(
    " by a run that was enabled without it",
    {
        "overlap_moe_expert_parallel_comm": "pass it on the command line, or call enable(..., pairs=True) before the model is "
        "built",
    },
)
_NO_PLACE = "layers that run in pieces have no place for it"
_IN_PIECES = "a layer that alternates with one of another microbatch"
PAIRS = Refusals(
    " with --overlap-moe-expert-parallel-comm",
    {
        "recompute_granularity": f"{_IN_PIECES} cannot run again as a whole; pass "
        "--recompute-granularity selective or none",
        "recompute_modules": f"{_IN_PIECES} cannot run its experts again; leave moe out of --recompute-modules",
        "moe_shared_expert_overlap": _NO_PLACE,
        "mtp_num_layers": _NO_PLACE,
        "ep_overlap_early_attn_memory_release": _NO_PLACE,
        "enable_hyper_connections": _NO_PLACE,
        "enable_mhc_connections": _NO_PLACE,
        "cuda_graph_impl": "a captured router leaves its experts to Megatron's own pieces; pass --cuda-graph-impl none",
        "enable_autocast": "backwards would compute in the format of their pair's forward; build the model in the format that "
        "it computes in",
    },
    ", or drop --overlap-moe-expert-parallel-comm",
)
VOCABULARY = Refusals(
    " with vocabulary parallelism",
    {
        "mtp_standalone": "its stage gets its embeddings on the rank that has the input of the head; write m next "
        "to L in --pipeline-model-parallel-layout",
        "mtp_detach_heads": "one pass computes the gradients of the head for all depths",
        "fp32_residual_connection": "the cut head takes inputs in the number format of the parameters",
        "enable_autocast": "the cut head computes in the number format of the parameters; build the model in the format that "
        "it computes in",
        "init_model_with_meta_device": "the shards take their first values from the whole matrices",
    },
    ", or pass --pipemem-vocab-cut off",
)
_COUNTS = "it counts tokens or scores of a step, and each replica sees half of them"
_TWO_QUANTISED = "ranks cannot exchange quantised weights, so the replicas would differ"
REPLICAS = Refusals(
    " with two replicas of the model",
    {
        "moe_router_enable_expert_bias": _COUNTS,
        "moe_router_load_balancing_type": f"{_COUNTS}; drop it",
        "qk_clip": _COUNTS,
        "init_model_with_meta_device": "the second replica copies values when it is built",
        "fp8_param": _TWO_QUANTISED,
        "fp4_param": _TWO_QUANTISED,
    },
    ", or take a schedule with one replica of the model",
)
_IN_FLIGHT = "the number of microbatches would change while some of them are in flight"
_NEXT_BATCH = "it sums over one batch, and forwards of the next one run before that ends"
_ONE_VERSION = "it knows one version of the weights"
ASYNCHRONOUS = Refusals(
    " by asynchronous schedules",
    {
        "use_distributed_optimizer": _ONE_VERSION,
        "fp8": _ONE_VERSION,
        "fp4": _ONE_VERSION,
        "moe_router_enable_expert_bias": _ONE_VERSION,
        "qk_clip": _ONE_VERSION,
        "moe_router_load_balancing_type": f"{_NEXT_BATCH}; pass --moe-router-load-balancing-type aux_loss",
        "optimizer_cuda_graph": _ONE_VERSION,
        "mtp_num_layers": _NEXT_BATCH,
        "iterations_to_skip": "the next batch is read ahead, so none can be skipped",
        "rampup_batch_size": _IN_FLIGHT,
        "step_batch_size_schedule": _IN_FLIGHT,
    },
)
_TOGETHER = "all ranks agree on a number before any rank goes on"
_REPLAYED = "a graph replays a step with its end"
_ONE_COUNT = "the plan of consecutive steps is for one number of microbatches"
OVERLAPPED = Refusals(
    " without a barrier between steps",
    {
        "rerun_mode": f"{_TOGETHER}; pass --rerun-mode disabled",
        "fp16": f"{_TOGETHER}; train in bf16 or fp32",
        "loss_scale": _TOGETHER,
        "calculate_per_token_loss": _TOGETHER,
        "log_num_zeros_in_grad": _TOGETHER,
        "log_params_norm": _TOGETHER,
        "rampup_batch_size": _ONE_COUNT,
        "step_batch_size_schedule": _ONE_COUNT,
        "use_layer_wise_distributed_optimizer": "it gathers weights in its own step; take "
        "--use-distributed-optimizer with --optimizer adam",
        "optimizer_cuda_graph": _REPLAYED,
        "cuda_graph_impl": f"{_REPLAYED}{_NO_GRAPHS}",
    },
)
_OFFLOADED = "the offloaded optimizer updates copies on the host at its own pace"
DELAYED = Refusals(
    " by an asynchronous schedule without a barrier between steps",
    {
        "grad_norm_skip_threshold": "the learning rate changes before the norm is known; leave it out",
        "optimizer_cpu_offload": _OFFLOADED,
        "save_params_interval": "it would write weights without the update of the last batch",
    },
)
_COUNTED_TWICE = "it counts every forward, and the first forwards of a step may run again"
_WRITTEN_EARLY = "it would write the results of a step that may have to be rolled back"
_NOT_RESTORED = "its changes of a step cannot be rolled back"
_GATHERED_EARLY = "weights would be gathered before the step is final"
ROLLED_BACK = Refusals(
    " without a barrier between steps if gradients are clipped",
    {
        "optimizer": f"{_NOT_RESTORED}; pass --optimizer adam or sgd",
        "optimizer_cpu_offload": _OFFLOADED,
        "use_precision_aware_optimizer": _NOT_RESTORED,
        "grad_norm_skip_threshold": "a step above it must not be taken at all; leave it out",
        "overlap_param_gather_with_optimizer_step": _GATHERED_EARLY,
        "reuse_grad_buf_for_mxfp8_param_ag": _GATHERED_EARLY,
        "fp8_param_gather": _NOT_RESTORED,
        "fp4_param_gather": _NOT_RESTORED,
        "qk_clip": _NOT_RESTORED,
        "log_max_attention_logit": _COUNTED_TWICE,
        "moe_router_enable_expert_bias": _COUNTED_TWICE,
        "moe_router_load_balancing_type": f"{_COUNTED_TWICE}; pass --moe-router-load-balancing-type aux_loss",
        "moe_routing_trace_path": _COUNTED_TWICE,
        "save_params_interval": _WRITTEN_EARLY,
        "save_activations_interval": _WRITTEN_EARLY,
        "save_tokens_per_expert_interval": _WRITTEN_EARLY,
    },
    ", or pass --clip-grad 0",
)
_LATER_TOKENS = "later tokens decide where earlier ones go"
SLICED = Refusals(
    " in sequence slices",
    {
        "attention_dropout": "masks are drawn for whole sequences, and slices would draw others; pass --attention-dropout 0",
        "variable_seq_lengths": "all sequences are cut at the same places; drop --variable-seq-lengths, and pad the sequences",
        "mtp_use_repeated_layer": "the depths of a repeated layer would share the keys of their slices",
        "mtp_standalone": "its stage sends the hidden states of all depths",
        "moe_expert_capacity_factor": _LATER_TOKENS,
        "moe_router_load_balancing_type": f"{_LATER_TOKENS}; balance experts by aux_loss, "
        "seq_aux_loss, global_aux_loss or a bias",
        "experimental_attention_variant": "it does not take the keys and values of earlier slices",
    },
    ", or take a schedule without sequence slices",
    only={
        "moe_router_load_balancing_type": lambda kinds: any(
            kind in (kinds or "") for kind in ("quantile_balancing", "sinkhorn")
        )
    },
)
SHARED_SLICES = Refusals(
    " in sequence slices that context-parallel ranks share",
    {
        "cp_comm_type": "no exchange of Transformer Engine takes fewer queries than keys; pass --cp-comm-type all_gather",
        "mtp_num_layers": "Megatron hands tokens on between the ranks' parts of whole sequences",
    },
    ", or pass --context-parallel-size 1, or take a schedule without sequence slices",
    only={"cp_comm_type": lambda kinds: {*_listed(kinds)} != {GATHERED_KEYS}},
)
VOCABULARY_SLICED = Refusals(
    " in sequence slices with vocabulary parallelism",
    {"mtp_num_layers": "the cut head gets the labels of all depths for whole sequences; pass --pipemem-vocab-cut off"},
    ", or take a schedule without sequence slices",
)
LAYERWISE_SLICED = Refusals(
    " in sequence slices with layerwise random numbers",
    {
        "hidden_dropout": "stock draws one mask for the whole sequence; pass --hidden-dropout 0, or --pipemem-rng stock",
    },
    ", or take a schedule without sequence slices",
)
_APART = "it needs the gradients of all stages, which update at different times"
PER_MICROBATCH = Refusals(
    " by a schedule that updates after every microbatch",
    {
        "overlap_grad_reduce": "every microbatch waits for its reduction before its update",
        "calculate_per_token_loss": "the tokens of a batch are counted after its updates",
        "clip_grad": f"{_APART}; pass --clip-grad 0",
        "fp16": f"{_APART}; use bf16 or fp32",
        "log_num_zeros_in_grad": "gradients are gone when the step ends",
    },
)
WHOLE_BACKWARD = Refusals(
    " by a schedule that runs whole backwards",
    {
        "defer_embedding_wgrad_compute": "the head's weight gradients run within them; drop "
        "--defer-embedding-wgrad-compute, or take a schedule that splits the backward, which defers them itself, like zb-h1",
    },
)
SPLIT_BACKWARD = Refusals(
    " by a schedule that splits the backward",
    {
        "use_transformer_engine_op_fuser": "its fused operations compute their own weight gradients",
        "overlap_dispatch_backward_with_experts_wgrad": "the weight gradients of experts would run within I",
    },
)


def _has_user_buffers(value_of: ValueOf) -> bool:
    """Return whether tensor-parallel ranks have user buffers. One rank has none; its ``tp_comm_overlap`` means nothing."""
    return bool(value_of("tp_comm_overlap")) and (value_of("tensor_model_parallel_size") or 1) > 1


PAIRED_USER_BUFFERS = Rule(
    _has_user_buffers,
    "user buffers are not proved where the layers of two microbatches alternate; drop --tp-comm-overlap, or "
    "--overlap-moe-expert-parallel-comm",
)
SLICED_USER_BUFFERS = Rule(
    _has_user_buffers,
    "user buffers have the shape of whole sequences; drop --tp-comm-overlap, or take a schedule without sequence slices",
)
QUANTISED_USER_BUFFERS = Rule(
    lambda value_of: (
        _has_user_buffers(value_of)
        and (value_of("fp4") or (value_of("fp8") and value_of("fp8_recipe") not in ("tensorwise", "mxfp8")))
    ),
    "the operands of W in user buffers are proved to outlive them in bf16 and in fp8 with the recipes tensorwise and mxfp8; "
    "pass one of these with --fp8-recipe, drop --tp-comm-overlap, or take a schedule that does not split the backward, like "
    "1f1b or interleaved",
)
_FUSED = "its kernels need a GPU"
CPU = Refusals(
    " on CPU ranks",
    {
        "moe_token_dispatcher_type": "its kernels need a GPU; pass --moe-token-dispatcher-type alltoall",
        "moe_permute_fusion": _FUSED,
        "moe_router_fusion": _FUSED,
    },
)
TIED = (
    "a schedule that updates after every microbatch cannot tie the embedding to the head: their stages update at different "
    "times; pass --untie-embeddings-and-output-weights"
)


def _graph_modules(value_of: ValueOf) -> Sequence[str]:
    """Return the parts of layers that graphs are to hold. ``cuda_graph_scope`` is the attribute's former name."""
    parts = value_of("cuda_graph_modules") or value_of("cuda_graph_scope")
    return [getattr(part, "name", part) for part in _listed(parts)]


def _modules(value_of: ValueOf) -> Sequence[str]:
    """Return the modules that are recomputed. A flag may give them as one word."""
    return _listed(value_of("recompute_modules"))


def _is_shared(value_of: ValueOf) -> bool:
    return _REFUSED["context_parallel_size"](value_of("context_parallel_size"))


def _recomputes_biased_mlps(value_of: ValueOf) -> bool:
    """Return whether Megatron checkpoints MLPs that also return a bias, which makes the bias its own ancestor in autograd."""
    recomputes_mlps = value_of("recompute_granularity") == "selective" and "mlp" in _modules(value_of)
    in_bytes = value_of("fp8") or value_of("fp4")  # checkpointed by Transformer Engine
    return (
        recomputes_mlps and not in_bytes and bool(value_of("add_bias_linear")) and not value_of("disable_bias_linear")
    )


def _recomputes_repeated_weights(value_of: ValueOf) -> bool:
    """Return whether a weight is used at several depths, in parts that run again, and its gradients wait in ``grad``."""
    granularity = value_of("recompute_granularity")
    parts = {*_modules(value_of)} - {"core_attn", "layernorm", "moe_act"}  # which have no weight that waits for W
    has_biases = value_of("add_bias_linear") and not value_of("disable_bias_linear")
    return bool(
        value_of("mtp_use_repeated_layer")
        and (granularity == "full" or (granularity == "selective" and parts))
        and (value_of("gradient_accumulation_fusion") is False or has_biases)
    )


def _is_packed(value_of: ValueOf) -> bool:
    return bool(value_of("sft") or value_of("dataloader_inter_document_masking"))


def _averages_parts(value_of: ValueOf) -> bool:
    masks = value_of("eod_mask_loss") or _is_packed(value_of)
    return _is_shared(value_of) and bool(masks) and not value_of("calculate_per_token_loss")


def _scales_late(value_of: ValueOf) -> bool:
    return bool(value_of("fp8")) and value_of("fp8_recipe") == "delayed"


PACKED = Rule(
    lambda value_of: _is_packed(value_of) and (value_of("micro_batch_size") or 1) > 1,
    "Megatron joins the packed sequences of a microbatch into one, and stages would receive it in the shape of "
    "several; pass --micro-batch-size 1, and a longer --seq-length",
)
BIASED_MLPS = Rule(
    _recomputes_biased_mlps,
    "Megatron's backward of a recomputed MLP never ends if linear layers have biases; pass --disable-bias-linear, or "
    "leave mlp out of --recompute-modules",
)
REPEATED_AGAIN = Rule(
    _recomputes_repeated_weights,
    "stock adds the weight gradients of a recomputed part that ran at several depths one by one, and W adds their sum, which "
    "is rounded otherwise; drop --mtp-use-repeated-layer, recompute only core_attn, layernorm and moe_act, or fuse gradient "
    "accumulation and pass --disable-bias-linear",
)
SHARED_DOCUMENTS = Rule(
    lambda value_of: value_of("dataloader_inter_document_masking") and not value_of("sft") and _is_shared(value_of),
    "context-parallel ranks would get parts of every sequence, where attention and rotary positions expect parts of "
    "every document; pass --sft, which pads documents, or --context-parallel-size 1",
)
AVERAGED_PARTS = Rule(
    _averages_parts,
    "each context-parallel rank averages the losses of the tokens that it has and that are not masked, and has other tokens "
    "in sequence slices; pass --calculate-per-token-loss, or take a schedule without sequence slices",
)
FUSED_ROTARY = Rule(
    lambda value_of: value_of("apply_rope_fusion") and (value_of("multi_latent_attention") or _is_packed(value_of)),
    "the fused rotary embeddings of latent attention and of packed documents begin every sequence slice at position 0; pass "
    "--no-rope-fusion, or take a schedule without sequence slices",
    "slices-attention",
)
DELAYED_SCALING = Rule(
    _scales_late,
    "fp8 with delayed scaling does not go with recomputation in the schedule: a second forward would count its values "
    "twice; pass --fp8-recipe tensorwise, or --pipemem-recompute none",
    "fp8-delayed-scaling",
)
DELAYED_PAIRS = Rule(
    lambda value_of: _scales_late(value_of) and value_of("recompute_granularity"),
    "fp8 with delayed scaling does not go with --overlap-moe-expert-parallel-comm and recomputation: a second forward within "
    "the forward of another microbatch would not update its scales; pass --fp8-recipe tensorwise, or drop "
    "--recompute-granularity",
    "fp8-delayed-scaling",
)
DELAYED_SCALES = Rule(
    _scales_late,
    "fp8 with delayed scaling does not go without a barrier between steps if gradients are clipped: repeated forwards would "
    "count their values twice; pass --fp8-recipe tensorwise, or --clip-grad 0",
    "fp8-delayed-scaling",
)


def of_config(config: object) -> ValueOf:
    """Return a function that returns the value of an attribute of one of Megatron's configuration objects, or ``None``."""
    return lambda attribute: getattr(config, attribute, None)


def of_several(*configurations: object) -> ValueOf:
    """Return a function that returns the value of an attribute in several of Megatron's configuration objects.

    It is the first value that is true, else the first that is not ``None``.
    """

    def value_of(attribute: str) -> Any:
        values = [getattr(configuration, attribute, None) for configuration in configurations]
        return next(filter(None, values), next((value for value in values if value is not None), None))

    return value_of


def flag_values(flags: Mapping[str, object]) -> ValueOf:
    """Return a function that returns the value of a configuration attribute, given the flags of a run.

    The names of ``flags`` have no dashes in front. A flag that is missing or ``False`` has the value in ``_DEFAULTS``, or
    ``None``. The function raises an UnsupportedError if a value of ``_NUMBERS`` is not a number.
    """

    def value_of(attribute: str) -> object:
        value = flags.get(_flag(attribute))
        if value is None or value is False:
            return _DEFAULTS.get(attribute)
        if attribute in _NUMBERS:
            return (
                [_number(attribute, number) for number in value]
                if isinstance(value, list)
                else _number(attribute, value)
            )
        return 0 if value == "0" else value

    return value_of


def _number(attribute: str, value: object) -> float:
    number = Limit(most=math.inf).read(f"--{_flag(attribute)}", value)
    return int(number) if number.is_integer() else number


_JOINED: Sequence[tuple[Callable[[ValueOf], object], str]] = (
    (
        lambda of: int(of("log_interval") or 0) == 1,
        "with --log-interval 1 every step is logged, and a logged step ends on all ranks together; pass --log-interval 10, for "
        "example",
    ),
    (
        lambda of: int(of("timing_log_level") or 0) > 0 and of("barrier_with_L1_time"),
        "with --timing-log-level 1 or 2 timers begin on all ranks together; add --no-barrier-with-level-1-timing",
    ),
    (
        lambda of: of("exit_duration_in_mins"),
        "with --exit-duration-in-mins all ranks compare their clocks after every step; end the run by --exit-interval or a "
        "signal",
    ),
    (
        lambda of: of("num_experts"),
        "with experts the loop sums up their losses over all ranks after every step, to log them",
    ),
    (
        lambda of: of("mtp_num_layers"),
        "with multi-token prediction the loop sums up its losses over all ranks after every step, to log them",
    ),
    (
        _is_packed,
        "with packed sequences the loop counts their tokens over all ranks after every step, to log FLOPs",
    ),
)


def barrier_reasons(value_of: ValueOf) -> list[str]:
    """Return sentences about settings that make all ranks wait for each other after a step even without a barrier."""
    return [sentence for joins, sentence in _JOINED if joins(value_of)]
