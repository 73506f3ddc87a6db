"""Say which rank owns which rows of the vocabulary.

Embedding and head share one partition, which is all that tying takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.runtime.weight_gradients import gradient_of


@dataclass(frozen=True)
class VocabularyPartition:
    """A vocabulary cut into contiguous shards, one per rank of a process group, in rank order: ``torch.tensor_split``.

    The first shards own one row more than the others where the ranks do not divide the rows.

    Args:
        vocab_size: rows of the whole embedding matrix. Rows that a model has added to a tokenizer's vocabulary count as any
            others: an unsharded softmax includes them too.
        shards: number of ranks; no divisor of anything. With fewer rows than ranks some shards are empty.
    """

    vocab_size: int
    shards: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.shards < 1:
            raise VocabularyError(
                "bad-number",
                f"a vocabulary of {self.vocab_size} rows over {self.shards} ranks: both numbers must be at least 1",
            )

    def rows(self, shard: int) -> range:
        """Return the rows that a shard owns."""
        if not 0 <= shard < self.shards:
            raise VocabularyError(
                "bad-number", f"shard {shard} of {self.shards}: give the rank within the group, counted from 0"
            )
        each, larger = divmod(self.vocab_size, self.shards)
        start = shard * each + min(shard, larger)
        return range(start, start + each + (shard < larger))

    @property
    def largest(self) -> int:
        """Rows of the largest shard."""
        return -(-self.vocab_size // self.shards)


@dataclass(frozen=True, eq=False)
class WeightShard:
    """One rank's rows of the embedding matrix.

    Args:
        parameter: ``[rows, h]``. Its gradient goes to ``main_grad`` if it has that, else to ``grad``; a parameter that
            does not require a gradient gets none. Tied layers are given the same parameter.
        partition: of the whole matrix.
        index: this rank's place in the group.
    """

    parameter: torch.nn.Parameter
    partition: VocabularyPartition
    index: int

    def __post_init__(self) -> None:
        wanted = len(self.rows)
        if self.parameter.dim() != 2 or self.parameter.size(0) != wanted:
            raise VocabularyError(
                "wrong-shape",
                f"shard {self.index} of {self.partition} stores a matrix of {wanted} rows, the parameter given is of "
                f"shape {tuple(self.parameter.shape)}: cut the whole matrix with torch.tensor_split()",
            )

    @property
    def rows(self) -> range:
        return self.partition.rows(self.index)

    @property
    def weight(self) -> torch.Tensor:
        """The rows that this rank owns."""
        return self.parameter.detach()

    @property
    def gradient(self) -> torch.Tensor | None:
        """Return where the gradient of ``weight`` accumulates; ``None`` for a frozen parameter."""
        return gradient_of(self.parameter) if self.parameter.requires_grad else None

    def locate(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of every token within this shard, 0 for those of other shards, and which tokens this shard
        owns.
        """
        rows = self.rows
        owned = (tokens >= rows.start) & (tokens < rows.stop)
        return torch.where(owned, tokens - rows.start, 0), owned
