"""Start the collectives between the phases of a cut vocabulary. All ranks of the group must start them in the same
order.

Each function returns at once. ``wait()`` of its result makes the data usable. On a GPU it makes the current stream
wait. Use a process group without other traffic, because point-to-point messages in it could deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition
from megatron_pipemem.runtime.weight_gradients import Arriving


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Arriving:
    """Start sending the tensor of rank ``source`` of the group to ``tensor`` of all other ranks.

    It is the head's input, or a gradient.
    """
    return Arriving(tensor, dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True))


def gather_statistics(tensor: torch.Tensor, everyones: torch.Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start gathering the ranks' ``HeadMicrobatch.statistics`` in ``everyones``, ``[ranks, 3, tokens]``, on every rank.

    ``tensor`` has those of this rank, ``[3, tokens]``.
    """
    work = dist.all_gather_into_tensor(everyones.flatten(0, 1), tensor, group=group, async_op=True)
    return Arriving(everyones, work)


def reduce_sum(tensor: torch.Tensor, destination: int, group: dist.ProcessGroup) -> Arriving:
    """Start summing a tensor over the group, in place on rank ``destination`` of the group.

    It is an embedding output, or a gradient of the head's input. On the other ranks the result is ``None``, and
    ``tensor`` then has undefined values.
    """
    work = dist.reduce(tensor, dist.get_global_rank(group, destination), group=group, async_op=True)
    return Arriving(tensor if group.rank() == destination else None, work, tensor)


def all_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start summing a tensor over the group in place. Every rank gets the sum.

    If both the first and the last stage look up tokens, embeddings and their gradients are summed this way.
    """
    return Arriving(tensor, dist.all_reduce(tensor, group=group, async_op=True))


def gather_logits(local: torch.Tensor, partition: VocabularyPartition, group: dist.ProcessGroup) -> Arriving:
    """Start gathering the logits of all shards on every rank. ``joined_logits`` turns the result into one tensor.

    ``local`` has the logits of this rank's shard, ``[..., rows]``.
    """
    # Collectives need equal sizes, and shards may differ by a row.
    padded = torch.nn.functional.pad(local, (0, partition.largest - local.size(-1))).contiguous()
    parts = [torch.empty_like(padded) for _ in range(partition.shards)]
    return Arriving(parts, dist.all_gather(parts, padded, group=group, async_op=True))


def joined_logits(parts: Sequence[torch.Tensor], partition: VocabularyPartition) -> torch.Tensor:
    """Return the logits of the whole vocabulary, ``[..., vocab_size]``, from those that ``gather_logits`` has
    gathered.
    """
    return torch.cat([part[..., : len(partition.rows(shard))] for shard, part in enumerate(parts)], dim=-1)
