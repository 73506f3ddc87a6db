"""Save the older versions of the weights with Megatron's checkpoints, and load them.

A checkpoint has the newest weights. Microbatches in flight are not saved: their data count as not consumed, and a
resumed run reads them and runs their forwards again. These forwards used older weights. So every rank writes its older
weights to the checkpoint's folder. Without such files, a resumed run begins with the newest weights as its only
version.
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
    """The older weight versions of a rank when a checkpoint is written, and the number of batches before it."""

    schedule: str  # the name of the family, with its options
    batch: int  # microbatches per step
    before: int  # batches that have passed through the pipeline
    older: Mapping[int, Mapping[torch.dtype, torch.Tensor]]  # by version number, the buffers of each older version

    def fits(self, schedule: str, weights: WeightVersions) -> bool:
        """Return whether the saved versions are of this schedule and have the sizes of ``weights``."""
        sizes = weights.sizes
        return self.schedule == schedule and all(
            {dtype: buffer.numel() for dtype, buffer in buffers.items()} == sizes for buffers in self.older.values()
        )


def save(saved_now: Callable[[], SavedVersions | None], original: Callable, iteration, *args, **kwargs):
    """Save a checkpoint by ``original`` (``save_checkpoint``). Write older versions of the weights to its folder.

    ``saved_now`` returns these versions, or ``None`` if no step has run. Non-persistent checkpoints get no file. If the
    file cannot be written, a warning is logged and the checkpoint stays valid.
    """
    result = original(iteration, *args, **kwargs)
    saved = saved_now()
    if saved is not None and not kwargs.get("non_persistent_ckpt", False):
        try:
            _write(saved, iteration)
        except (OSError, RuntimeError) as error:  # of torch; the checkpoint itself is whole, and can be resumed without
            logger.warning("%s; a run that resumes from this checkpoint begins with the newest weights alone", error)
    return result


def load(loaded: Callable[[SavedVersions | None], None], original: Callable, *args, load_arg="load", **kwargs):
    """Load a checkpoint by ``original`` (``load_checkpoint``). Pass the older versions in its folder to ``loaded``.

    ``loaded`` gets ``None`` on all ranks if there is no checkpoint, or if the file of any rank is missing. ``load_arg``
    is the name of the flag with the folder. If it is not ``load`` (but ``pretrained_checkpoint``), ``loaded`` is not
    called.
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
            "a rank has no older weights in the checkpoint's folder, so the first microbatches use the newest weights, as "
            "at the start of a run",
            level=logging.WARNING,
        )
        return None
    entries = torch.load(path, map_location="cpu", weights_only=True)
    older = {version: {tensor.dtype: tensor for tensor in tensors} for version, tensors in entries.pop("older").items()}
    return SavedVersions(**entries, older=older)
