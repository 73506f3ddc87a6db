"""Refuse checkpoints of ``--ckpt-format torch`` that a run with another placement has saved.

Such a checkpoint has a file per rank, with the rank's chunks as they are. Megatron loads a chunk by its number and its
layers by their numbers within the chunk, and skips chunks and weights that the file lacks. Under another placement the
model would get other layers' weights, or keep its first ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.loop_arguments import set_argument
from megatron_pipemem.mcore.model.placement import ChunkPlacement, virtual_pipeline_size
from megatron_pipemem.mcore.symbols import LOAD_FILES, SAVE, Feature, Replacements

_MARK = "pipemem_devices"
"""The attribute of Megatron's arguments, which a checkpoint holds, with the device of every stage."""


class FilesOfRanks(Feature):
    """Marks checkpoints with the placement of the run, and refuses to load files of ranks with another placement."""

    def __init__(self, placement: ChunkPlacement | None = None):
        self._placement = placement  # ``None`` if the run has Megatron's own

    def replacements(self) -> Replacements:
        return [(SAVE, self._save), (LOAD_FILES, self._load)]

    def _devices(self) -> tuple[int, ...]:
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        if self._placement is None:
            return _of_megatron(ranks, virtual_pipeline_size())
        return self._placement.placement(ranks).devices

    def _save(self, original: Callable, *args, **kwargs):
        set_argument(_MARK, self._devices())
        return original(*args, **kwargs)

    def _load(self, original: Callable, *args, **kwargs):
        result = original(*args, **kwargs)
        loaded, kind = result[0], result[-1]
        asks_for_arguments = inspect.signature(original).bind(*args, **kwargs).arguments.get("rank0", False)
        if loaded is not None and not asks_for_arguments and getattr(kind, "name", None) == "LEGACY":
            check_devices(loaded.get("args"), self._devices())
        return result


def check_devices(saved: Any, devices: tuple[int, ...]) -> None:
    """Raise an UnsupportedError if a checkpoint with the arguments ``saved`` has its stages on other ``devices``.

    A checkpoint without the mark of this package has Megatron's own placement. For another number of pipeline ranks,
    Megatron has its own message.
    """
    ranks = getattr(saved, "pipeline_model_parallel_size", None)
    if ranks != max(devices) + 1:
        return
    stock = _of_megatron(ranks, getattr(saved, "virtual_pipeline_model_parallel_size", None))
    saved_devices = tuple(getattr(saved, _MARK, stock))
    if saved_devices != devices:
        raise UnsupportedError(
            "wrong-file",
            f"the checkpoint has the stages of the model on pipeline ranks {', '.join(map(str, saved_devices))}, and this run "
            f"has them on {', '.join(map(str, devices))}; files of --ckpt-format torch fit one placement only, so load it "
            "under a schedule with that placement, and save it with --ckpt-format torch_dist",
        )


def _of_megatron(ranks: int, chunks: int | None) -> tuple[int, ...]:
    return tuple(stage % ranks for stage in range(ranks * (chunks or 1)))
