"""Look at what the microbatches of a step pass to the model, before the step runs.

What a batch looks like is for the user's forward step to know. So it runs, for every microbatch, up to its call of the model.
What it drew from the data iterator it draws again, from memory, when the stage really runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel import random

from megatron_pipemem.mcore.model.stages import Tape

# Megatron's language models take these by position or by name.
_PARAMETERS = ("input_ids", "position_ids", "attention_mask", "decoder_input", "labels")


class _Reached(BaseException):
    """The forward step has called the model. No ``Exception``, so that no handler of the user's takes it for one."""

    def __init__(self, arguments: tuple, keywords: dict):
        super().__init__()
        self.arguments = arguments
        self.keywords = keywords


def _stop(module: torch.nn.Module, arguments: tuple, keywords: dict):
    raise _Reached(arguments, keywords)


class Call(NamedTuple):
    """Hold a call of the model by the forward step of one microbatch. Either part may be missing, depending on the
    stage.
    """

    tokens: torch.Tensor | None
    labels: torch.Tensor | None


class Rereadable(Tape):
    """A step's samples, to be drawn a second time once it is rewound; after them come new ones."""

    def __next__(self):
        return next(self._iterator) if self._rewound and not self._seen else super().__next__()


def calls_of(
    forward_step: Callable, iterator: Iterator | None, model: torch.nn.Module, num_microbatches: int
) -> tuple[list[Call | None], Iterator | None]:
    """Return what the user's forward step passes to the model, for every microbatch, and the iterator for the real forwards.

    Random numbers stay as they were.

    Args:
        forward_step: the user's.
        iterator: of the data, if this stage has one.
        model: the stage's chunk, wrapped or not.
        num_microbatches: of the step.

    Returns:
        ``None`` for a microbatch whose forward step does not call the model; for all of them, without running any, if the
        data are read otherwise than by ``next``, because they could not be read again.
    """
    if not (iterator is None or hasattr(iterator, "__next__")):
        return [None] * num_microbatches, iterator
    reread = None if iterator is None else Rereadable(iterator)
    calls: list[Call | None] = []
    with ExitStack() as stack:
        stack.enter_context(random._fork_rng())
        for module in _wrapped(model):
            stack.callback(module.register_forward_pre_hook(_stop, prepend=True, with_kwargs=True).remove)
        for _ in range(num_microbatches):
            try:
                forward_step(reread, model)
            except _Reached as reached:
                passed = reached.keywords | dict(zip(_PARAMETERS, reached.arguments, strict=False))
                # Not the rest: an attention mask per microbatch would be large.
                calls.append(Call(passed.get("input_ids"), passed.get("labels")))
            else:
                calls.append(None)
    if reread is not None:
        reread.rewind()
    return calls, reread


def _wrapped(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a chunk and what it wraps, of which the user's forward step may call any."""
    yield model
    inner = getattr(model, "module", None)
    while isinstance(inner, torch.nn.Module):
        yield inner
        inner = getattr(inner, "module", None)
