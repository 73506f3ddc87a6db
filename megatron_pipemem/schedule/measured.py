"""The costs that the measured times of actions give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import mul
from types import MappingProxyType

from megatron_pipemem.schedule.action import FURTHER, RECOMPUTE, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import WHOLE, Units
from megatron_pipemem.schedule.vocabulary import VocabularyCosts

Pair = tuple[tuple[Kind, int], tuple[Kind, int]]
"""The kinds and stages of the forward and the backward of a pair."""
Medians = dict[tuple[Kind, int], float]
"""Median seconds of a kind of action that ran alone, by stage and part (``Units.place``)."""

_ROUNDS = 12
"""The number of repetitions after which the costs of a step with pairs agree with its times."""


def _exchange_shares(pairs: Mapping[Pair, float], costs: Costs, placement: Placement) -> tuple[float, ...]:
    """Return the share of F and I in which tokens of experts travel, one value per stage, by the seconds of pairs.

    ``costs`` has the seconds of single actions. A pair hides the seconds by which it is shorter than its two actions, so
    the price of a pair (``ActionPrices.second_of_pair``) equals its measured seconds. Stages of one device have one
    share. Devices without pairs have the share of all pairs together.
    """
    seconds, devices = costs.seconds(placement), placement.devices
    hidden, computed = [0.0] * placement.num_devices, [0.0] * placement.num_devices
    for ((_, stage), (kind, other)), together in pairs.items():
        forward, backward = seconds[Kind.F][stage], seconds[kind][other]
        hidden[devices[stage]] += min(max(0.0, forward + backward - together), forward, backward)
        computed[devices[stage]] += forward + seconds[Kind.I][other]
    overall = sum(hidden) / sum(computed) if any(computed) else 0.0
    shares = [part / all_ if all_ else overall for part, all_ in zip(hidden, computed, strict=True)]
    return tuple(shares[device] for device in devices)


def costs_from(
    medians: Medians,
    links: Mapping[tuple[int, int], float],
    placement: Placement,
    before: Costs,
    units: Units = WHOLE,
    pairs: Mapping[Pair, float] = MappingProxyType({}),
) -> Costs:
    """Return the costs in seconds that the median times of actions give, one value per stage and part.

    ``before`` are the present costs, and do not change. They replace
    missing times of F, I and W, and give the proportion of I and W in a fused B, and the memory.
    ``links`` has the seconds of a unit's message by (source, destination) of devices. Messages that are not in
    ``links`` cost nothing. ``units`` are those of the step. ``pairs`` has the median seconds of pairs, if the
    step had any. Without them the exchanges of experts' tokens keep their shares of F and I.
    """
    costs = _costs_from(medians, links, placement, before, units, pairs)
    # The seconds by which exchanges hide W of a B depend on the exchanges, which follow from pairs with a B.
    for _ in range(_ROUNDS if pairs else 0):
        costs = _costs_from(medians, links, placement, costs, units, pairs)
    return costs


def _costs_from(
    medians: Medians,
    links: Mapping[tuple[int, int], float],
    placement: Placement,
    before: Costs,
    units: Units,
    pairs: Mapping[Pair, float],
) -> Costs:
    """Return the result of ``costs_from`` if the proportion of I and W, and W that exchanges hide, are those of ``before``."""
    seconds_before, places = before.seconds(placement, units), placement.num_stages * units.parts
    prices: dict[Kind, list[float]] = {Kind.F: [], Kind.I: [], Kind.W: []}
    # In a step with pairs, exchanges hide W of a B.
    whole_before = (before.with_hidden_weights(placement).seconds(placement, units) if pairs else seconds_before)[
        Kind.B
    ]
    for stage in range(places):
        prices[Kind.F].append(medians.get((Kind.F, stage), seconds_before[Kind.F][stage]))
        fused = medians.get((Kind.B, stage))
        for kind in (Kind.I, Kind.W):
            seconds = medians.get((kind, stage), seconds_before[kind][stage])
            if fused is not None and (kind, stage) not in medians:
                both_passes = whole_before[stage]
                seconds = fused * (seconds_before[kind][stage] / both_passes if both_passes else 0.5)
            prices[kind].append(seconds)
    p2p = {
        # Costs price the messages of whole microbatches.
        (source, destination): links.get((source, destination), 0.0) * units.parts
        for source in range(placement.num_devices)
        for destination in range(placement.num_devices)
        if source != destination
    }
    recompute: dict[Kind, tuple[float, ...] | None] = {}
    for kind in RECOMPUTE:
        ran = any(other is kind for other, _ in medians)
        share, of_forward = kind.spec.shares["F"], enumerate(prices[Kind.F])
        recompute[kind] = tuple(medians.get((kind, stage), share * f) for stage, f in of_forward) if ran else None
    forward, inputs, weights = (tuple(prices[kind]) for kind in (Kind.F, Kind.I, Kind.W))
    costs = Costs(
        forward,
        inputs,
        weights,
        p2p,
        memory=before.of(placement).memory,
        recompute=recompute[Kind.R],
        recompute_selective=recompute[Kind.RS],
        vocabulary=_passes(medians, placement, before, units),
        further={
            kind: tuple(medians.get((kind, at), 0.0) for at in range(places))
            for kind in {kind: None for kind, _ in medians if kind in FURTHER}
        }
        or None,
    )
    if not (pairs or before.have_exchanges):
        return costs
    shares = _exchange_shares(pairs, costs, placement) if pairs else before.exchange_shares(placement)
    seconds_of = costs.seconds(placement)
    there, back = (tuple(map(mul, seconds_of[kind], shares)) for kind in (Kind.F, Kind.I))
    return replace(costs, forward_exchange=there, backward_exchange=back)


def _passes(medians: Medians, placement: Placement, before: Costs, units: Units) -> VocabularyCosts | None:
    """Return the measured costs of the vocabulary passes; those of ``before`` if no such pass has run.

    The collectives of the passes are not measured.
    """
    if (Kind.S, 0) not in medians:
        return before.vocabulary
    score, gradient, embed, embed_gradient = (
        tuple(medians.get((kind, at), 0.0) for at in range(placement.num_devices * units.parts))
        for kind in (Kind.S, Kind.T, Kind.EMBED_F, Kind.EMBED_B)
    )
    loss = medians.get((Kind.LOSS, (placement.devices[-1] + 1) * units.parts - 1), 0.0)
    return VocabularyCosts(score, gradient, embed, embed_gradient, loss)
