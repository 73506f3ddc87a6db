"""Cut microbatches into sequence slices, and compute the costs of each slice for causal attention.

Each slice attends to all tokens before it. So among equal slices, a later one takes longer (arXiv 2406.03488, section
3.3; arXiv 2504.14519). The keys and values of a sequence are held until all its slices have run backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import WHOLE_STAGE, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import FLOPS, SLICE_CUTS, TOKENS
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.vocabulary import VocabularyCosts


def slice_tokens(
    tokens: int, slices: int, cut: str = TOKENS, attention: float = 0.0, multiple: int = 1
) -> tuple[int, ...]:
    """Return the number of tokens of each slice of a sequence of ``tokens``. Raise an UnsupportedError for an
    impossible cut.

    With ``cut="tokens"`` all slices have the same number of tokens. With ``"flops"`` the F of all slices takes the same
    time, as nearly as possible if each number is a multiple of ``multiple``.

    ``attention`` is the share of causal attention in F's seconds. The first part ``x`` of a sequence, with x from 0 to
    1, then takes ``(1 - attention) x + attention x^2`` of F's seconds.

    Example: 8 tokens in 2 slices by FLOPs with ``attention=1``. ``x^2`` reaches 1/2 at x = 0.71, near 6 tokens of 8.

        |0 1 2 3 4 5|6 7|    (6, 2)
    """
    units, remainder = divmod(tokens, multiple)
    refusal = f"{tokens} tokens cannot be cut into {slices} slices"
    if slices < 1 or cut not in SLICE_CUTS or not 0 <= attention <= 1:
        raise UnsupportedError(
            "bad-number",
            f"{refusal} by {shortened(cut)} with an attention share of {attention:g}; give at least 1 slice, "
            f"{' or '.join(SLICE_CUTS)}, "
            "and a share from 0 to 1",
        )
    if remainder or units < slices or (cut == TOKENS and units % slices):
        equal = "equal " if cut == TOKENS else ""
        raise UnsupportedError(
            "slices-do-not-fit",
            f"{refusal} that are {equal}multiples of {multiple}; give another number of slices or of tokens"
            + (f", or cut by {FLOPS}" if cut == TOKENS and not remainder and units >= slices else ""),
        )
    if cut == TOKENS:
        return (tokens // slices,) * slices
    edges = [0]
    for done in range(1, slices):
        share, linear = done / slices, 1 - attention
        # The end of this share: the root of (1-a) x + a x^2 = share, in a form without a difference of close numbers.
        end = 2 * share / (linear + math.sqrt(linear**2 + 4 * attention * share))
        edges.append(min(max(math.floor(end * units + 0.5), edges[-1] + 1), units - slices + done))
    return tuple((after - before) * multiple for before, after in pairwise([*edges, units]))


def slice_costs(
    costs: Costs,
    placement: Placement,
    tokens: Sequence[int],
    attention: float = 0.0,
    keys_and_values: float = 0.0,
) -> Costs:
    """Return the costs of each stage and slice, computed from those of whole microbatches.

    ``costs`` are those of whole microbatches, one number or one per stage. ``tokens`` has the number of tokens of each
    slice. ``attention`` is the share ``a`` of causal attention in the seconds of F, R and RS. The share in I is then
    ``2a / (1+a)``, because the backward of attention has twice as many matrix products. ``keys_and_values`` is the
    share of keys and values in the memory of F.

    Seconds: let a slice begin at ``x0`` and end at ``x1``, as fractions of the sequence. It takes ``(1-a)(x1-x0) +
    a(x1^2-x0^2)`` of a microbatch's seconds. W, copies to the host and vocabulary passes are in proportion to tokens. A
    message takes ``1/n`` of the microbatch's seconds, with n slices.

    Memory: activations of F are in proportion to tokens, except keys and values. F of the first slice allocates these
    for the whole microbatch. I of the first slice, which runs last, frees them. Their gradients have as many bytes and
    exist from I of the last slice to I of the first. Neither recompute nor offload changes the keys, values or their
    gradients.
    """
    slices = len(tokens)
    for name, share in (("attention", attention), ("keys and values", keys_and_values)):
        if not 0 <= share <= 1:
            raise UnsupportedError("bad-number", f"the share of {name} is {share:g}; give a number from 0 to 1")
    if not tokens or min(tokens) < 1:
        raise UnsupportedError(
            "bad-number", f"slices of {shortened(list(tokens))} tokens; give every slice at least one"
        )
    if placement.replicas > 1:
        raise UnsupportedError(
            "unsupported-placement",
            f"{placement.replicas} replicas of the model run on {placement.num_devices} devices, but only a pipeline "
            "with one replica can price slices differently; use no slices with this placement, or give all slices the "
            "same price",
        )
    seconds = costs.seconds(placement)
    if slices == 1:
        return costs
    edges = [edge / sum(tokens) for edge in accumulate(tokens, initial=0)]
    by_tokens = [end - start for start, end in pairwise(edges)]

    def priced(kind: Kind) -> tuple[float, ...]:
        share = 2 * attention / (1 + attention) if kind is Kind.I else attention
        squares = [end**2 - start**2 for start, end in pairwise(edges)]
        return _spread(seconds[kind], [(1 - share) * x + share * y for x, y in zip(by_tokens, squares, strict=True)])

    memory, part_units = _memory(costs, placement, by_tokens, keys_and_values), None
    if costs.memory is None:
        # In activation units all stages are equal.
        part_units = {kind: changes[:slices] for kind, changes in memory.items()}
        if not keys_and_values and len(set(tokens)) == 1:
            part_units = None
    recompute = None if costs.recompute is None else priced(Kind.R)
    recompute_selective = None if costs.recompute_selective is None else priced(Kind.RS)
    return replace(
        costs.of(placement),
        forward=priced(Kind.F),
        backward_input=priced(Kind.I),
        backward_weight=_spread(seconds[Kind.W], by_tokens),
        recompute=recompute,
        recompute_selective=recompute_selective,
        memory=None if costs.memory is None else memory,
        part_units=part_units,
        channel=_channel(costs, placement, by_tokens, keys_and_values),
        vocabulary=_vocabulary(costs.vocabulary, placement.num_devices, by_tokens),
    )


def _spread(values: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    return tuple(value * share for value in values for share in shares)


def _memory(
    costs: Costs, placement: Placement, by_tokens: Sequence[float], keys_and_values: float
) -> dict[Kind, tuple[float, ...]]:
    """Return the memory that each kind of action takes, negative if it frees memory, per stage and slice.

    The values of a stage's slices follow each other. ``by_tokens`` has each slice's share of the tokens. The unit is
    that of ``Costs.memory_changes``.
    """
    stages, last = range(placement.num_stages), len(by_tokens) - 1
    changes = costs.memory_changes(placement)
    dropped = costs.memory_changes(placement, dict.fromkeys(stages, Kind.R))
    selective = costs.memory_changes(placement, dict.fromkeys(stages, Kind.RS))[Kind.RS]
    caches = [keys_and_values * takes for takes in changes[Kind.F]]
    nothing = (0.0,) * placement.num_stages
    memory = {}
    changes_by_kind = {Kind.I: nothing, **changes, Kind.F: dropped[Kind.F], Kind.R: dropped[Kind.R]}
    for kind, values in changes_by_kind.items():
        if kind in WHOLE_STAGE:
            memory[kind] = values
        elif kind in _ACTIVATIONS:
            memory[kind] = _spread([(1 - keys_and_values) * value for value in values], by_tokens)
        else:
            memory[kind] = _spread(values, by_tokens)
    # Selective recompute makes neither keys nor values again.
    recomputed = [
        min(part, taken - cache) for part, taken, cache in zip(selective, changes[Kind.F], caches, strict=True)
    ]
    memory[Kind.RS] = _spread(recomputed, by_tokens)
    for kind, allocates in ((Kind.F, {0: 1}), (Kind.I, {last: 1, 0: -2}), (Kind.B, {last: 1, 0: -2})):
        if keys_and_values:
            waits = [cache * allocates.get(at, 0) for cache in caches for at in range(last + 1)]
            memory[kind] = tuple(map(sum, zip(memory[kind], waits, strict=True)))
    return memory


_ACTIVATIONS = frozenset((Kind.F, Kind.R, Kind.I, Kind.W, Kind.B, Kind.WAIT_OFFLOAD, Kind.RELOAD))
"""Kinds whose memory includes keys and values in the prices of whole microbatches. Here these are priced apart."""


def _channel(costs: Costs, placement: Placement, by_tokens: Sequence[float], keys_and_values: float) -> Channel | None:
    if costs.channel is None:
        return None
    seconds = costs.transfer_seconds(placement)
    out, back = (
        _spread([(1 - keys_and_values) * stage_seconds for stage_seconds in seconds[kind]], by_tokens)
        for kind in (Kind.OFFLOAD, Kind.RELOAD)
    )
    return replace(costs.channel, offload=out, reload=back, ratio=None)


def _vocabulary(
    vocabulary: VocabularyCosts | None, num_devices: int, by_tokens: Sequence[float]
) -> VocabularyCosts | None:
    if vocabulary is None:
        return None
    seconds = vocabulary.seconds(num_devices)
    score, gradient, embed, embed_gradient = (
        _spread(seconds[kind], by_tokens) for kind in (Kind.S, Kind.T, Kind.EMBED_F, Kind.EMBED_B)
    )
    return replace(vocabulary, score=score, gradient=gradient, embed=embed, embed_gradient=embed_gradient)
