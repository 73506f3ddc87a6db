"""Weigh the microbatches of a step: by their tokens, their FLOPs, a file's numbers, or a user's function.

Weights are relative to a microbatch of full length, one document per sequence. They are computed from what the data iterator
yields, before the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.mcore.model.shape import model_of
from megatron_pipemem.planner.counts import attention_share
from megatron_pipemem.request import MicrobatchCosts
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs_file import FileWeights, FunctionName, read_microbatch_costs
from megatron_pipemem.schedule.options import FLOPS, TOKENS
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.registry import import_target


class FullMicrobatch(NamedTuple):
    """What weights are relative to.

    Args:
        sequences: of a microbatch.
        length: tokens of a sequence, of all context-parallel ranks.
    """

    sequences: int
    length: int


class Weigher(Protocol):
    """Define who weighs the microbatches of a step.

    Args:
        batches: what the data iterator yields, one per microbatch.
        full: what the weights are relative to.
        config: Megatron's configuration of the model.
        iteration: number of the training step, from 0.

    Raises:
        PipememError: the batches are nothing that it can weigh, or what it finds are no weights.
    """

    def __call__(
        self, batches: Sequence[object], full: FullMicrobatch, config: object, iteration: int
    ) -> MicrobatchWeights: ...


def weigher_of(asked: MicrobatchCosts) -> Weigher:
    """Return who weighs microbatches as a user asks.

    Raises:
        UnsupportedError: it is none of these, or there is no such function.
        CostsError: the file cannot be read as weights.
    """
    if callable(asked):
        return partial(_by_function, f"the function of microbatch_costs, {getattr(asked, '__name__', asked)},", asked)
    named = read_microbatch_costs(asked)
    if isinstance(named, FileWeights):
        return lambda batches, full, config, iteration: named.of_step(iteration, len(batches))
    if isinstance(named, FunctionName):
        return partial(_by_function, f"--pipemem-microbatch-costs {asked}", _function(named))
    return {TOKENS: _by_tokens, FLOPS: _by_flops}[named]


@dataclass(frozen=True)
class _Contents:
    """What a microbatch has for the layers to compute.

    Args:
        tokens: padding included where the layers compute it.
        squares: sum of the squared lengths of its documents, of which tokens attend to none but their own.
    """

    tokens: float
    squares: float

    @classmethod
    def of(cls, batch: object, number: int) -> _Contents:
        """Read a batch as Megatron's data sets and the frameworks around it make them.

        Args:
            batch: with ``tokens`` or ``input_ids``, ``[b, s]``; documents within a sequence are told by ``cu_seqlens``,
                ``packed_seq_params``, a padding mask ``attention_mask`` of the same shape, or ``position_ids`` that start anew.
            number: of the microbatch, for messages.

        Raises:
            UnsupportedError: it has no tokens under these names.
        """
        fields = batch if isinstance(batch, Mapping) else {}
        tokens = next((fields[name] for name in ("tokens", "input_ids") if fields.get(name) is not None), None)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() not in (1, 2):
            raise UnsupportedError(
                "cannot-weigh",
                f"the data iterator yields a {type(batch).__name__} without 'tokens' or 'input_ids' of shape [b, s] for "
                f"microbatch {number}, and so nothing to weigh it by; pass --pipemem-microbatch-costs module:function, with a "
                "function that takes it and returns its weight",
            )
        mask = fields.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
            lengths = mask.reshape(-1, mask.shape[-1]).sum(-1).double()
            return cls(lengths.sum().item(), lengths.square().sum().item())
        lengths = _documents(fields, tokens).double()
        return cls(tokens.numel(), lengths.square().sum().item())


def _documents(fields: Mapping[str, object], tokens: torch.Tensor) -> torch.Tensor:
    """Return the lengths of the documents of a batch, empty ones among them."""
    packed = fields.get("packed_seq_params")
    bounds = (
        *(fields.get(name) for name in ("cu_seqlens_padded", "cu_seqlens")),
        *(getattr(packed, name, None) for name in ("cu_seqlens_q_padded", "cu_seqlens_q")),
    )
    bound = next((each for each in bounds if isinstance(each, torch.Tensor)), None)
    if bound is not None:
        return bound.diff(dim=-1).clamp(min=0)  # entries behind the last document repeat its end
    rows = tokens.reshape(-1, tokens.shape[-1])
    positions = fields.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.shape != tokens.shape:
        return torch.full((rows.shape[0],), rows.shape[1])
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[:, 1:] = positions.reshape(rows.shape).diff(dim=-1) <= 0
    places = starts.flatten().nonzero().flatten()
    return torch.cat([places, places.new_tensor([tokens.numel()])]).diff()


def _by_tokens(batches: Sequence[object], full: FullMicrobatch, config: object, iteration: int) -> MicrobatchWeights:
    tokens = [_Contents.of(batch, number).tokens for number, batch in enumerate(batches)]
    return _relative(tokens, full)


def _relative(tokens: Sequence[float], full: FullMicrobatch, **more) -> MicrobatchWeights:
    """Return weights of memory that go by tokens, and of time where ``more`` says nothing else."""
    weights = tuple(each / (full.sequences * full.length) for each in tokens)
    return MicrobatchWeights(**{"time": weights, "memory": weights, **more})


def _by_flops(batches: Sequence[object], full: FullMicrobatch, config: object, iteration: int) -> MicrobatchWeights:
    """Linear layers go by tokens, attention by the square of every document; W has no attention."""
    contents = [_Contents.of(batch, number) for number, batch in enumerate(batches)]
    if getattr(config, "is_hybrid_model", False):
        raise UnsupportedError(
            "cannot-weigh",
            "the layers of a hybrid model are not in its configuration, so their FLOPs are not known where batches are "
            "weighed; pass tokens, a file or module:function to --pipemem-microbatch-costs",
        )
    attention = attention_share(model_of(config, full.length))
    linear = 1 - attention
    shares = [
        (each.tokens / (full.sequences * full.length), each.squares / (full.sequences * full.length**2))
        for each in contents
    ]

    def weights(linears: int, attentions: int) -> tuple[float, ...]:
        parts = linears * linear, attentions * attention
        return tuple((parts[0] * t + parts[1] * q) / sum(parts) for t, q in shares)

    # In units of a forward's: F 1 and 1, I 1 and 2, W 1 and 0.
    kinds = {Kind.F: weights(1, 1), Kind.I: weights(1, 2), Kind.W: weights(1, 0)}
    return _relative([each.tokens for each in contents], full, time=weights(3, 3), kinds=kinds)


def _by_function(
    name: str,
    function: Callable[[object], object],
    batches: Sequence[object],
    full: FullMicrobatch,
    config: object,
    iteration: int,
) -> MicrobatchWeights:
    """Call a user's function of this name for every batch.

    Raises:
        UnsupportedError: it fails, whatever it raises.
        CostsError: what it returns is no weight.
    """
    pairs = []
    for number, batch in enumerate(batches):
        try:
            found = function(batch)
        except Exception as error:
            raise UnsupportedError(
                "cannot-weigh",
                f"{name} fails for microbatch {number} of training step {iteration + 1}: {type(error).__name__}: {error}; it "
                "gets what the data iterator yields, and is to return a time, or a time and a memory",
            ) from error
        pairs.append(found if isinstance(found, tuple) and len(found) == 2 else (found, 1.0))
    try:
        times, memories = (tuple(map(_plain, weights)) for weights in zip(*pairs, strict=True))
        return MicrobatchWeights(times, memories)
    except CostsError as error:
        raise CostsError(error.code, f"{name} returns no weights in training step {iteration + 1}: {error}") from error


def _plain(weight: Any) -> Any:
    return weight.item() if isinstance(weight, torch.Tensor) and weight.numel() == 1 else weight


def _function(named: FunctionName) -> Callable[[object], object]:
    """Return the function of that name.

    Raises:
        UnsupportedError: there is none.
    """
    asked = f"--pipemem-microbatch-costs {':'.join(named)}"
    found = getattr(import_target(asked, named.module), named.name, None)
    if not callable(found):
        raise UnsupportedError(
            "cannot-import", f"{asked}: {named.module} has no function {named.name}; name one that it has"
        )
    return found
