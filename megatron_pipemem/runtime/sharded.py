"""Keep this rank's shards of gathered tensors, and gather them again when they are needed whole.

Sequence parallelism gathers what a linear layer multiplies along the sequence. Whoever gathers calls ``remember``. Whoever
has to keep the gathered tensor for later asks ``shard_of`` and keeps the shard, which exists anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Arriving:
    """A tensor that may still be arriving.

    Args:
        tensor: complete after ``wait``.
        work: the communication, or ``None`` if the tensor is complete.
        source: what the communication reads, which must stay alive until it ends.
    """

    tensor: Any
    work: dist.Work | None = None
    source: Any = None

    def wait(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor.

    Args:
        tensor: the part. Transformer Engine's quantised tensors are no torch tensors.
        gather: starts to gather the parts of all ranks. ``Arriving`` itself for a tensor that is whole.
    """

    tensor: Any
    gather: Callable[[Any], Arriving]

    def begin(self) -> Arriving:
        return self.gather(self.tensor)


def gather_rows(shard: torch.Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start to gather ``[s/t, ...]`` of the ``t`` ranks of a group into ``[s, ...]``."""
    shard = shard.contiguous()
    whole = torch.empty((shard.size(0) * group.size(), *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
    return Arriving(whole, dist.all_gather_into_tensor(whole, shard, group=group, async_op=True), shard)


# A shard is kept no longer than the tensor that was gathered from it.
_shards: Any = WeakIdKeyDictionary()


def remember(whole: Any, shard: Shard) -> None:
    """Remember which shard a tensor was gathered from, as long as the tensor lives."""
    _shards[whole] = shard


def shard_of(whole: Any) -> Shard | None:
    """Return the shard that a tensor was gathered from, or ``None`` if it is not known."""
    return None if whole is None else _shards.get(whole)
