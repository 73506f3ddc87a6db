"""Context parallelism in sequence slices: the ranks share every slice, where Megatron lets them share whole sequences.

A slice has two equal parts per rank, of which rank r has one from the front and one from the back. So all ranks have
equally much causal attention in every slice:

    tokens      0 1 2 3 | 4 5 6 7        two slices, two ranks
    rank 0      0     3 | 4     7
    rank 1        1 2   |   5 6

A rank gathers the keys and values of a slice once, and keeps those of the whole sequence. Both of its parts attend to
all keys up to their own end, by attention without context parallelism. Attention with it, as Transformer Engine has it,
takes as many queries as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_pipemem.features.slices.megatron.documents import SlicedDocuments
from megatron_pipemem.features.slices.runtime import SlicePart, used_keys

_OF_WHOLE_BATCH = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
"""Entries of a batch that have no dimension of tokens."""


class ContextRanks:
    """The context-parallel ranks that share the slices of a step, and the place of this rank among them.

    ``own_bounds`` are ``(first token, end)`` of each slice. They count only this rank's tokens of a sequence.
    """

    def __init__(self, group: dist.ProcessGroup, own_bounds: Sequence[tuple[int, int]]):
        self.group, self.size, self.own_bounds = group, group.size(), own_bounds
        rank = group.rank()
        self.have_split = False
        """whether the forward step that runs now has got its tokens by ``split``"""
        self._places = rank, 2 * self.size - 1 - rank  # among the parts of a slice

    def ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return where this rank's parts of a slice begin and end in the whole sequence.

        ``begin`` and ``end`` count only this rank's tokens, as ``own_bounds`` do.
        """
        half = (end - begin) // 2
        return [(first, first + half) for first in (self.size * begin + place * half for place in self._places)]

    def split(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's tokens of a batch of whole sequences, in place of ``get_batch_on_this_cp_rank``."""
        self.have_split = True
        ranges = [part for bounds in self.own_bounds for part in self.ranges(*bounds)]

        def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
            dimension = 2 if name == "attention_mask" else 1
            return torch.cat([tensor.narrow(dimension, begin, end - begin) for begin, end in ranges], dimension)

        return {
            name: value if value is None or name in _OF_WHOLE_BATCH else own(name, value)
            for name, value in batch.items()
        }

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensor of all tokens of a slice, in their order. Its backward sums the gradients of all ranks."""
        # [tokens / ranks, ...] -> [ranks, 2, part, ...]
        parts = gather_from_sequence_parallel_region(own.contiguous(), group=self.group).unflatten(
            0, (self.size, 2, -1)
        )
        return torch.cat([parts[:, 0], parts[:, 1].flip(0)]).flatten(0, 1)

    def attend(
        self, forward: Callable, part: SlicePart, documents: Sequence[SlicedDocuments], *arguments: Any, **named: Any
    ) -> torch.Tensor:
        """Attend with this rank's two parts of a slice, in place of ``forward`` for all of its queries.

        ``documents`` are the packed ones of both parts, if there are any.
        """
        query, key, value, mask, *remaining = arguments
        outputs, first, since = [], 0, 0
        for number, (begin, end) in enumerate(self.ranges(part.begin, part.end)):
            if documents:
                since, named = documents[number].since, named | {"packed_seq_params": documents[number].seen}
            rows = slice(first, first := first + end - begin)
            rows_mask = None if mask is None else mask[..., rows, :end]
            # Transformer Engine takes no tensors that begin within their storage.
            keys, values = used_keys(key, since, end), used_keys(value, since, end)
            outputs.append(forward(query[rows].clone(), keys, values, rows_mask, *remaining, **named))
        return torch.cat(outputs)
