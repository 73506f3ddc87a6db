"""Let the ranks of a pipeline agree on the shapes of all messages of a step, at its start, where microbatches differ.

Messages have the tokens that the first stage passes to its model, ``[b, s]``. It looks at all calls of the step, and tells the
others in one small message. Receives are then posted ahead, as they are where all microbatches are alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_pipemem.mcore.agreement import tell
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.step.agreement import agreed_numbers
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.step.model_calls import Call, calls_of

logger = logging.getLogger(__name__)


class StepShapes(Extension):
    """Finds the shapes of steps whose microbatches differ; does nothing in others.

    Args:
        chunk_placement: answers Megatron's questions about ranks.
    """

    def __init__(self, chunk_placement: ChunkPlacement):
        self._chunk_placement = chunk_placement
        self._untold: set[tuple[bool, bool]] = set()
        """kinds of steps whose calls of the model do not show tokens"""

    def prepare(self, step: Step) -> None:
        """Agree on the tokens of all microbatches, in the order in which they run, and so on the shapes of their messages."""
        kind = (step.forward_only, step.context.collect_non_loss_data)
        if step.message_shape is None or step.tokens is not None or kind in self._untold:
            return
        sizes = 2 * step.context.num_microbatches
        numbers = agreed_numbers("sizes of microbatches", lambda: self._own(step), sizes, [step.pipeline.group])
        if not all(numbers):
            self._untold.add(kind)
            tell(
                logger,
                "the forward step does not show the model's tokens, [b, s], so every message tells its own shape",
                level=logging.WARNING,
            )
            return
        whole = map(int, numbers)
        step.tokens = list(zip(whole, whole, strict=True))
        step.message = replace(step.message, shapes=[step.message_shape(*each) for each in step.tokens])

    def _own(self, step: Step) -> list[int] | None:
        """Return ``b`` and ``s`` of every microbatch, zeros where its call does not show them; ``None`` without the first
        stage.
        """
        if 0 not in step.pipeline.stages:
            return None
        chunk, context = step.pipeline.stages.index(0), step.context
        with self._chunk_placement.chunk(chunk):
            calls, reread = calls_of(
                context.forward_step_func, step.iterators[chunk], step.chunks[chunk], context.num_microbatches
            )
        step.iterators = [reread if number == chunk else each for number, each in enumerate(step.iterators)]
        return [size for call in calls for size in _shape(call)]


def _shape(call: Call | None) -> Sequence[int]:
    """Return ``(b, s)`` of the tokens that a call shows, zeros if it shows none."""
    tokens = None if call is None else call.tokens
    return tokens.shape if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 else (0, 0)
