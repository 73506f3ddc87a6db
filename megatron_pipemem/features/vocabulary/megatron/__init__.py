"""Vocabulary parallelism for stock Megatron models: their embedding and head cut over the pipeline's ranks."""

from __future__ import annotations

from functools import partial

from megatron_pipemem.features.vocabulary.megatron.build import cut_model
from megatron_pipemem.features.vocabulary.megatron.step import VocabularySteps
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.programs import Programs
from megatron_pipemem.mcore.step.extension import Extension


def extensions(_: object, programs: Programs, chunk_placement: ChunkPlacement) -> list[Extension]:
    """Return the extensions of a cut vocabulary, and let models be cut when they are built."""
    chunk_placement.cut = partial(cut_model, programs)
    return [VocabularySteps()]
