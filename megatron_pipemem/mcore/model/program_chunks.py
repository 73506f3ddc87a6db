"""Chunks of a model that a program builds by itself, by calling the model's class once per chunk."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model.dealt_ranks import groups_of_chunk
from megatron_pipemem.mcore.model.placement import ChunkPlacement, copy_tied_weights, virtual_pipeline_size
from megatron_pipemem.mcore.patching import PatchSet
from megatron_pipemem.mcore.refusals import check_sharing
from megatron_pipemem.mcore.symbols import GPT_MODEL, HYBRID_MODEL

_BUILD = "build the chunks with build_model_chunks()"


@dataclass(eq=False)
class ProgramChunks:
    """Places the chunks that a program builds by itself.

    Args:
        placement: of the schedule.
    """

    placement: ChunkPlacement
    _built: list[torch.nn.Module] = field(default_factory=list)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Let every language model that is built within this block be the chunk that the placement wants.

        Raises:
            UnsupportedError: a chunk cannot be placed so, or chunks are missing at the end.
        """
        if self.placement.cut is not None:
            raise UnsupportedError(
                "chunks-by-program", f"a vocabulary is cut when all chunks have been built; {_BUILD}"
            )
        patches = PatchSet()
        if not self.placement.is_round_robin:
            patches.install([(symbol, self._build) for symbol in (GPT_MODEL, HYBRID_MODEL)])
        try:
            yield
            if self._built:
                raise UnsupportedError(
                    "chunks-by-program",
                    f"the program built only {len(self._built)} model chunks of this pipeline rank; build all of them in one "
                    "block of place_model_chunks()",
                )
        finally:
            patches.remove()
            self._built.clear()

    def _build(self, original: Callable[..., None], *args, **kwargs) -> None:
        """Initialise a language model as the chunk that its ``vp_stage`` says."""
        if self.placement.is_in_chunk:  # build_model_chunks() says which
            original(*args, **kwargs)
            return
        asked = inspect.signature(original).bind(*args, **kwargs)
        asked.apply_defaults()
        values, chunk = asked.arguments, len(self._built)
        groups = values["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
        placement = self.placement.for_model(groups.pp.size(), virtual_pipeline_size())
        if placement.is_round_robin:
            original(*args, **kwargs)
            return
        device, config, name = groups.pp.rank(), values["config"], self.placement.name
        check_sharing(config, name, placement)
        if placement.replicas > 1 or getattr(config, "mtp_num_layers", None):
            raise UnsupportedError(
                "chunks-by-program",
                f"schedule {name} cannot place two replicas of a model, or multi-token prediction, that a program builds by "
                f"itself; {_BUILD}",
            )
        stage = placement.stages[device][chunk]
        wanted = chunk, placement.previous_stage(stage) is None, placement.next_stage(stage) is None
        given = values["vp_stage"], values["pre_process"], values["post_process"]
        if given != wanted:
            raise UnsupportedError(
                "chunks-by-program",
                f"the program builds pipeline rank {device}'s model chunk with (vp_stage, pre_process, post_process) = {given} "
                f"where schedule {name} has {wanted}; let is_pipeline_first_stage() and is_pipeline_last_stage() of "
                f"parallel_state tell the ends of the model, or {_BUILD}",
            )
        values["pg_collection"] = groups_of_chunk(groups, placement, chunk)
        with self.placement.chunk(chunk):
            original(*asked.args, **asked.kwargs)
        model = asked.args[0]
        self.placement.settle_chunk(model, chunk)
        self._built.append(model)
        if len(self._built) == placement.num_chunks:
            copy_tied_weights(self._built)
            self._built.clear()
