"""Refuse checkpoints that only runs with the placement of the run that saved them can load.

A checkpoint of ``--ckpt-format torch`` has a file per rank, with the rank's chunks as they are. Megatron loads a chunk by
its number and its layers by their numbers within the chunk, and skips chunks and weights that the file lacks. Under
another placement the model would get other layers' weights, or keep its first ones.

Without ``--dist-ckpt-optim-fully-reshardable``, a ``torch_dist`` checkpoint has the weights by their names, but the
distributed optimizer's state by rank and gradient buffer. Under another placement it has the shapes of other weights,
or, where these are equal, their moments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.loop_arguments import argument, set_argument
from megatron_pipemem.mcore.model.placement import ChunkPlacement, virtual_pipeline_size
from megatron_pipemem.mcore.symbols import LOAD_FILES, SAVE, Feature, Replacements
from megatron_pipemem.model.cut_flags import RESHARDABLE

_MARK = "pipemem_devices"
"""The attribute of Megatron's arguments, which a checkpoint holds, with the device of every stage."""


class FilesOfRanks(Feature):
    """Marks checkpoints with the placement of the run, and refuses to load files of ranks with another placement."""

    def __init__(self, placement: ChunkPlacement | None = None):
        self._placement = placement  # ``None`` if the run has Megatron's own

    def replacements(self) -> Replacements:
        return [(SAVE, self._save), (LOAD_FILES, self._load)]

    def _device_of_stages(self) -> tuple[int, ...]:
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        if self._placement is None:
            return _of_megatron(ranks, virtual_pipeline_size())
        return self._placement.placement(ranks).devices

    def _save(self, original: Callable, *args, **kwargs):
        set_argument(_MARK, self._device_of_stages())
        return original(*args, **kwargs)

    def _load(self, original: Callable, *args, **kwargs):
        result = original(*args, **kwargs)
        state, _, is_release, kind = result
        asks_for_arguments = inspect.signature(original).bind(*args, **kwargs).arguments.get("rank0", False)
        kind = getattr(kind, "name", None)
        if state is None:
            return result
        if kind == "LEGACY" and not asks_for_arguments:
            check_devices(state.get("args"), self._device_of_stages(), _FILES)
        if kind == "GLOBAL" and asks_for_arguments and _loads_optimizer_by_rank(state, is_release):
            check_devices(state.get("args"), self._device_of_stages(), _OPTIMIZER_BY_RANK)
        return result


def check_devices(saved: Any, devices: tuple[int, ...], remedy: str) -> None:
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
            f"has them on {', '.join(map(str, devices))}; {remedy}",
        )


_FILES = (
    "files of --ckpt-format torch fit one placement only, so load it under a schedule with that placement, and save it "
    "with --ckpt-format torch_dist"
)
_OPTIMIZER_BY_RANK = (
    "it has the distributed optimizer's state by rank, so load it once under the schedule that saved it, with "
    f"--{RESHARDABLE}, train a step and save, and load that checkpoint here; or pass --no-load-optim to begin with a fresh "
    "optimizer"
)


def _loads_optimizer_by_rank(state: dict[str, Any], is_release: bool) -> bool:
    """Return whether Megatron's loop is about to load a distributed optimizer's state that is saved by rank.

    The conditions are those of Megatron's ``load_checkpoint``. ``state`` is the checkpoint's common state. Before
    Megatron has its arguments, it reads the checkpoint's arguments only.
    """
    keeps_own_state = is_release or argument("finetune") or argument("no_load_optim")
    if keeps_own_state or not argument("use_distributed_optimizer"):
        return False
    form = (load_content_metadata(preloaded_state_dict=state) or {}).get("distrib_optim_sharding_type")
    by_rank = form is not None and form not in DistributedOptimizer.checkpoint_fully_reshardable_formats
    return by_rank and not getattr(state.get("args"), "no_save_optim", False)


def _of_megatron(ranks: int, chunks: int | None) -> tuple[int, ...]:
    return tuple(stage % ranks for stage in range(ranks * (chunks or 1)))
