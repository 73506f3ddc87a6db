"""Cut the embedding matrix by rows into shards, one per rank, and look up each token on the rank that has its row.

Embedding and LM head are cut in the same way, so that tied weights need only one shard. Forward: every rank calls
``partial = embedding(tokens)``, then ``collectives.reduce_sum`` sums ``partial`` on the rank of the first
stage. Backward: that rank sends the gradient of the sum with ``collectives.broadcast``, then every rank calls
``embedding.add_weight_gradient(...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.runtime.weight_gradients import gradient_of, is_plain


@dataclass(frozen=True)
class VocabularyPartition:
    """The cut of a vocabulary into contiguous shards of rows, in rank order, as by ``torch.tensor_split``.

    If the number of ranks does not divide the number of rows, the first shards have one row more than the others.
    """

    vocab_size: int  # rows of the whole matrix, padding rows included
    shards: int  # number of ranks; with fewer rows than ranks, some shards are empty

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.shards < 1:
            raise VocabularyError(
                "bad-number",
                f"a vocabulary of {self.vocab_size} rows over {self.shards} ranks: both numbers must be at least 1",
            )

    def rows(self, shard: int) -> range:
        """Return the numbers of a shard's rows in the whole matrix."""
        if not 0 <= shard < self.shards:
            raise VocabularyError(
                "bad-number", f"shard {shard} of {self.shards}: give the rank within the group, counted from 0"
            )
        size, larger = divmod(self.vocab_size, self.shards)
        start = shard * size + min(shard, larger)
        return range(start, start + size + (shard < larger))

    @property
    def largest(self) -> int:
        """The number of rows of the largest shard."""
        return -(-self.vocab_size // self.shards)


@dataclass(frozen=True, eq=False)
class WeightShard:
    """One rank's rows of the embedding or head matrix. Tied embeddings and heads have the same ``parameter``."""

    parameter: torch.nn.Parameter  # ``[rows, h]``; its gradient goes to ``main_grad`` if it exists, else to ``grad``
    partition: VocabularyPartition
    index: int  # the number of this rank in the group

    def __post_init__(self) -> None:
        num_rows = len(self.rows)
        if self.parameter.dim() != 2 or self.parameter.size(0) != num_rows:
            raise VocabularyError(
                "wrong-shape",
                f"shard {self.index} of {self.partition} stores a matrix of {num_rows} rows, but the parameter has "
                f"shape {tuple(self.parameter.shape)}; cut the whole matrix with torch.tensor_split()",
            )

    @property
    def rows(self) -> range:
        return self.partition.rows(self.index)

    @property
    def weight(self) -> torch.Tensor:
        """The parameter, detached from autograd."""
        return self.parameter.detach()

    @contextmanager
    def adding_gradient(self) -> Iterator[torch.Tensor]:
        """Yield a tensor, ``[rows, h]``, to which the ``with`` block adds a gradient of the parameter.

        It is the tensor in which the parameter's gradient accumulates. For a parameter with hooks it is a new one, which
        autograd adds afterwards. Do not call this for a frozen parameter.
        """
        if is_plain(self.parameter):
            yield gradient_of(self.parameter)
            return
        gradient = torch.zeros_like(self.parameter)
        yield gradient
        with torch.enable_grad():
            self.parameter.view_as(self.parameter).backward(gradient)

    def locate(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's row within this shard, or 0 if another has the token, and a mask of this shard's tokens."""
        rows = self.rows
        owned = (tokens >= rows.start) & (tokens < rows.stop)
        return torch.where(owned, tokens - rows.start, 0), owned


class VocabularyEmbedding(torch.nn.Module):
    """One rank's rows of the input embedding.

    It is a module, because Megatron gathers a module's parameters before its forward (``--overlap-param-gather``).
    """

    def __init__(self, shard: WeightShard):
        super().__init__()
        self.shard, self.weight = shard, shard.parameter

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens in this rank's rows, and zeros for all others: ``[...] -> [..., h]``.

        Only one rank has a token's row, so the sum over the ranks is exact in any dtype. On the CPU, a token outside
        the vocabulary raises a VocabularyError. On a GPU such a check would block the host. So such a token gets zeros
        there, as in Megatron's tensor-parallel embedding.
        """
        vocab_size = self.shard.partition.vocab_size
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = (int(end) for end in torch.aminmax(tokens))
            if low < 0 or high >= vocab_size:
                raise VocabularyError(
                    "token-range",
                    f"tokens go from {low} to {high}, but the vocabulary has {vocab_size}; check the tokenizer",
                )
        if not self.shard.rows:
            return self.weight.new_zeros(*tokens.shape, self.weight.size(1))
        local, owned = self.shard.locate(tokens)
        return torch.nn.functional.embedding(local, self.shard.weight).masked_fill_(~owned.unsqueeze(-1), 0)

    @torch.no_grad()
    def add_weight_gradient(self, tokens: torch.Tensor, output_gradient: torch.Tensor) -> None:
        """Add the weight gradient of one microbatch for this rank's rows to the parameter's gradient.

        ``output_gradient``, ``[..., h]``, is the same on every rank, and summed in the dtype of the parameter's
        gradient. On a GPU, the sums for a token that occurs several times have no fixed order unless
        ``torch.use_deterministic_algorithms`` is on.
        """
        if output_gradient.shape[:-1] != tokens.shape:
            raise VocabularyError(
                "wrong-shape",
                f"gradient of shape {tuple(output_gradient.shape)} for tokens of shape {tuple(tokens.shape)}: "
                "give a gradient with the tokens' shape and the hidden size",
            )
        if not self.weight.requires_grad:
            return
        with self.shard.adding_gradient() as gradient:
            if not self.shard.rows:
                return
            tokens = tokens.reshape(-1)
            local, owned = self.shard.locate(tokens)
            # Tokens of other shards add zeros. They are spread over all rows, or all would contend for one.
            rows = torch.where(owned, local, tokens.remainder(len(self.shard.rows)))
            values = output_gradient.reshape(-1, gradient.size(1)).to(gradient.dtype, copy=True)
            gradient.index_add_(0, rows, values.masked_fill_(~owned.unsqueeze(-1), 0))
