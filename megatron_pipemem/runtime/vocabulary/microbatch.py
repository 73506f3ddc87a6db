"""What one rank keeps of one microbatch between the phases of the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_pipemem.runtime.vocabulary.head import VocabularyHead

# The local softmax sums to this instead of 1 before it is rounded to 16 bit: with 1, most entries of a large vocabulary would
# be subnormal in fp16, and with the bare exponentials the product with the weights could overflow. A power of two is exact.
SOFTMAX_SUM = 1024.0

# Below it the sum is as good as nothing, and its inverse could overflow.
_SMALLEST_SUM = 1e-30


@dataclass(eq=False)
class HeadMicrobatch:
    """State of the head, per token of one microbatch.

    Args:
        head: the rank's head.
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

    head: VocabularyHead
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
        """What is kept, for the activation ledger."""
        kept = (self.x, self.local, self.owned, self.valid, self.statistics, self.logits, self.average)
        return tuple(tensor for tensor in kept if tensor is not None)

    @property
    def own_maximum(self) -> torch.Tensor:
        return self.statistics[0]

    @property
    def own_sum(self) -> torch.Tensor:
        return self.statistics[1]

    @property
    def target_logit(self) -> torch.Tensor:
        return self.statistics[2]

    @property
    def no_rows(self) -> bool:
        """Whether this shard is empty: more ranks than rows."""
        return not self.head.shard.rows

    def score(self, piece: slice, raw: torch.Tensor) -> None:
        """Statistics of a piece of the tokens, from its logits."""
        options = self.head.options
        if self.no_rows:
            self.own_maximum[piece] = torch.finfo(torch.float32).min
            self.own_sum[piece] = self.target_logit[piece] = 0
            if self.average is not None:
                self.average[piece] = 0
            return
        logits = options.transform(raw)
        # The clamp keeps a row of nothing but -inf from becoming -inf - -inf.
        maximum = logits.amax(dim=1).clamp_(min=torch.finfo(torch.float32).min)
        self.own_maximum[piece] = maximum
        label = logits.gather(1, self.local[piece, None]).squeeze(1)
        self.target_logit[piece] = torch.where(self.owned[piece], label, 0.0)
        slope = options.slope(logits) if self.average is not None else 1.0
        exponentials = logits.sub_(maximum[:, None]).exp_()
        # The label joins in fp32 when its probability is known: of one that is almost certain, sums and averages that
        # included it would leave rounding errors only.
        self.set_target(piece, exponentials, torch.zeros_like(maximum))
        others = exponentials.sum(dim=1)
        self.own_sum[piece] = others
        if self.average is not None:
            exponentials.mul_((SOFTMAX_SUM / others.clamp(min=_SMALLEST_SUM))[:, None])
            if options.softcap is not None:
                exponentials.mul_(slope)
            torch.mm(exponentials.to(self.x.dtype), self.head.shard.weight, out=self.average[piece])

    def set_target(self, piece: slice, matrix: torch.Tensor, values: torch.Tensor) -> None:
        """Write one value per token into the label's column of ``[tokens of the piece, rows]``, where this rank owns it."""
        column = self.local[piece, None]
        matrix.scatter_(1, column, torch.where(self.owned[piece, None], values[:, None], matrix.gather(1, column)))
