"""Define the options of the LM head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_pipemem.errors import VocabularyError


@dataclass(frozen=True)
class HeadOptions:
    """Say what the head computes, and how.

    Args:
        barriers: collectives that the last stage's backward waits for one after another. 1 forms the input gradient from
            statistics before the loss is known (the paper's Algorithm 2), 2 after it (its Algorithm 1).
        piece_tokens: tokens whose logits are in fp32 at a time; ``None`` for the whole microbatch. Pieces change results only
            where matrix products of other sizes round differently.
        keep_logits: keep the logits until their gradient is taken, in the parameter's dtype, ``[tokens, rows]``. ``False``
            computes them again, piece by piece: one more matrix product for each use, and nothing of that size is ever held.
        scale: factor of the logits.
        softcap: ``c`` of ``c * tanh(logits / c)``, applied after ``scale``; ``None`` for none.
        z_loss: factor of the square of the log-partition function, added to every token's loss.
        message_dtype: of the partial input gradients that are summed over the ranks. 16 bit halves the message and rounds
            once per rank.
        compiled: compile the passes over logits on CUDA, see ``kernels.Compiler``. ``False`` runs one operation at a time.
    """

    barriers: int = 1
    piece_tokens: int | None = None
    keep_logits: bool = True
    scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    message_dtype: torch.dtype = torch.float32
    compiled: bool = True

    def __post_init__(self) -> None:
        for holds, what in (
            (self.barriers in (1, 2), f"barriers={self.barriers}: give 1 or 2"),
            (
                self.piece_tokens is None or self.piece_tokens >= 1,
                f"piece_tokens={self.piece_tokens}: at least 1, or None",
            ),
            (
                self.softcap is None or self.softcap > 0,
                f"softcap={self.softcap}: a positive number, or None for no cap",
            ),
            (self.z_loss >= 0, f"z_loss={self.z_loss}: at least 0"),
        ):
            if not holds:
                raise VocabularyError("bad-number", what)

    def pieces(self, tokens: int) -> Iterator[slice]:
        """Return the tokens of a microbatch, piece by piece."""
        size = self.piece_tokens or max(tokens, 1)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))
