"""Start the collectives between the phases. All ranks of the group must start them in one order.

Each function returns at once with the running collective. ``wait()`` makes the result usable; on a GPU it makes the current
stream wait. Use a process group without other traffic, because point-to-point messages in it could deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition


@dataclass
class Pending[Result]:
    """A running collective, which keeps its buffers alive. ``result`` returns its result after ``work``."""

    work: dist.Work
    result: Callable[[], Result]

    def wait(self) -> Result:
        """Return the collective's result. On a GPU it is ready for work that the current stream gets from now on."""
        self.work.wait()
        return self.result()


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Send a tensor of rank ``source`` of the group to all others: the head's input, or gradients."""
    work = dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True)
    return Pending(work, lambda: tensor)


def gather_statistics(tensor: torch.Tensor, everyones: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Gather ``HeadMicrobatch.statistics`` of all ranks, ``[3, tokens]`` each, in one message into ``[ranks, 3, tokens]``."""
    work = dist.all_gather_into_tensor(everyones.flatten(0, 1), tensor, group=group, async_op=True)
    return Pending(work, lambda: everyones)


def reduce_sum(tensor: torch.Tensor, destination: int, group: dist.ProcessGroup) -> Pending[torch.Tensor | None]:
    """Sum a tensor over the ranks for rank ``destination``: the embedding's output, or the head's input gradient.

    On the other ranks the result is ``None``, and the content of ``tensor`` is undefined.
    """
    work = dist.reduce(tensor, dist.get_global_rank(group, destination), group=group, async_op=True)
    return Pending(work, lambda: tensor if group.rank() == destination else None)


def all_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Sum a tensor over the ranks in place: embeddings or their gradients, if two stages look up tokens."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return Pending(work, lambda: tensor)


def gather_logits(
    local: torch.Tensor, partition: VocabularyPartition, group: dist.ProcessGroup
) -> Pending[torch.Tensor]:
    """Gather the logits of the whole vocabulary, ``[..., vocab_size]``, on every rank, from ``[..., rows]`` of each."""
    # Collectives need equal sizes, and shards may differ by a row.
    padded = torch.nn.functional.pad(local, (0, partition.largest - local.size(-1))).contiguous()
    parts = [torch.empty_like(padded) for _ in range(partition.shards)]
    work = dist.all_gather(parts, padded, group=group, async_op=True)
    return Pending(
        work,
        lambda: torch.cat([part[..., : len(partition.rows(shard))] for shard, part in enumerate(parts)], dim=-1),
    )
