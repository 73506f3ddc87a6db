"""Start the collectives between the phases. All ranks of the group must start them in one order; nothing else communicates.

Each returns at once with the collective under way; ``wait()`` makes the result usable, on a GPU by making the current stream
wait. Use a process group that carries nothing else: point-to-point messages on the same one could wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition


@dataclass
class Pending[Result]:
    """A collective under way. Keeps its buffers alive until it is done.

    Args:
        work: waited for alone, it leaves the result to be taken later.
        result: gives it when ``work`` is done.
    """

    work: dist.Work
    result: Callable[[], Result]

    def wait(self) -> Result:
        """Return the collective's result. On a GPU it is ready for what is queued on the current stream from here on."""
        self.work.wait()
        return self.result()


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Send a tensor of one rank to all others of the group: the head's input, gradients.

    Args:
        tensor: of any shape, sent on rank ``source`` and filled on all others.
        source: number of the rank within the group.
        group: of the ranks.
    """
    work = dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True)
    return Pending(work, lambda: tensor)


def gather_statistics(tensor: torch.Tensor, everyones: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Gather ``HeadMicrobatch.statistics`` of all ranks: one message, not three reductions.

    Args:
        tensor: of this rank, ``[3, tokens]``.
        everyones: that is filled, ``[ranks, 3, tokens]``.
        group: of the ranks.
    """
    work = dist.all_gather_into_tensor(everyones.flatten(0, 1), tensor, group=group, async_op=True)
    return Pending(work, lambda: everyones)


def reduce_sum(tensor: torch.Tensor, destination: int, group: dist.ProcessGroup) -> Pending[torch.Tensor | None]:
    """Sum a tensor over the ranks, for one of them only: the embedding's output, the head's input gradient.

    The result is ``None`` on the others; what ``tensor`` holds there afterwards is undefined.

    Args:
        tensor: of any shape, the same on all ranks.
        destination: number of the rank within the group that gets the sum.
        group: of the ranks.
    """
    work = dist.reduce(tensor, dist.get_global_rank(group, destination), group=group, async_op=True)
    return Pending(work, lambda: tensor if group.rank() == destination else None)


def all_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Sum a tensor over the ranks, in place, where two stages look tokens up: embeddings, and their gradients."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return Pending(work, lambda: tensor)


def gather_logits(
    local: torch.Tensor, partition: VocabularyPartition, group: dist.ProcessGroup
) -> Pending[torch.Tensor]:
    """Gather the logits of the whole vocabulary, ``[..., vocab_size]``, on every rank.

    Args:
        local: what ``VocabularyHead.logits`` gave on this rank, ``[..., rows]``.
        partition: of the vocabulary's rows over the ranks.
        group: of the ranks.
    """
    # Collectives want equal sizes; shards may differ by a row.
    padded = torch.nn.functional.pad(local, (0, partition.largest - local.size(-1))).contiguous()
    parts = [torch.empty_like(padded) for _ in range(partition.shards)]
    work = dist.all_gather(parts, padded, group=group, async_op=True)
    return Pending(
        work,
        lambda: torch.cat([part[..., : len(partition.rows(shard))] for shard, part in enumerate(parts)], dim=-1),
    )
