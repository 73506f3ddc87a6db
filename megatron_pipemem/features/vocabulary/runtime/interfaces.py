"""Define what the vocabulary passes need of the model on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_pipemem.features.vocabulary.runtime.head_gradients import Normalised
from megatron_pipemem.features.vocabulary.runtime.microbatch import HeadMicrobatch
from megatron_pipemem.features.vocabulary.runtime.partition import VocabularyPartition
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient


class ShardedLayers(Protocol):
    """This rank's shards of embedding and head."""

    partition: VocabularyPartition

    @property
    def hidden_size(self) -> int:
        """Return the channels of the model."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the element type of the shards."""

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``VocabularyEmbedding.forward``."""

    def embedding_gradient(self, tokens: torch.Tensor, output_gradient: torch.Tensor) -> DeferredWeightGradient:
        """See ``VocabularyEmbedding.weight_gradient``."""

    def score(self, x: torch.Tensor, labels: torch.Tensor | None, for_backward: bool) -> HeadMicrobatch | torch.Tensor:
        """Score a microbatch, as ``VocabularyHead.score`` does; without labels, return its logits.

        Args:
            x: the head's input, ``[s, b, h]``.
            labels: ``[s, b]``, or ``None``.
            for_backward: whether gradients will be asked for.
        """


class HeadStage(Protocol):
    """Define what the stage before the head does for it."""

    def gather_head_input(self, output: torch.Tensor) -> torch.Tensor:
        """Return the head's input, ``[s, b, h]``, from what this tensor-parallel rank has of it."""

    def scatter_head_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the stage's output, from this pipeline's part of the gradient of the head's input."""

    def look_ahead(self, microbatch: int, embeddings: torch.Tensor) -> None:
        """Take the embeddings of a microbatch that is about to run forward, ``[b, s + 1, h]``, where it looks ahead."""

    def ahead_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of what ``look_ahead`` was given, when the stage has run backward."""

    def loss(self, microbatch: int, scored: Sequence[Normalised]) -> torch.Tensor | None:
        """Take the token losses of a microbatch, fp32 as ``Batch.labels_of``.

        Args:
            microbatch: its number, or that of its last slice.
            scored: the microbatch, or all slices of it in order.

        Returns:
            The training loss's gradient by the losses, those of slices one behind the other, if it trains.
        """

    def take_logits(self, microbatch: int, logits: Sequence[torch.Tensor]) -> None:
        """Take the logits, ``[s, b, vocabulary]``, of a microbatch without labels, or of all its slices."""
