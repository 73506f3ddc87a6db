"""Price the stages of a run by the layers that they were built with."""

from __future__ import annotations

from typing import Any

from megatron_pipemem.features.vocabulary.megatron.build import layout_of
from megatron_pipemem.mcore.programs import Programs
from megatron_pipemem.mcore.step.extension import Extension, Step


class LayersOfStages(Extension):
    """Say how the model is cut before the first step is planned, so that prices of layers, embedding and head make stages'."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._is_known = False

    def choose(self, step: Step) -> None:
        if not self._is_known:
            placement = step.pipeline.placement
            layout = layout_of(step.chunks, placement, step.groups.pp, _layers)
            self._programs.cut_is(tuple(map(int, layout[: placement.model_stages])))
            self._is_known = True


def _layers(model: Any) -> int:
    return len(model.decoder.layers)
