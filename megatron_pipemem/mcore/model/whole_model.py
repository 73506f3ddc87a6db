"""Check that the chunks on all ranks of a pipeline are the whole model, by the layers that were really built.

Every layer must exist once, in order, between the embedding and the head. Megatron counts the layers of a chunk by
sizes in a configuration and in global state. If these sizes disagree, the chunks may still fit together and train, with
layers missing or repeated. The check uses the global number of each layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.model.language_model import count_layers
from megatron_pipemem.schedule.placement import Placement

logger = logging.getLogger(__name__)


class _Chunk(NamedTuple):
    """The layer numbers, the ends and the number of parameters of one model chunk on one tensor-parallel rank."""

    layers: tuple[int, ...]
    """Numbers of the layers in the whole model, from 1."""
    of: int
    """The number of layers of the whole model, by its configuration."""
    embeds: bool
    has_head: bool
    parameters: int


def check_whole_model(chunks: Sequence[torch.nn.Module], placement: Placement, group: dist.ProcessGroup) -> None:
    """Raise an UnsupportedError on every rank of the pipeline if their chunks are not exactly one model per replica.

    Every rank of the pipeline calls this before the first step of a model. Models without numbered layers are not
    checked, and the log says so.
    """
    stages = of_stages(chunks, placement, group, contents_of_chunk)
    seen = [chunk for chunk in stages if chunk is not None]
    if len(seen) < len(stages):
        unseen = [stage for stage, chunk in enumerate(stages) if chunk is None]
        tell(logger, "stages %s have no numbered layers; whether the chunks are the whole model is not checked", unseen)
        return
    for replica in range(placement.replicas):
        first = replica * placement.model_stages
        _check_replica(seen[first : first + placement.model_stages])
    tell(
        logger,
        "the model's %d layers are on %d stages, %d parameters on each tensor-parallel rank",
        seen[0].of,
        placement.model_stages,
        sum(chunk.parameters for chunk in seen[: placement.model_stages]),
    )


def of_stages[T](
    chunks: Sequence[torch.nn.Module],
    placement: Placement,
    pipeline: dist.ProcessGroup,
    look: Callable[[torch.nn.Module], T],
) -> list[T]:
    """Return ``look(chunk)`` of every stage of the pipeline, such as its number of layers, in the order of the stages.

    Every rank of ``pipeline`` calls this at the same time, with its own ``chunks``.
    """
    by_stage: dict[int, T] = {}
    for stages, values in zip(placement.stages, gather([look(chunk) for chunk in chunks], [pipeline]), strict=True):
        by_stage.update(zip(stages, values, strict=True))
    return [by_stage[stage] for stage in range(placement.num_stages)]


def layout_of(
    chunks: Sequence[torch.nn.Module], placement: Placement, pipeline: dist.ProcessGroup, count: Callable[[Any], float]
) -> tuple[float, ...]:
    """Return ``count(model)`` of every stage as ``of_stages`` does. ``model`` is the unwrapped chunk of the stage."""

    def count_in(chunk: torch.nn.Module) -> float:
        return count(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True))

    return tuple(of_stages(chunks, placement, pipeline, count_in))


def contents_of_chunk(chunk: torch.nn.Module) -> _Chunk | None:
    """Return the layers, ends and number of parameters of a chunk; ``None`` if its model has no numbered layers."""
    try:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        numbers = tuple(layer.layer_number for layer in model.decoder.layers)
        layers = count_layers(model)
        ends = bool(model.pre_process), bool(model.post_process)
    except (AttributeError, RuntimeError, TypeError):  # a model of another kind
        return None
    if not all(isinstance(number, int) for number in (layers, *numbers)):
        return None
    return _Chunk(numbers, layers, *ends, sum(parameter.numel() for parameter in chunk.parameters()))


def _check_replica(stages: Sequence[_Chunk]) -> None:
    """Raise an UnsupportedError if the stages of one replica do not make up the model."""
    layers = [number for chunk in stages for number in chunk.layers]
    layers_of_stages = "; ".join(f"stage {stage}: {_written(chunk.layers)}" for stage, chunk in enumerate(stages))
    remedy = (
        f"have the model cut into {len(stages)} stages wherever its sizes are given: by --num-virtual-stages-per-pipeline-rank "
        "or the flag in its place, or, without megatron.training, by virtual_pipeline_model_parallel_size both of "
        "initialize_model_parallel() and of the model's configuration"
    )
    if layers != list(range(1, stages[0].of + 1)):
        raise UnsupportedError(
            "model-differs",
            f"the pipeline's stages hold {len(layers)} layers where the model has {stages[0].of}, each once and in order "
            f"({layers_of_stages}); {remedy}",
        )
    embeds = [number for number, chunk in enumerate(stages) if chunk.embeds]
    heads = [number for number, chunk in enumerate(stages) if chunk.has_head]
    if embeds != [0] or heads != [len(stages) - 1]:
        raise UnsupportedError(
            "model-differs",
            f"stages {embeds} were built with the embedding and stages {heads} with the head, which belong on stages [0] and "
            f"[{len(stages) - 1}]; pass pre_process and post_process on to the model as build_model_chunks() gives them",
        )


def _written(layers: Sequence[int]) -> str:
    if not layers:
        return "none"
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))
