"""Price the stages of a run by the layers that they were built with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.programs import Programs
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.schedule.placement import Placement


class LayersOfStages(Extension):
    """Say how the model is cut before the first step is planned, so that prices of layers, embedding and head make stages'."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._is_known = False

    def choose(self, step: Step) -> None:
        if not self._is_known:
            placement = step.pipeline.placement
            layout = layout_of(step.chunks, placement, step.groups.pp, lambda model: len(model.decoder.layers))
            self._programs.cut_is(tuple(map(int, layout[: placement.model_stages])))
            self._is_known = True


def layout_of(
    chunks: list[torch.nn.Module], placement: Placement, pipeline: dist.ProcessGroup, count: Callable[[Any], float]
) -> tuple[float, ...]:
    """Return the layers of every stage as ``count`` finds them in its chunk. Every rank of ``pipeline`` calls this."""
    models = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in chunks]
    everyones = gather([count(model) for model in models], pipeline)
    layout = [0.0] * placement.num_stages
    for stages, layers in zip(placement.stages, everyones, strict=True):
        for stage, held in zip(stages, layers, strict=True):
            layout[stage] = held
    return tuple(layout)
