"""Start the collectives between the phases of a cut vocabulary. All ranks of the group must start them in the same
order.

Each function returns at once. ``wait()`` of its result makes the data usable. On a GPU it makes the current stream
wait. Use a process group without other traffic, because point-to-point messages in it could deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition


@dataclass
class Pending[Result]:
    """A collective that has been started. It keeps the buffers alive. ``result()`` returns the data after
    ``work.wait()``.
    """

    work: dist.Work
    result: Callable[[], Result]

    def wait(self) -> Result:
        """Return the data of the collective. On a GPU, kernels that the current stream gets from now on can use
        them.
        """
        self.work.wait()
        return self.result()


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Start sending the tensor of rank ``source`` of the group to ``tensor`` of all other ranks.

    It is the head's input, or a gradient.
    """
    work = dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True)
    return Pending(work, lambda: tensor)


def gather_statistics(tensor: torch.Tensor, everyones: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Start gathering the ranks' ``HeadMicrobatch.statistics`` in ``everyones``, ``[ranks, 3, tokens]``, on every rank.

    ``tensor`` has those of this rank, ``[3, tokens]``.
    """
    work = dist.all_gather_into_tensor(everyones.flatten(0, 1), tensor, group=group, async_op=True)
    return Pending(work, lambda: everyones)


def reduce_sum(tensor: torch.Tensor, destination: int, group: dist.ProcessGroup) -> Pending[torch.Tensor | None]:
    """Start summing a tensor over the group, in place on rank ``destination`` of the group.

    It is an embedding output, or a gradient of the head's input. On the other ranks the result is ``None``, and
    ``tensor`` then has undefined values.
    """
    work = dist.reduce(tensor, dist.get_global_rank(group, destination), group=group, async_op=True)
    return Pending(work, lambda: tensor if group.rank() == destination else None)


def all_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Start summing a tensor over the group in place. Every rank gets the sum.

    If both the first and the last stage look up tokens, embeddings and their gradients are summed this way.
    """
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return Pending(work, lambda: tensor)


def gather_logits(
    local: torch.Tensor, partition: VocabularyPartition, group: dist.ProcessGroup
) -> Pending[torch.Tensor]:
    """Start gathering the logits of all shards, ``[..., rows]`` each, into ``[..., vocab_size]`` on every rank.

    ``local`` has the logits of this rank's shard.
    """
    # Collectives need equal sizes, and shards may differ by a row.
    padded = torch.nn.functional.pad(local, (0, partition.largest - local.size(-1))).contiguous()
    parts = [torch.empty_like(padded) for _ in range(partition.shards)]
    work = dist.all_gather(parts, padded, group=group, async_op=True)
    return Pending(
        work,
        lambda: torch.cat([part[..., : len(partition.rows(shard))] for shard, part in enumerate(parts)], dim=-1),
    )
