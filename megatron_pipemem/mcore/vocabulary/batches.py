"""Bring tokens and labels to every pipeline rank, from the two that read data.

Every shard needs every token and every label, but Megatron's scripts read data on the first and the last stage only and return
``None`` elsewhere, and what a batch looks like is theirs to know. So nothing is read elsewhere, and no script has to
change: at the start of a step the ranks of the two end stages run the user's forward step of every microbatch up to its call
of the model, note the tokens and labels it passes, and send them to the others, in one message each. What they drew from
the data iterator they draw again, from memory, when the stage really runs. A step's tokens are small; Megatron
itself keeps all samples of a step, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model.stages import Tape
from megatron_pipemem.runtime.vocabulary.batch import Batch

# Megatron's language models take these by position or by name.
_PARAMETERS = ("input_ids", "position_ids", "attention_mask", "decoder_input", "labels")

_NO_LABELS = torch.iinfo(torch.int64).min


class _Reached(BaseException):
    """The forward step has called the model. No ``Exception``, so that no handler of the user's takes it for one."""

    def __init__(self, arguments: tuple, keywords: dict):
        super().__init__()
        self.arguments = arguments
        self.keywords = keywords


class _StandIn:
    """Looks like the model until it is called."""

    def __init__(self, model: torch.nn.Module):
        self._model = model

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def __call__(self, *arguments, **keywords):
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
) -> tuple[list[Call], Iterator | None]:
    """Return what the user's forward step passes to the model, for every microbatch, and the iterator for the real forwards.

    Args:
        forward_step: the user's.
        iterator: of the data, if this stage has one.
        model: the stage's chunk.
        num_microbatches: of the step.

    Raises:
        UnsupportedError: a forward step that does not call its model.
    """
    reread = None if iterator is None else Rereadable(iterator)
    calls = []
    for _ in range(num_microbatches):
        try:
            forward_step(reread, _StandIn(model))
        except _Reached as reached:
            passed = reached.keywords | dict(zip(_PARAMETERS, reached.arguments, strict=False))
            # Not the rest: an attention mask per microbatch would be large.
            calls.append(Call(passed.get("input_ids"), passed.get("labels")))
        else:
            raise UnsupportedError(
                "the forward step does not call the model it is given, so nobody knows its tokens and labels; call it, or "
                "pass --pipemem-vocab-parallel off"
            )
    if reread is not None:
        reread.rewind()
    return calls, reread


def share(
    name: str,
    shape: tuple[int, int, int],
    values: list[torch.Tensor | None] | None,
    source: int,
    group: dist.ProcessGroup,
    may_be_missing: bool,
) -> torch.Tensor | None:
    """Send a step's tokens or labels from the pipeline rank ``source`` to all.

    Args:
        name: for messages.
        shape: ``(m, b, s)``, known to every rank.
        values: of every microbatch, on the source; ``None`` where a microbatch has none.
        source: rank within ``group``.
        group: the pipeline.
        may_be_missing: whether the microbatches may all be without.

    Returns:
        ``[m, b, s]``, or ``None`` if they are missing.

    Raises:
        UnsupportedError: on the source, when they have another shape, or are missing but must not.
    """
    device = torch.cuda.current_device()
    if values is None:
        shared = torch.empty(shape, dtype=torch.int64, device=device)
    elif may_be_missing and all(value is None for value in values):
        shared = torch.full(shape, _NO_LABELS, dtype=torch.int64, device=device)
    else:
        for value in values:
            found = None if value is None else tuple(value.shape)
            if found != shape[1:]:
                raise UnsupportedError(
                    f"the forward step passes {name} of shape {found} to the model where {shape[1:]} was expected: "
                    "vocabulary parallelism needs them for every microbatch, of the sequence length and micro-batch size of "
                    "the step; pass --pipemem-vocab-parallel off"
                )
        shared = torch.stack(values).to(torch.int64)
    dist.broadcast(shared, src=dist.get_global_rank(group, source), group=group)
    if may_be_missing and bool((shared == _NO_LABELS).all()):
        return None
    return shared


def share_batch(
    shape: tuple[int, int, int],
    first: list[Call] | None,
    last: list[Call] | None,
    sources: tuple[int, int],
    group: dist.ProcessGroup,
    may_want_logits: bool,
    depths: int = 0,
) -> Batch:
    """Return the tokens of the first stage's calls and the labels of the last one's, on every rank of the pipeline.

    Args:
        shape: ``(m, b, s)``.
        first: calls of the first stage, where it is.
        last: calls of the last stage, where it is.
        sources: the pipeline ranks that have these stages.
        group: of the pipeline.
        may_want_logits: whether labels may be missing, because logits are wanted; the head then predicts one token each.
        depths: of multi-token prediction.
    """
    tokens = None if first is None else [call.tokens for call in first]
    labels = None if last is None else [call.labels for call in last]
    return Batch(
        share("tokens", shape, tokens, sources[0], group, False),
        share("labels", shape, labels, sources[1], group, may_want_logits),
        looks_ahead=bool(depths),
        depths=0 if may_want_logits else depths,
    )
