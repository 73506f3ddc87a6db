"""Bring tokens and labels to every pipeline rank, from the two that read data.

Every shard needs every token and every label, but Megatron's scripts read data on the first and the last stage only and return
``None`` elsewhere, and what a batch looks like is theirs to know. So nothing is read elsewhere, and no script has to
change: at the start of a step the ranks of the two end stages look at the calls of the model (``mcore.step.model_calls``) and
send their tokens and labels to the others, in one message each. A step's tokens are small; Megatron itself keeps all samples
of a step, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.vocabulary.runtime.batch import Batch
from megatron_pipemem.mcore.step.model_calls import Call

_NO_LABELS = torch.iinfo(torch.int64).min


def share_batch(
    shapes: Sequence[tuple[int, int]] | None,
    first: Sequence[Call | None] | None,
    last: Sequence[Call | None] | None,
    sources: tuple[int, int],
    group: dist.ProcessGroup,
    may_want_logits: bool,
    depths: int = 0,
) -> Batch:
    """Return the tokens of the first stage's calls and the labels of the last one's, on every rank of the pipeline.

    Args:
        shapes: ``(b, s)`` of every microbatch; ``None`` if the ranks have not agreed on them.
        first: calls of the first stage, where it is.
        last: calls of the last stage, where it is.
        sources: the pipeline ranks that have these stages.
        group: of the pipeline.
        may_want_logits: whether labels may be missing, because logits are wanted; the head then predicts one token each.
        depths: of multi-token prediction.

    Raises:
        UnsupportedError: the calls do not show tokens or labels of these shapes.
    """
    if shapes is None:
        raise UnsupportedError(
            "vocabulary-forward-step",
            "vocabulary parallelism needs the tokens of microbatches that differ before the step runs; pass "
            "--pipemem-message-shapes step and let the forward step give the model input_ids of shape [b, s], or pass "
            "--pipemem-vocab-parallel off",
        )
    if None in [*(first or ()), *(last or ())]:
        raise UnsupportedError(
            "vocabulary-forward-step",
            "the forward step does not call the model it is given, or its data come from no iterator, so nobody knows its "
            "tokens and labels; call it with what next() yields, or pass --pipemem-vocab-parallel off",
        )
    of_first, of_last = (
        None if calls is None else [call for call in calls if call is not None] for calls in (first, last)
    )
    sizes = [b * s for b, s in shapes]

    def share(name: str, values: Sequence[torch.Tensor | None] | None, source: int) -> Sequence[torch.Tensor]:
        """Send what the source has of every microbatch to all, ``[b, s]`` of each."""
        if values is None:
            shared = torch.empty(sum(sizes), dtype=torch.int64, device=torch.cuda.current_device())
        else:
            flat = []
            for value, shape in zip(values, shapes, strict=True):
                found = None if value is None else tuple(value.shape)
                if value is None or found != shape:
                    raise UnsupportedError(
                        "vocabulary-forward-step",
                        f"the forward step passes {name} of shape {found} to the model where {shape} was expected: "
                        "vocabulary parallelism needs them for every microbatch, of its sequence length and micro-batch size; "
                        "pass --pipemem-vocab-parallel off",
                    )
                flat.append(value.flatten())
            shared = torch.cat(flat).to(torch.int64)
        dist.broadcast(shared, src=dist.get_global_rank(group, source), group=group)
        return [part.view(shape) for part, shape in zip(shared.split(sizes), shapes, strict=True)]

    tokens = share("tokens", None if of_first is None else [call.tokens for call in of_first], sources[0])
    own = None if of_last is None else [call.labels for call in of_last]
    if may_want_logits and own is not None and all(each is None for each in own):
        own = [torch.full_like(each, _NO_LABELS) for each in tokens]
    labels = share("labels", own, sources[1])
    wants_logits = may_want_logits and all(bool(torch.eq(each, _NO_LABELS).all()) for each in labels)
    return Batch(
        tokens, None if wants_logits else labels, looks_ahead=bool(depths), depths=0 if may_want_logits else depths
    )
