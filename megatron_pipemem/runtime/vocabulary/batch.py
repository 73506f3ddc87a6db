"""Hold what the embedding and the head of a cut vocabulary read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Hold tokens and labels of all microbatches of a step.

    Args:
        tokens: ``[m, b, s]``.
        labels: ``[m, b, s]``; ``None`` if logits are wanted and no losses.
        looks_ahead: whether the last stage wants embeddings as well, of the tokens that follow: multi-token prediction.
        depths: how many tokens behind the next one the head predicts as well.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    looks_ahead: bool = False
    depths: int = 0

    @property
    def head_shape(self) -> tuple[int, int]:
        """``[(1 + depths) * s, b]``, those of all depths one behind the other."""
        _, b, s = self.tokens.shape
        return (1 + self.depths) * s, b

    def tokens_of(self, microbatch: int) -> torch.Tensor:
        """Return the tokens to look up, ``[b, s]``; with a last column of zeros, ``[b, s + 1]``, where the last stage looks
        ahead: Megatron reads token 0 behind the end.
        """
        tokens = self.tokens[microbatch]
        return torch.nn.functional.pad(tokens, (0, 1)) if self.looks_ahead else tokens

    def labels_of(self, microbatch: int) -> torch.Tensor:
        """Return the labels of all depths in ``head_shape``; what is behind the end is 0, as Megatron masks its loss."""
        labels = self.labels[microbatch]
        rolled = [torch.nn.functional.pad(labels[:, depth:], (0, depth)) for depth in range(1 + self.depths)]
        return torch.cat(rolled, dim=1).t().contiguous()
