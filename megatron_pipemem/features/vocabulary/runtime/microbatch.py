"""Hold what one rank keeps of one microbatch between the phases of the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_pipemem.features.vocabulary.runtime import kernels
from megatron_pipemem.features.vocabulary.runtime.options import HeadOptions
from megatron_pipemem.features.vocabulary.runtime.partition import WeightShard


@dataclass(eq=False)
class HeadMicrobatch:
    """State of the head, per token of one microbatch.

    Args:
        shard: of the head's matrix, this rank's.
        options: of the head.
        x: input, ``[tokens, h]``.
        shape: of the labels as they were given.
        local: the label's row within this shard, 0 where it is another's.
        owned: whether the label's row is in this shard.
        valid: whether the label is in the vocabulary at all.
        statistics: fp32, ``[3, tokens]``: the largest logit of this shard (``own_maximum``), the sum of the exponentials of its
            logits but the label's (``own_sum``), relative to ``own_maximum`` and later to the maximum of all ranks, and the
            label's logit where ``owned``, else 0 (``target_logit``).
        for_backward: whether gradients will be asked for.
        logits: what the matrix product gave, ``[tokens, rows]``; its gradient once that has been taken. ``None`` if not kept.
        average: rows of the weights averaged by the local softmax (times ``SOFTMAX_SUM``), the label's row left out,
            ``[tokens, h]``: the input gradient of the one-barrier algorithm but for factors per token.
    """

    shard: WeightShard
    options: HeadOptions
    x: torch.Tensor
    shape: torch.Size
    local: torch.Tensor
    owned: torch.Tensor
    valid: torch.Tensor
    statistics: torch.Tensor
    for_backward: bool
    logits: torch.Tensor | None = None
    average: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what is kept, for the activation ledger."""
        kept = (self.x, self.local, self.owned, self.valid, self.statistics, self.logits, self.average)
        return tuple(tensor for tensor in kept if tensor is not None)

    def __post_init__(self) -> None:
        self.own_maximum, self.own_sum, self.target_logit = self.statistics

    @property
    def no_rows(self) -> bool:
        """Return whether this shard is empty: more ranks than rows."""
        return not self.shard.rows

    def score(self, piece: slice, raw: torch.Tensor) -> None:
        """Compute the statistics of a piece of the tokens, from its logits."""
        if self.no_rows:
            self.own_maximum[piece] = torch.finfo(torch.float32).min
            self.own_sum[piece] = self.target_logit[piece] = 0
            if self.average is not None:
                self.average[piece] = 0
            return
        maximum, others, label, softmax = self.over_logits(
            kernels.statistics, piece, raw, softmax=self.average is not None
        )
        self.own_maximum[piece], self.own_sum[piece], self.target_logit[piece] = maximum, others, label
        if self.average is not None:
            torch.mm(softmax, self.shard.weight, out=self.average[piece])

    def over_logits(self, function: Callable, piece: slice, raw: torch.Tensor, *per_token: torch.Tensor, **constants):
        """Run a pass of ``kernels`` over the logits of a piece of the tokens, compiled where that is asked for.

        Args:
            function: the pass.
            piece: of the tokens.
            raw: logits of the piece as the matrix product gave them, ``[tokens, rows]``.
            per_token: numbers per token of the piece, ``[tokens]`` each.
            constants: of the pass, by name.
        """
        options = self.options
        tensors = raw, self.local[piece], self.owned[piece], *per_token
        constants |= {"scale": options.scale, "softcap": options.softcap}
        if options.compiled:
            return kernels.COMPILER.run(function, *tensors, **constants)
        return function(*tensors, **constants)
