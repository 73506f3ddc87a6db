"""Cut the embedding matrix into shards of rows, one per rank, and look tokens up where their rows are.

Embedding and head share one partition, which is all that tying takes. Forward: ``partial = embedding.forward(tokens)`` on every
rank, then ``collectives.reduce_sum`` to the rank of the first stage. Backward: ``collectives.broadcast`` of the gradient of
the output from there, then ``embedding.weight_gradient(...)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient, gradient_of


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


@dataclass(frozen=True)
class VocabularyEmbedding:
    """One rank's share of the input embedding."""

    shard: WeightShard

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of this rank's tokens and zeros for all others: ``[...] -> [..., h]`` in the
        parameter's dtype.

        One rank contributes to every token, so the sum over the ranks is exact in any dtype.

        Raises:
            VocabularyError: for a token outside the vocabulary, if the tokens are on the CPU. On a GPU looking would stall
                it; such a token is embedded as zeros, as Megatron's tensor-parallel embedding does.
        """
        vocab_size = self.shard.partition.vocab_size
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = (int(end) for end in torch.aminmax(tokens))
            if low < 0 or high >= vocab_size:
                raise VocabularyError(
                    "token-range",
                    f"tokens from {low} to {high} in a vocabulary of {vocab_size}: check the tokenizer against the model",
                )
        if not self.shard.rows:
            return self.shard.parameter.new_zeros(*tokens.shape, self.shard.parameter.size(1))
        local, owned = self.shard.locate(tokens)
        return torch.nn.functional.embedding(local, self.shard.weight).masked_fill_(~owned.unsqueeze(-1), 0)

    def weight_gradient(self, tokens: torch.Tensor, output_gradient: torch.Tensor) -> EmbeddingWeightGradient:
        """Return the weight gradient of one microbatch, to run now or later.

        Args:
            tokens: those of ``forward``.
            output_gradient: gradient of the whole embedding's output, ``[..., h]``, the same on every rank.
        """
        if output_gradient.shape[:-1] != tokens.shape:
            raise VocabularyError(
                "wrong-shape",
                f"gradient of shape {tuple(output_gradient.shape)} for tokens of shape {tuple(tokens.shape)}: "
                "it needs the tokens' shape and the hidden size",
            )
        return EmbeddingWeightGradient(self.shard, tokens.detach(), output_gradient.detach())


@dataclass(frozen=True, eq=False)
class EmbeddingWeightGradient(DeferredWeightGradient):
    """Adds a microbatch's gradient to the rows of this rank's tokens, in the dtype that gradients accumulate in.

    On a GPU the order of the sums of a token that occurs often varies, unless ``torch.use_deterministic_algorithms`` is on.

    Args:
        shard: rows of this rank.
        tokens: of the microbatch, of any shape.
        output_gradient: gradient of the embedding's output, the shape of the tokens and ``h``.
    """

    shard: WeightShard
    tokens: torch.Tensor
    output_gradient: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what waits with it, for the activation ledger."""
        return self.tokens, self.output_gradient

    @torch.no_grad()
    def run(self) -> None:
        gradient = self.shard.gradient
        if gradient is None or not self.shard.rows:
            return
        local, owned = self.shard.locate(self.tokens.reshape(-1))
        # Foreign tokens add zeros. Spread over all rows, or every one of them would contend for the same.
        rows = torch.where(owned, local, self.tokens.reshape(-1).remainder(len(self.shard.rows)))
        values = self.output_gradient.reshape(-1, gradient.size(1)).to(gradient.dtype, copy=True)
        gradient.index_add_(0, rows, values.masked_fill_(~owned.unsqueeze(-1), 0))
