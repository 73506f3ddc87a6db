"""Predict the bytes that each stage of a built model keeps, by which the W of a training run may run earlier.

The model is described as the planner describes it, so a run moves the same W as its plan.
"""

from __future__ import annotations

import logging
from typing import Any, cast, get_args
from weakref import WeakKeyDictionary

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.choose.knowledge import MemoryDeltas
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import decide_on_first_rank, groups_of_copy, is_on_one_host
from megatron_pipemem.mcore.model.language_model import model_of_chunk, predicts_in_piece
from megatron_pipemem.mcore.model.whole_model import contents_of_chunk, of_stages
from megatron_pipemem.mcore.step.extension import Extension, Step, device_of
from megatron_pipemem.model.activations import stage_bytes
from megatron_pipemem.model.model import BY_ACTION, Execution, Model, Recomputable, attention_of, fullest_load
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.options import AUTO, GATHERED, SHARDED

logger = logging.getLogger(__name__)

_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_UNKNOWN = "every W stays at its place, because the bytes of this model cannot be predicted"


class PredictedBytes(Extension):
    """Predicts the bytes of a model's stages before its first training step is planned."""

    only_trains = True

    def __init__(self, request: Request):
        self._request = request
        self._of_models: WeakKeyDictionary[torch.nn.Module, MemoryDeltas | None] = WeakKeyDictionary()

    def choose(self, step: Step) -> None:
        """Set the bytes of the programs. Without a second rank or microbatch, no W waits for long, and none is needed."""
        if step.pipeline.placement.num_devices == 1 or step.shape.num_microbatches == 1:
            step.program_store.set_predicted_bytes(None)
            return
        model = step.chunks[0]
        if model not in self._of_models:
            self._of_models[model] = self._predict(step)
        step.program_store.set_predicted_bytes(self._of_models[model])

    def _predict(self, step: Step) -> MemoryDeltas | None:
        """Return the change of bytes by F, I and W per stage, the same on every rank of this copy; ``None`` if unknown.

        Other copies of the model find the same by themselves: they may step at another time.
        """
        layers = _pieces_of_stages(step)
        if layers is None:
            tell(logger, "%s: its layers have no numbers", _UNKNOWN)
            return None

        group = step.groups.tp
        is_alone = group is None or group.size() == 1
        shards = self._request.wgrad_inputs == AUTO and (is_alone or is_on_one_host(group))

        def predict() -> MemoryDeltas | str:
            try:
                model, execution = described(step, self._request, shards)
                if sum(layers) != model.pieces:
                    return f"its stages hold {sum(layers)} layers, and its configuration has {model.pieces}"
                return stage_bytes(model, execution, layers)
            except (PipememError, AttributeError) as error:  # sizes that do not fit together, or some are missing
                return f"{error}"

        predicted = decide_on_first_rank(predict, groups_of_copy(step.groups, step.pipeline.group))
        if isinstance(predicted, str):
            tell(logger, "%s: %s", _UNKNOWN, predicted)
            return None
        return predicted


def _pieces_of_stages(step: Step) -> tuple[int, ...] | None:
    """Return the pieces (layers, and multi-token prediction) of every stage of one replica; ``None`` if unknown."""
    placement = step.pipeline.placement
    pieces = of_stages(step.chunks, placement, step.pipeline.group, _pieces)
    counted = [count for count in pieces[: placement.model_stages] if count is not None]
    return tuple(counted) if len(counted) == placement.model_stages else None


def _pieces(chunk: torch.nn.Module) -> int | None:
    chunk_facts = contents_of_chunk(chunk)
    if chunk_facts is None:
        return None
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return len(chunk_facts.layers) + predicts_in_piece(model)


def described(step: Step, request: Request, shards: bool) -> tuple[Model, Execution]:
    """Return the model of a step and its settings; raise a PipememError if the bytes of such a model are unknown.

    ``shards`` decides for ``--pipemem-wgrad-inputs auto`` whether shards of inputs wait for W.
    """
    config: Any = step.context.config
    groups = step.groups
    recompute, modules = request.recompute, BY_ACTION
    if config.recompute_granularity is not None:
        recompute = config.recompute_granularity
        modules = tuple(name for name in config.recompute_modules or () if name in get_args(Recomputable))
    wgrad_inputs = request.wgrad_inputs
    if wgrad_inputs == AUTO:
        wgrad_inputs = SHARDED if shards else GATHERED
    on_gpu = device_of(step.chunks).type == "cuda"
    precision, implementation = _PRECISIONS.get(config.params_dtype, "fp32"), config.transformer_impl
    attention, fused_softmax = attention_of(
        on_gpu, config.attention_backend.name, implementation, precision, config.masked_softmax_fusion
    )
    execution = Execution(
        micro_batch=step.full_microbatch.sequences,
        tp=1 if groups.tp is None else groups.tp.size(),
        sequence_parallel=config.sequence_parallel,
        cp=groups.cp.size(),
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        recompute="none" if recompute == AUTO else cast(Any, recompute),
        recompute_modules=modules,
        recompute_method=config.recompute_method or "uniform",
        recompute_num_layers=config.recompute_num_layers or 1,
        attention=attention,
        fused_softmax=fused_softmax,
        precision=cast(Any, precision),
        fp8=cast(Any, config.fp8_recipe if config.fp8 else "none"),
        implementation="local" if implementation == "local" else "transformer_engine",
        fused_rotations=on_gpu and config.apply_rope_fusion,
        rotary_percent=getattr(_model_in(step), "rotary_percent", 1.0),
        expert_load=fullest_load(
            config.expert_model_parallel_size,
            config.moe_expert_capacity_factor,
            config.moe_pad_expert_input_to_capacity,
        ),
        wgrad_inputs=wgrad_inputs,
        early_wgrad=request.early_wgrad,
    )
    return _model_of(step), execution


def _model_in(step: Step) -> Any:
    return get_attr_wrapped_model(step.chunks[0], "pre_process", return_model_obj=True)


def _model_of(step: Step) -> Model:
    built = _model_in(step)
    if getattr(built, "vocab_size", None) is None:
        raise UnsupportedError("unsupported-model", f"a {type(built).__name__} has no vocab_size")
    return model_of_chunk(
        built,
        step.full_microbatch.length,
        vocab_size=built.vocab_size,
        position_embedding_type=str(getattr(built, "position_embedding_type", "none")),
    )
