"""Say which rank owns which rows of the vocabulary.

Embedding and head share one partition, which is all that tying takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_pipemem.errors import VocabularyError


@dataclass(frozen=True)
class VocabularyPartition:
    """A vocabulary cut into contiguous shards, one per rank of a process group, in rank order.

    Args:
        vocab_size: rows of the whole embedding matrix. Rows that a model has added to a tokenizer's vocabulary count as any
            others: an unsharded softmax includes them too.
        shards: number of ranks; no divisor of anything. With fewer rows than ranks some shards are empty.
        padded: ``False`` lets the first shards own one row more than the others; ``True`` gives every rank equally many
            rows of storage, of which those past the vocabulary's end stay zero and take part in nothing.
    """

    vocab_size: int
    shards: int
    padded: bool = False

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.shards < 1:
            raise VocabularyError(
                f"a vocabulary of {self.vocab_size} rows over {self.shards} ranks: both numbers must be at least 1"
            )

    def rows(self, shard: int) -> range:
        """Return the rows that a shard owns."""
        if not 0 <= shard < self.shards:
            raise VocabularyError(f"shard {shard} of {self.shards}: give the rank within the group, counted from 0")
        if self.padded:
            each = self.largest
            return range(min(shard * each, self.vocab_size), min((shard + 1) * each, self.vocab_size))
        each, larger = divmod(self.vocab_size, self.shards)
        start = shard * each + min(shard, larger)
        return range(start, start + each + (shard < larger))

    @property
    def largest(self) -> int:
        """Rows of the largest shard."""
        return -(-self.vocab_size // self.shards)

    def stored_rows(self, shard: int) -> int:
        """Return the rows of a shard's parameter, zero padding included. Between ranks they differ by one at most."""
        return self.largest if self.padded else len(self.rows(shard))

    def split(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the copies of the shards of a whole matrix ``[vocab_size, h]``."""
        if weight.size(0) != self.vocab_size:
            raise VocabularyError(f"a matrix of {weight.size(0)} rows cannot be a vocabulary of {self.vocab_size}")
        shards = []
        for shard in range(self.shards):
            rows = self.rows(shard)
            piece = weight.new_zeros(self.stored_rows(shard), *weight.shape[1:])
            piece[: len(rows)] = weight[rows.start : rows.stop]
            shards.append(piece)
        return tuple(shards)

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole matrix of all shards, in order: the inverse of ``split``."""
        if len(shards) != self.shards:
            raise VocabularyError(f"{len(shards)} shards given, the partition has {self.shards}")
        return torch.cat([piece[: len(self.rows(shard))] for shard, piece in enumerate(shards)])


@dataclass(frozen=True, eq=False)
class WeightShard:
    """One rank's rows of the embedding matrix.

    Args:
        parameter: ``[stored rows, h]``. Its gradient goes to ``main_grad`` if it has that, else to ``grad``; a parameter that
            does not require a gradient gets none. Tied layers are given the same parameter.
        partition: of the whole matrix.
        index: this rank's place in the group.
    """

    parameter: torch.nn.Parameter
    partition: VocabularyPartition
    index: int

    def __post_init__(self) -> None:
        wanted = self.partition.stored_rows(self.index)
        if self.parameter.dim() != 2 or self.parameter.size(0) != wanted:
            raise VocabularyError(
                f"shard {self.index} of {self.partition} stores a matrix of {wanted} rows, the parameter given is of "
                f"shape {tuple(self.parameter.shape)}: cut the whole matrix with VocabularyPartition.split()"
            )

    @property
    def rows(self) -> range:
        return self.partition.rows(self.index)

    @property
    def weight(self) -> torch.Tensor:
        """The rows that this rank owns, without padding."""
        return self.parameter.detach()[: len(self.rows)]

    @property
    def gradient(self) -> torch.Tensor | None:
        """Return where the gradient of ``weight`` accumulates; ``None`` for a frozen parameter."""
        if not self.parameter.requires_grad:
            return None
        whole = getattr(self.parameter, "main_grad", None)
        if whole is None:
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            whole = self.parameter.grad
        return whole[: len(self.rows)]

    def locate(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of every token within this shard, 0 for those of other shards, and which tokens this shard
        owns.
        """
        rows = self.rows
        owned = (tokens >= rows.start) & (tokens < rows.stop)
        return torch.where(owned, tokens - rows.start, 0), owned
