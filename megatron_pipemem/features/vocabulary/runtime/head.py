"""Compute of the LM head and its cross entropy what comes before the loss. ``head_gradients`` has what comes after.

One microbatch goes through a chain of objects, one per phase:

    scored = head.score(x, labels)                          # S: local logits and their statistics
    gathered = gather_statistics(scored.statistics).wait()
    done = combine(scored, gathered)                        # done.losses, then the gradients

Nothing here communicates, and nothing is recorded by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.features.vocabulary.runtime import kernels
from megatron_pipemem.features.vocabulary.runtime.microbatch import HeadMicrobatch
from megatron_pipemem.features.vocabulary.runtime.options import HeadOptions
from megatron_pipemem.features.vocabulary.runtime.partition import WeightShard


@dataclass(frozen=True)
class VocabularyHead:
    """One rank's share of the LM head. Bias, label smoothing and fp8 are not supported.

    Args:
        shard: of the head's matrix; the embedding's very shard when tied.
        options: the same on every rank.
    """

    shard: WeightShard
    options: HeadOptions = field(default_factory=HeadOptions)

    @torch.no_grad()
    def score(self, x: torch.Tensor, labels: torch.Tensor, *, for_backward: bool = True) -> HeadMicrobatch:
        """Run S: the logits of this rank's rows, and what the loss needs to know of them.

        Args:
            x: input of the head, ``[..., h]`` in the parameter's dtype, the same on every rank. Not modified, and must not be
                until the weight gradient has run.
            labels: ``[...]``. A label outside the vocabulary, for example -100, is ignored: loss 0, no gradient.
            for_backward: ``False`` for evaluation: nothing is kept for gradients.
        """
        if labels.shape != x.shape[:-1]:
            raise VocabularyError(
                "wrong-shape",
                f"labels of shape {tuple(labels.shape)} for an input of shape {tuple(x.shape)}: they need all of its "
                "dimensions but the last, in its order",
            )
        options, weight = self.options, self.shard.weight
        x = self._rows_of(x)
        local, owned = self.shard.locate(labels.reshape(-1))
        valid = ((labels >= 0) & (labels < self.shard.partition.vocab_size)).reshape(-1)
        tokens = x.size(0)
        statistics = torch.empty(3, tokens, dtype=torch.float32, device=x.device)
        batch = HeadMicrobatch(self.shard, options, x, labels.shape, local, owned, valid, statistics, for_backward)
        if for_backward and options.keep_logits:
            batch.logits = x.new_empty(tokens, weight.size(0))
        if for_backward and options.barriers == 1:
            batch.average = torch.empty_like(x)
        for piece in options.pieces(tokens):
            raw = torch.mm(x[piece], weight.t(), out=None if batch.logits is None else batch.logits[piece])
            batch.score(piece, raw)
        return batch

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return scaled and capped logits of this rank's rows, ``[..., rows]`` in the parameter's dtype, for inference.

        ``collectives.gather_logits`` makes the whole vocabulary's of them.
        """
        rows = self._rows_of(x)
        logits = rows.new_empty(rows.size(0), len(self.shard.rows))
        for piece in self.options.pieces(rows.size(0)):
            raw = rows[piece] @ self.shard.weight.t()
            logits[piece] = kernels.transform(raw, self.options.scale, self.options.softcap)
        return logits.view(*x.shape[:-1], logits.size(1))

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, h]``, without a graph."""
        parameter = self.shard.parameter
        if x.size(-1) != parameter.size(1) or x.dtype != parameter.dtype:
            raise VocabularyError(
                "wrong-shape",
                f"input of shape {tuple(x.shape)} in {x.dtype} for a head of hidden size {parameter.size(1)} in "
                f"{parameter.dtype}: both must agree",
            )
        return x.detach().reshape(-1, x.size(-1))
