"""Older versions of the weights, kept beside Megatron's checkpoints.

A checkpoint holds the newest weights. Microbatches that were in flight when it was written are not saved: their data count as
not consumed, and a resumed run reads them and runs them forward again. But they used older weights, so every rank writes
those into the checkpoint's folder. Without such files a run begins a new stream with the one version it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_pipemem.features.asynchronous.runtime import WeightVersions
from megatron_pipemem.files import whole_file
from megatron_pipemem.mcore.agreement import gather, tell
from megatron_pipemem.mcore.loop_arguments import checkpoint_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedVersions:
    """Hold what a rank had when a checkpoint was written.

    Args:
        schedule: the family's name and options.
        batch: microbatches per step.
        before: batches that had been through the pipeline, as far as it matters.
        older: the older versions.
    """

    schedule: str
    batch: int
    before: int
    older: Mapping[int, Mapping[torch.dtype, torch.Tensor]]

    def fits(self, schedule: str, weights: WeightVersions) -> bool:
        """Return whether they are of the same schedule and of weights of the same size."""
        sizes = weights.sizes
        return self.schedule == schedule and all(
            {dtype: buffer.numel() for dtype, buffer in buffers.items()} == sizes for buffers in self.older.values()
        )


def save(saved_now: Callable[[], SavedVersions | None], original: Callable, iteration, *args, **kwargs):
    """Run in the place of ``save_checkpoint``: write what ``saved_now`` gives into the folder of a checkpoint that stays.

    Args:
        saved_now: gives what belongs beside a checkpoint of now.
        original: Megatron's function.
        iteration: of the checkpoint.
        args: further arguments of Megatron's.
        kwargs: the same by name.
    """
    result = original(iteration, *args, **kwargs)
    saved = saved_now()
    if saved is not None and not kwargs.get("non_persistent_ckpt", False):
        try:
            _write(saved, iteration)
        except (OSError, RuntimeError) as error:  # of torch; the checkpoint itself is whole, and can be resumed without
            logger.warning("%s; a run resumed here begins with the newest weights alone", error)
    return result


def load(loaded: Callable[[SavedVersions | None], None], original: Callable, *args, load_arg="load", **kwargs):
    """Run in the place of ``load_checkpoint``: tell ``loaded`` what stands beside the checkpoint that has been loaded, on
    all ranks the same or nothing.

    Args:
        loaded: is told.
        original: Megatron's function.
        args: further arguments of Megatron's.
        load_arg: the flag that names the checkpoint's folder.
        kwargs: further arguments of Megatron's, by name.
    """
    result = original(*args, load_arg=load_arg, **kwargs)
    if load_arg == "load":
        loaded(_read(result[0]) if result[0] else None)
    return result


def _file(purpose: str, iteration: int):
    return checkpoint_folder(purpose, iteration) / f"pipemem_weights_{dist.get_rank():05d}.pt"


def _write(saved: SavedVersions, iteration: int) -> None:
    path = _file("save", iteration)
    older = {version: list(buffers.values()) for version, buffers in saved.older.items()}
    kept = {"schedule": saved.schedule, "batch": saved.batch, "before": saved.before, "older": older}
    with whole_file(path) as beside:
        torch.save(kept, beside)


def _read(iteration: int) -> SavedVersions | None:
    path = _file("load", iteration)
    if not all(gather(path.is_file())):
        tell(
            logger,
            "no older versions of the weights stand beside the checkpoint, so the first microbatches use the newest, as at "
            "the start of a run",
            level=logging.WARNING,
        )
        return None
    entries = torch.load(path, map_location="cpu", weights_only=True)
    older = {version: {tensor.dtype: tensor for tensor in tensors} for version, tensors in entries.pop("older").items()}
    return SavedVersions(**entries, older=older)
