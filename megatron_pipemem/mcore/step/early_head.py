"""Decide whether a training run computes the weight gradient of the LM head in I, by the sizes of the built model.

The model is described to the planner as a run of its own, so a run decides as its plan does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.mcore.agreement import gather, tell
from megatron_pipemem.mcore.model.whole_model import look_into, model_of
from megatron_pipemem.mcore.step.extension import Step, device_of
from megatron_pipemem.model.layout import FURTHER, pattern_layers
from megatron_pipemem.model.model import Model, Recomputable
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.options import AUTO, GATHERED, SHARDED
from megatron_pipemem.tools.config.cluster import Cluster, HostChannel, Link
from megatron_pipemem.tools.config.runs import BY_ACTION, Parallelism, Run, ScheduleChoice

logger = logging.getLogger(__name__)

_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_UNKNOWN = "early weights: the head waits for W, because the planner cannot price this model"
_SPEEDS: dict[str, Any] = {
    **dict.fromkeys(("memory_gib", "tflops", "fp8_tflops", "host_memory_gib"), 1.0),
    **dict.fromkeys(("intra_node", "inter_node"), Link(1.0)),
    "host": HostChannel(1.0, 1.0),
}
"""Sizes and speeds of a cluster, on which the bytes of activations do not depend."""


def has_early_head(step: Step, request: Request, on_one_host: Callable[[dist.ProcessGroup], bool]) -> bool:
    """Return whether the run computes the head's weight gradient in I, the same on every rank of the pipeline.

    Every rank of the pipeline calls this at the same time, in the training step whose schedule decides.
    ``on_one_host`` returns whether the ranks of a group share a host. A model whose sizes are unknown has no early head,
    and the log says so.
    """
    from megatron_pipemem.tools.planner import early_head  # only here, because most runs do not plan

    layers = _pieces_of_stages(step)
    if layers is None:
        tell(logger, "%s, whose layers have no numbers", _UNKNOWN)
        return False
    try:
        run = described(step, request, on_one_host)
        if sum(layers) != run.model.pieces:
            raise UnsupportedError(
                "unsupported-model",
                f"its stages hold {sum(layers)} layers, and its configuration has {run.model.pieces}",
            )
        is_early = early_head.has_early_head(run, step.program.schedule, layers)
    except (PipememError, AttributeError) as error:  # sizes that do not fit together, or a configuration without some
        tell(logger, "%s: %s", _UNKNOWN, error)
        return False
    if is_early:
        tell(
            logger,
            "early weights: I computes the head's weight gradient, because the rank of the head would otherwise hold more "
            "than any rank under 1f1b; --pipemem-early-weights none changes it",
        )
    return is_early


def _pieces_of_stages(step: Step) -> tuple[int, ...] | None:
    """Return the pieces (layers, and multi-token prediction) of every stage of one replica; ``None`` if unknown."""
    placement = step.pipeline.placement
    everyones = gather([_pieces(chunk) for chunk in step.chunks], [step.pipeline.group])
    pieces: list[int | None] = [None] * placement.num_stages
    for stages, counts in zip(placement.stages, everyones, strict=True):
        for stage, count in zip(stages, counts, strict=True):
            pieces[stage] = count
    known = [each for each in pieces[: placement.model_stages] if each is not None]
    return tuple(known) if len(known) == placement.model_stages else None


def _pieces(chunk: torch.nn.Module) -> int | None:
    known = look_into(chunk)
    if known is None:
        return None
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    predicts_ahead = getattr(model, "mtp_process", False) and getattr(model, "hybrid_layer_pattern", None) is None
    return len(known.layers) + bool(predicts_ahead)


def described(step: Step, request: Request, on_one_host: Callable[[dist.ProcessGroup], bool]) -> Run:
    """Return the run that describes the model of a step; raise a PipememError if the planner has no such model."""
    config: Any = step.context.config
    groups = step.groups
    tp = 1 if groups.tp is None else groups.tp.size()
    recompute, modules = request.recompute, cast(tuple[Recomputable, ...], BY_ACTION)
    if config.recompute_granularity is not None:
        recompute = config.recompute_granularity
        modules = tuple(each for each in config.recompute_modules or () if each in get_args(Recomputable))
    weight_inputs = request.weight_inputs
    if weight_inputs == AUTO:
        weight_inputs = SHARDED if tp == 1 or on_one_host(groups.tp) else GATHERED
    flags = {
        "transformer-impl": config.transformer_impl,
        "no-rope-fusion": not config.apply_rope_fusion,
        "rotary-percent": getattr(_model_in(step), "rotary_percent", 1.0),
        "fp8-format": config.fp8,
        "fp8-recipe": config.fp8_recipe,
        "moe-expert-capacity-factor": config.moe_expert_capacity_factor,
        "moe-pad-expert-input-to-capacity": config.moe_pad_expert_input_to_capacity,
    }
    return Run(
        model=_model_of(step),
        cluster=Cluster(**_SPEEDS, backend="nccl" if device_of(step.chunks).type == "cuda" else "gloo"),
        parallelism=Parallelism(
            tp=tp,
            cp=groups.cp.size(),
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size,
            micro_batch=step.full_microbatch.sequences,
            sequence_parallel=config.sequence_parallel,
        ).with_microbatches(step.shape.num_microbatches),
        schedule=ScheduleChoice(
            early_weights=request.early_weights,
            weight_inputs=weight_inputs,
            recompute="none" if recompute == AUTO else cast(Any, recompute),
            recompute_modules=modules,
        ),
        precision=cast(Any, _PRECISIONS.get(config.params_dtype, "fp32")),
        megatron=flags,
    )


def _model_in(step: Step) -> Any:
    return get_attr_wrapped_model(step.chunks[0], "pre_process", return_model_obj=True)


def _model_of(step: Step) -> Model:
    config: Any = step.context.config
    built = _model_in(step)
    if getattr(built, "vocab_size", None) is None:
        raise UnsupportedError("unsupported-model", f"a {type(built).__name__} has no vocab_size")
    position = str(getattr(built, "position_embedding_type", "none"))
    shape: dict[str, Any] = {"mtp_layers": config.mtp_num_layers or 0}
    pattern = getattr(built, "hybrid_layer_pattern", None)
    if pattern is not None:
        layers, *further = pattern.split(FURTHER)
        layers = pattern_layers(layers)
        shape = {
            "layers": len(layers),
            "pattern": layers,
            "mtp_layers": len(further),
            "mtp_pattern": (further or [None])[0],
        }
    return model_of(
        config,
        step.full_microbatch.length,
        vocabulary=built.vocab_size,
        norm="rmsnorm" if config.normalization == "RMSNorm" else "layernorm",
        position={"learned_absolute": "learned", "none": "none"}.get(position, "rope"),
        bias="all" if config.add_bias_linear else "qkv_only" if config.add_qkv_bias else "none",
        dropout=max(config.attention_dropout, config.hidden_dropout),
        router_score="softmax" if config.moe_router_score_function == "softmax" else "sigmoid",
        qk_norm=config.qk_layernorm,
        **shape,
    )
