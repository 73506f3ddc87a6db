"""Vocabulary parallelism of Megatron models: cut embedding and head when a model is built, and run their passes."""

from __future__ import annotations

from functools import partial

from megatron_pipemem.features.vocabulary.megatron.build import cut_model
from megatron_pipemem.features.vocabulary.megatron.step import VocabularySteps
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.step.extension import Extension


def extensions(_: object, programs: ProgramStore, chunk_placement: ChunkPlacement) -> list[Extension]:
    """Return the extension that runs vocabulary passes, and make the run cut each model's vocabulary."""
    chunk_placement.cut = partial(cut_model, programs)
    return [VocabularySteps()]
