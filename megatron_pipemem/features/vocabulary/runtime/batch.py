"""Hold what the embedding and the head of a cut vocabulary read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """Hold tokens and labels of all microbatches of a step, which may differ in ``b`` and ``s``, or of all their slices.

    Args:
        tokens: ``[b, s]`` of every microbatch.
        labels: likewise; ``None`` if logits are wanted and no losses.
        looks_ahead: whether the last stage wants embeddings as well, of the tokens that follow: multi-token prediction.
        depths: how many tokens behind the next one the head predicts as well.
    """

    tokens: Sequence[torch.Tensor]
    labels: Sequence[torch.Tensor] | None
    looks_ahead: bool = False
    depths: int = 0

    def cut(self, bounds: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch with every sequence in slices; ``bounds`` has the first token, and the one behind, of each."""

        def slices(of: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [whole[:, begin:end] for whole in of for begin, end in bounds]

        return replace(self, tokens=slices(self.tokens), labels=None if self.labels is None else slices(self.labels))

    def empty_for_head(self, microbatch: int, *further: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of a head's layout, ``[(1 + depths) * s, b, *further]``, those of all depths one behind the
        other.

        Args:
            microbatch: its number.
            further: sizes behind the tokens'.
            dtype: of the tensor.
        """
        tokens = self.tokens[microbatch]
        b, s = tokens.shape
        return torch.empty((1 + self.depths) * s, b, *further, dtype=dtype, device=tokens.device)

    def tokens_of(self, microbatch: int) -> torch.Tensor:
        """Return the tokens to look up, ``[b, s]``; with a last column of zeros, ``[b, s + 1]``, where the last stage looks
        ahead: Megatron reads token 0 behind the end.
        """
        tokens = self.tokens[microbatch]
        return torch.nn.functional.pad(tokens, (0, 1)) if self.looks_ahead else tokens

    def labels_of(self, microbatch: int) -> torch.Tensor:
        """Return the labels of all depths in the head's layout; what is behind the end is 0, as Megatron masks its loss."""
        assert self.labels is not None
        labels = self.labels[microbatch]
        rolled = [torch.nn.functional.pad(labels[:, depth:], (0, depth)) for depth in range(1 + self.depths)]
        return torch.cat(rolled, dim=1).t().contiguous()
