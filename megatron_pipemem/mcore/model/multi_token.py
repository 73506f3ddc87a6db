"""Fit Megatron's multi-token prediction to schedules: its embedding's split backward, and forwards that run twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pipemem.mcore.model.linear import add_gradient
from megatron_pipemem.runtime.weight_gradients import (
    DeferredWeightGradient,
    WeightGradientQueue,
    current_queue,
    defers,
    is_early,
)


def split_embedding(original: Callable, embedding: VocabParallelEmbedding, input_: torch.Tensor) -> torch.Tensor:
    """Run in the place of ``VocabParallelEmbedding.forward``: leave the weight gradient of a copy of the embedding to W.

    The copy on the stage of multi-token prediction may be the head's weight too. Autograd would sum what both give it within
    one backward, so both are left to one W. Other embeddings, and those cut by tensor parallelism, are stock's.

    Args:
        original: the stock function.
        embedding: the module.
        input_: token numbers, ``[b, s]``.
    """
    queue = current_queue()
    if queue is None or not defers() or is_early(embedding.weight) or not torch.is_grad_enabled():
        return original(embedding, input_)
    changed = embedding.deterministic_mode or embedding.reduce_scatter_embeddings
    if embedding.tp_group.size() == 1 and not changed and getattr(embedding.weight, "shared", False):
        empty = embedding.weight.new_empty(0, requires_grad=True)
        return _SplitEmbedding.apply(empty, input_, queue, embedding)
    return original(embedding, input_)


class _SplitEmbedding(torch.autograd.Function):
    """Has an empty input that wants a gradient, so that autograd reaches it without knowing the weight."""

    @staticmethod
    def forward(
        ctx, empty: torch.Tensor, tokens: torch.Tensor, queue: WeightGradientQueue, embedding: VocabParallelEmbedding
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.queue, ctx.weight = queue, embedding.weight
        return torch.nn.functional.embedding(tokens, ctx.weight)

    @staticmethod
    def backward(ctx, output_gradient: torch.Tensor):
        (tokens,) = ctx.saved_tensors
        ctx.queue.put(_EmbeddingWeightGradient(tokens, output_gradient.detach(), ctx.weight))
        return None, None, None, None


@dataclass
class _EmbeddingWeightGradient(DeferredWeightGradient):
    tokens: torch.Tensor
    output_gradient: torch.Tensor
    weight: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.output_gradient

    def run(self) -> None:
        rows = self.weight.size(0)
        gradient = torch.ops.aten.embedding_dense_backward(self.output_gradient, self.tokens, rows, -1, False)
        add_gradient(self.weight, gradient)


@contextmanager
def logged_before() -> Iterator[None]:
    """Let what runs within this block, once more, log no losses of multi-token prediction."""
    tracker, MTPLossLoggingHelper.tracker = MTPLossLoggingHelper.tracker, {}
    try:
        yield
    finally:
        MTPLossLoggingHelper.tracker = tracker
