"""Say which options of Megatron do not go with which features of this package, and why.

A run asks Megatron's configurations, the launcher the flags that will set them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_pipemem.config.runs import Run
from megatron_pipemem.conflicts import check_delays
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.stream import check_batch, updates_per_batch


class Refusals(NamedTuple):
    """All that one feature refuses.

    Args:
        feature: completes "... is not supported".
        sentences: attribute of Megatron's configuration -> why not, and what to do.
    """

    feature: str
    sentences: Mapping[str, str]


_UNCOUNTED = ("quantile_balancing", "global_aux_loss")
_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "attention_dropout": lambda share: float(share or 0) > 0,
    "context_parallel_size": lambda number: int(number or 1) > 1,
    "cuda_graph_impl": lambda impl: impl not in (None, "none"),
    "num_microbatches_with_partial_activation_checkpoints": lambda number: number is not None,
    "moe_router_load_balancing_type": lambda asked: any(kind in (asked or "") for kind in _UNCOUNTED),
    "num_distributed_optimizer_instances": lambda number: int(number or 1) > 1,
    "moe_token_dispatcher_type": lambda dispatcher: dispatcher == "flex",
    "gtp_weight_remat_size": lambda number: (number or 1) > 1,
    "expert_gtp_weight_remat_size": lambda number: (number or 1) > 1,
    "rerun_mode": lambda mode: mode not in (None, "disabled"),
    "optimizer": lambda name: name not in (None, "adam", "sgd"),
    "grad_norm_skip_threshold": lambda threshold: threshold is not None and math.isfinite(float(threshold)),
}
"""Which values cannot be; of every other attribute all true ones."""

_SHARDED = (
    "weights cut over more ranks than tensor parallelism are gathered ahead in the order of the stock schedule; drop "
)
FSDP = (
    "FSDP gathers weights around every forward and backward, which a split backward breaks; use Megatron's "
    "DistributedDataParallel (drop --use-megatron-fsdp / --use-torch-fsdp2)"
)
SCHEDULES = Refusals(
    "",
    {
        "use_megatron_fsdp": FSDP,
        "use_torch_fsdp2": FSDP,
        "num_distributed_optimizer_instances": "the reductions of several distributed optimizers cannot be started per chunk; "
        "pass --num-distributed-optimizer-instances 1",
        "cuda_graph_impl": "CUDA graphs freeze the order of one step; pass --cuda-graph-impl none",
        "overlap_moe_expert_parallel_comm": "combined 1F1B is a schedule of its own; drop "
        "--overlap-moe-expert-parallel-comm",
        "defer_embedding_wgrad_compute": "the schedule already decides when the head's weight gradient runs; drop "
        "--defer-embedding-wgrad-compute",
        "fine_grained_activation_offloading": "fine-grained offload assumes the stock order of forwards and backwards; pass "
        "--pipemem-offload in place of --fine-grained-activation-offloading",
        "cpu_offloading": "offload of the last layers by Transformer Engine knows no pipeline; pass --pipemem-offload in "
        "place of --cpu-offloading-num-layers",
        "moe_paged_stash": "the paged stash re-runs whole steps of the stock schedule; drop --moe-paged-stash",
        "num_microbatches_with_partial_activation_checkpoints": "partial checkpointing is defined by the stock warm-up; "
        "recompute fully or selectively on every microbatch instead",
        "hybrid_context_parallel": "hybrid context parallelism brings its own schedule; drop --hybrid-context-parallel",
        "gtp_weight_remat_size": f"{_SHARDED}--tensor-parallel-num-weight-shards",
        "expert_gtp_weight_remat_size": f"{_SHARDED}--expert-tensor-parallel-num-weight-shards",
        # Of Megatron versions to come.
        "sequence_packing_scheduler": "packed batches have another number of microbatches than the step was planned for; drop "
        "--sequence-packing-scheduler",
        "enable_mhc_connections": "stages would exchange several residual streams per token, and messages here have one; drop "
        "--enable-mhc-connections",
    },
)
REORDERED = Refusals(
    " by a schedule whose forwards come in another order than Megatron's own",
    {
        "moe_enable_routing_replay": "routers are recorded and replayed in the order in which Megatron runs the forwards of a "
        "rank; take a schedule with one model chunk per rank, or interleaved, and no --pipemem-microbatch-costs",
    },
)
_STREAMS = "shards of one weight draw from streams of their own there; leave out "
LAYERWISE = Refusals(
    " with layerwise random numbers",
    {
        "cuda_graph_impl": "a captured graph draws from the generators that it was captured with; pass --cuda-graph-impl none",
        "use_te_rng_tracker": "Transformer Engine's tracker keeps generators, which cannot be set to a layer's stream; drop "
        "--te-rng-tracker",
        "is_inference_rng_tracker": "the tracker for inference keeps no streams; drop --inference-rng-tracker",
        "overlap_moe_expert_parallel_comm": "combined 1F1B runs layers in pieces of two microbatches; drop "
        "--overlap-moe-expert-parallel-comm",
        "init_model_with_meta_device": "a model on the meta device draws its first weights after it is built; drop "
        "--init-model-with-meta-device",
        "gtp_weight_remat_size": f"{_STREAMS}--tensor-parallel-num-weight-shards",
        "expert_gtp_weight_remat_size": f"{_STREAMS}--expert-tensor-parallel-num-weight-shards",
    },
)
_UNCUT = ", or pass --pipemem-vocab-parallel off"
VOCABULARY = Refusals(
    " with vocabulary parallelism",
    {
        "mtp_standalone": "the stage of multi-token prediction gets its embeddings where the head's input is; write m beside L "
        f"in --pipeline-model-parallel-layout{_UNCUT}",
        "mtp_detach_heads": f"one pass finds the head's gradients of all depths; drop --mtp-detach-heads{_UNCUT}",
        "fp32_residual_connection": "the head is cut for inputs in the parameters' number format; drop "
        f"--fp32-residual-connection{_UNCUT}",
        "enable_autocast": "the cut head computes in the parameters' number format; build the model in the format it is to "
        f"compute in{_UNCUT}",
        "init_model_with_meta_device": "the shards take their first values from the whole matrices; drop "
        f"--init-model-with-meta-device{_UNCUT}",
    },
)
_COUNTS = (
    " counts the tokens that every expert of a layer gets in a step, and here two replicas of the layer get half of them "
    "each; drop it, or take a schedule with one replica of the model"
)
_TWO_QUANTISED = "ranks cannot exchange quantised weights, so the replicas would begin with other values; drop --"
REPLICAS = Refusals(
    " with two replicas of the model",
    {
        "moe_router_enable_expert_bias": f"--moe-router-enable-expert-bias{_COUNTS}",
        "moe_router_load_balancing_type": f"{' or '.join(_UNCOUNTED)}{_COUNTS}",
        "qk_clip": "--qk-clip scales weights by the largest attention score that a layer has seen in a step, and two replicas "
        "of the layer see different ones; drop it, or take a schedule with one replica of the model",
        "init_model_with_meta_device": "the second replica gets its values when it is built, and a model on the meta device "
        "has none; drop --init-model-with-meta-device",
        "fp8_param": f"{_TWO_QUANTISED}fp8-param-gather",
        "fp4_param": f"{_TWO_QUANTISED}fp4-param-gather",
    },
)
_QUANTISED = "quantised weights are cached once per step and know no versions; drop --"
ASYNCHRONOUS = Refusals(
    " by asynchronous schedules",
    {
        "use_distributed_optimizer": "its parameters are views of one buffer that it gathers into, so they cannot be pointed "
        "at another version of the weights; drop --use-distributed-optimizer",
        "fp8": f"{_QUANTISED}fp8-format",
        "fp4": f"{_QUANTISED}fp4-format",
        "moe_router_enable_expert_bias": "the bias is no weight and has no versions; drop --moe-router-enable-expert-bias",
        "qk_clip": "it scales weights behind the optimizer's back, and older versions keep theirs; drop --qk-clip",
        "moe_router_load_balancing_type": f"{' or '.join(_UNCOUNTED)} counts the tokens of one batch, and forwards of the next "
        "one run before it ends; pass --moe-router-load-balancing-type aux_loss",
        "optimizer_cuda_graph": "the graph would update one version of the weights for ever; drop --optimizer-cuda-graph",
        "mtp_num_layers": "losses of its depths are logged by the step, and forwards of the next batch run before it ends; "
        "drop --mtp-num-layers",
    },
)
_COUNTED_ONCE = "counts what a step's forwards send where, and the first of them may run again; drop "
_WRITTEN_ONCE = "would write what a step leaves before it is known whether it must be taken again; drop "
OVERLAPPED = Refusals(
    " without a barrier between steps",
    {
        "rerun_mode": "Megatron has all ranks agree on the results of a step before it updates any weights; pass --rerun-mode "
        "disabled",
        "fp16": "all ranks decide together whether the loss scale was too large before any of them updates its weights; train "
        "in bf16 or fp32",
        "loss_scale": "all ranks look together for gradients that the scale has made infinite before any of them updates its "
        "weights; drop --loss-scale",
        "calculate_per_token_loss": "gradients are divided by the tokens of the whole step, which the last stage knows last; "
        "drop --calculate-per-token-loss",
        "log_num_zeros_in_grad": "all ranks count zeros together before any of them updates its weights; drop "
        "--log-num-zeros-in-grad",
        "log_params_norm": "all ranks sum up their weights together after every step; drop --log-params-norm",
        "rampup_batch_size": "how steps follow each other is planned for one number of microbatches; drop "
        "--rampup-batch-size",
        "step_batch_size_schedule": "how steps follow each other is planned for one number of microbatches; drop "
        "--step-batch-size-schedule",
        "use_layer_wise_distributed_optimizer": "its shares of the weights are whole layers, which it gathers in its own step; "
        "take --use-distributed-optimizer with --optimizer adam",
        "optimizer_cuda_graph": "the graph would replay one step, whatever must be taken back; drop --optimizer-cuda-graph",
        "cuda_graph_impl": "a graph replays a step as it was captured, with its end; pass --cuda-graph-impl none",
    },
)
DELAYED = Refusals(
    " by an asynchronous schedule without a barrier between steps",
    {
        "grad_norm_skip_threshold": "the training loop moves the learning rate on before it is known whether a batch is "
        "above it; leave grad_norm_skip_threshold out",
        "optimizer_cpu_offload": "the offloaded optimizer updates copies on the host at its own pace; drop "
        "--optimizer-cpu-offload",
        "save_params_interval": "it would write weights that the last batch has not updated; drop --save-params-interval",
    },
)
ROLLED_BACK = Refusals(
    " without a barrier between steps where gradients are clipped",
    {
        "optimizer": "only what adam and sgd change is known, and can be put back; pass --optimizer adam, or --clip-grad 0",
        "optimizer_cpu_offload": "the offloaded optimizer updates copies on the host at its own pace; drop "
        "--optimizer-cpu-offload, or pass --clip-grad 0",
        "use_precision_aware_optimizer": "its state has scales that only the optimizer knows, and cannot be put back; drop "
        "--use-precision-aware-optimizer, or pass --clip-grad 0",
        "grad_norm_skip_threshold": "a step above it must not be taken at all; leave grad_norm_skip_threshold out, or clip "
        "nothing",
        "overlap_param_gather_with_optimizer_step": "weights would be gathered before it is known whether they stand; drop "
        "--overlap-param-gather-with-optimizer-step",
        "reuse_grad_buf_for_mxfp8_param_ag": "gathered weights overwrite the gradients that the step may need again; drop "
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "fp8_param_gather": "8-bit weights have scales that the step changes, and cannot be put back; drop --fp8-param-gather",
        "fp4_param_gather": "4-bit weights have scales that the step changes, and cannot be put back; drop --fp4-param-gather",
        "qk_clip": "it scales weights behind the optimizer's back, and the step may be taken back; drop --qk-clip",
        "log_max_attention_logit": f"it {_COUNTED_ONCE}--log-max-attention-logit",
        "moe_router_enable_expert_bias": f"it {_COUNTED_ONCE}--moe-router-enable-expert-bias",
        "moe_router_load_balancing_type": f"{' or '.join(_UNCOUNTED)} {_COUNTED_ONCE}it, as with "
        "--moe-router-load-balancing-type aux_loss",
        "moe_routing_trace_path": f"it {_COUNTED_ONCE}--moe-routing-trace-path",
        "save_params_interval": f"it {_WRITTEN_ONCE}--save-params-interval",
        "save_activations_interval": f"it {_WRITTEN_ONCE}--save-activations-interval",
        "save_tokens_per_expert_interval": f"it {_WRITTEN_ONCE}--save-tokens-per-expert-interval",
    },
)
_CUT = ", or take a schedule without sequence slices"
SLICED = Refusals(
    " in sequence slices",
    {
        "context_parallel_size": f"every rank has a part of the sequence already; pass --context-parallel-size 1{_CUT}",
        "attention_dropout": "masks are drawn for whole sequences, and those of slices would be others; pass "
        f"--attention-dropout 0{_CUT}",
        "window_size": f"Megatron cuts sliding windows for whole sequences only; drop --window-size{_CUT}",
        "variable_seq_lengths": "all sequences are cut at the same places; drop --variable-seq-lengths, and pad the "
        f"sequences{_CUT}",
        "mtp_num_layers": f"the last tokens of a slice would have nothing to predict from; drop --mtp-num-layers{_CUT}",
        "num_moe_experts": "routers balance, and drop, the tokens of whole microbatches; train a model without experts"
        f"{_CUT}",
        "experimental_attention_variant": "it does not take keys and values of earlier slices; drop "
        f"--experimental-attention-variant{_CUT}",
        "apply_rope_fusion": "the fused kernel begins every sequence at position 0; pass --no-rope-fusion" + _CUT,
    },
)
PER_MICROBATCH = Refusals(
    " by a schedule that updates after every microbatch",
    {
        "overlap_grad_reduce": "every microbatch waits for its own reduction before it updates, so there is nothing to "
        "overlap; drop --overlap-grad-reduce",
        "calculate_per_token_loss": "gradients would be scaled by the tokens of a whole batch, which only the last stage has "
        "seen, and after it; drop --calculate-per-token-loss",
        "clip_grad": "the gradient's norm is a sum over all stages, which update at different times; pass --clip-grad 0",
        "fp16": "loss scaling skips updates of all stages together, which update at different times; use bf16 or fp32",
        "log_num_zeros_in_grad": "gradients are gone when the step ends; drop --log-num-zeros-in-grad",
    },
)
SPLIT_BACKWARD = Refusals(
    " by a schedule that splits the backward",
    {
        "use_transformer_engine_op_fuser": "its fused operations keep weight gradients for themselves, and no W would run; "
        "drop --use-transformer-engine-op-fuser",
        "overlap_dispatch_backward_with_experts_wgrad": "the experts' weight gradients would run within I, and not in W; drop "
        "--overlap-dispatch-backward-with-experts-wgrad",
        "tp_comm_overlap": "the next layer overwrites the user buffers that W would read; drop --tp-comm-overlap, or take a "
        "schedule that does not split, like 1f1b or interleaved",
        "mtp_use_repeated_layer": "its layers run once per depth and W would compute the weight gradients of one of them; drop "
        "--mtp-use-repeated-layer, or pass --transformer-impl local",
    },
)
_FUSED = "the fused kernels are Transformer Engine's, for a GPU; drop --"
CPU = Refusals(
    " on CPU ranks",
    {
        "moe_token_dispatcher_type": "DeepEP, HybridEP and NCCL EP are kernels of a GPU; pass --moe-token-dispatcher-type "
        "alltoall",
        "moe_permute_fusion": f"{_FUSED}moe-permute-fusion",
        "moe_router_fusion": f"{_FUSED}moe-router-fusion",
    },
)
TIED = (
    "a schedule that updates after every microbatch cannot tie the embedding to the head: their stages update at different "
    "times; pass --untie-embeddings-and-output-weights"
)
_DELAYED_SCALING = (
    "fp8 with delayed scaling does not go with recomputation in the schedule: a second forward would count its values "
    "twice; pass --fp8-recipe tensorwise, or --pipemem-recompute none"
)

_DELAYED_SCALES = (
    "fp8 with delayed scaling does not go without a barrier between steps where gradients are clipped: forwards that run again "
    "would count their values twice; pass --fp8-recipe tensorwise, or --clip-grad 0"
)

# Flags that are not called like their attribute, and what Megatron's flags are when they are not given.
_FLAGS = {
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "fp8_param": "fp8-param-gather",
    "fp4_param": "fp4-param-gather",
    "cpu_offloading": "cpu-offloading-num-layers",
}
_DEFAULTS = {"clip_grad": 1.0, "fp8_recipe": "delayed", "rerun_mode": "validate_results"}


def refuse(value_of: Callable[[str], Any], *wanted: Refusals) -> None:
    """Refuse a configuration that does not go with features.

    Args:
        value_of: of an attribute of Megatron's configuration, ``None`` for one that it does not have.
        wanted: what the features refuse.

    Raises:
        UnsupportedError: it does not.
    """
    for feature, sentences in wanted:
        for attribute, sentence in sentences.items():
            value = value_of(attribute)
            if _REFUSED.get(attribute, bool)(value):
                raise UnsupportedError(
                    "unsupported-setting", f"{attribute} = {value!r} is not supported{feature}: {sentence}"
                )


def refuse_transformer_engine(value_of: Callable[[str], Any], splits: bool, recomputes: bool) -> None:
    """Refuse what does not go with Transformer Engine's layers.

    Args:
        value_of: of an attribute of Megatron's configuration.
        splits: whether some backward is split into I and W.
        recomputes: whether the schedule may run something again, all or part of a forward.

    Raises:
        UnsupportedError: the configuration cannot run.
    """
    if recomputes and value_of("fp8") and value_of("fp8_recipe") == "delayed":
        raise UnsupportedError("fp8-delayed-scaling", _DELAYED_SCALING)
    if splits:
        refuse(value_of, SPLIT_BACKWARD)


def refuse_asynchronous(run: Run, name: str) -> None:
    """Refuse a run that would be refused when it starts under the asynchronous family of that name.

    Raises:
        UnsupportedError: it would.
    """
    cut, per_batch = run.parallelism, updates_per_batch(name)
    check_batch(name, cut.pp, cut.microbatches)
    refuse(flag_values(run.flags | {run.precision: True}), *asynchronous(per_batch))
    if run.model.tied and not per_batch:
        raise UnsupportedError("tied-embedding", TIED)
    if run.schedule.overlap_steps:
        check_delays(name)


def refuse_overlapped(value_of: Callable[[str], Any], delays: bool) -> None:
    """Refuse what does not go without a barrier between steps.

    Args:
        value_of: of an attribute of Megatron's configurations and arguments.
        delays: whether a step is taken when its norm is known, and never taken back.

    Raises:
        UnsupportedError: the configuration asks for it.
    """
    refuse(value_of, OVERLAPPED)
    if delays:
        refuse(value_of, DELAYED)
    elif float(value_of("clip_grad") or 0) > 0:
        refuse(value_of, ROLLED_BACK)
        if value_of("fp8") and value_of("fp8_recipe") == "delayed":
            raise UnsupportedError("fp8-delayed-scaling", _DELAYED_SCALES)


def asynchronous(per_batch: bool) -> tuple[Refusals, ...]:
    """Return what an asynchronous schedule refuses that updates once per batch, or else after every microbatch."""
    return (ASYNCHRONOUS,) if per_batch else (ASYNCHRONOUS, PER_MICROBATCH)


def flag_values(flags: Mapping[str, object]) -> Callable[[str], Any]:
    """Return what attributes will be under a training script's flags (without dashes in front), defaults included."""

    def value_of(attribute: str) -> object:
        given = flags.get(_FLAGS.get(attribute, attribute.replace("_", "-")))
        return _DEFAULTS.get(attribute) if given is None or given is False else 0 if given == "0" else given

    return value_of


_JOINED: Sequence[tuple[Callable[[Callable[[str], Any]], object], str]] = (
    (
        lambda of: int(of("log_interval") or 0) == 1,
        "with --log-interval 1 every step is logged, and a step that is logged ends on all ranks together; pass "
        "--log-interval 10, for example",
    ),
    (
        lambda of: int(of("timing_log_level") or 0) > 0 and of("barrier_with_L1_time"),
        "with --timing-log-level 1 or 2 timers begin on all ranks together; add --no-barrier-with-level-1-timing",
    ),
    (
        lambda of: of("exit_duration_in_mins"),
        "with --exit-duration-in-mins all ranks tell each other after every step whether it is time; end the run by "
        "--exit-interval or a signal",
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
        lambda of: of("sft") or of("dataloader_inter_document_masking"),
        "with packed sequences the loop counts their tokens over all ranks after every step, to log FLOPs",
    ),
)


def joined_anyway(value_of: Callable[[str], Any]) -> list[str]:
    """Return, a sentence each, what joins the ranks of a run after every step, so that it gains nothing without a barrier.

    Args:
        value_of: of an argument of Megatron's training loop; ``None`` for one that it does not have.
    """
    return [sentence for joins, sentence in _JOINED if joins(value_of)]
