"""Tell whether a model's vocabulary is worth cutting, from its sizes, its layout and what passes take."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_pipemem.config import hybrid
from megatron_pipemem.config.model import Sublayer
from megatron_pipemem.features.vocabulary.choice import REDISTRIBUTE, choose_vocabulary
from megatron_pipemem.mcore.agreement import tell
from megatron_pipemem.planner.counts import Sizes, head_weight, layer_weight
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM

logger = logging.getLogger(__name__)


def layers_in(model: Any) -> float:
    """Return how many layers a chunk of a model holds; of a hybrid model, how many mean ones would compute as much."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern is None:
        return len(model.decoder.layers)
    return sum(_weights(model, model.decoder.layer_type_list)) / _mean_weight(model)


def head_in_layers(model: Any) -> float:
    """Return how many transformer layers take as long as the whole head, by the FLOPs of their matrix products.

    A mixture of experts counts with the experts that a token visits, in every layer; layers of a hybrid model count on average.

    Args:
        model: a Megatron language model, or a chunk of one.
    """
    return head_weight(_sizes(model), model.vocab_size) / _mean_weight(model)


def _mean_weight(model: Any) -> float:
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern is not None:
        weights = _weights(model, hybrid.layers_of(pattern))
        return sum(weights) / len(weights)
    of = _sizes(model)
    attention = Sublayer.LATENT_ATTENTION if of("multi_latent_attention") else Sublayer.ATTENTION
    return sum(_weights(model, (attention, Sublayer.EXPERTS if of("num_moe_experts") else Sublayer.FFN)))


def _weights(model: Any, symbols: Iterable[str]) -> list[float]:
    return [layer_weight(symbol, _sizes(model), model.max_sequence_length) for symbol in symbols]


def _sizes(model: Any) -> Sizes:
    return lambda attribute: getattr(model.config, attribute, None) or 0


def choose_barriers(model: Any, layout: Sequence[float], costs: Costs, schedules: Mapping[int, Schedule]) -> int:
    """Return the barriers of the best way to deal with the model's head, 0 to leave it where it is.

    Args:
        model: a chunk, built and not yet cut.
        layout: layers of every stage, see ``layers_in``.
        costs: of all parts of the model, or of the layers alone. If these price passes, the head takes as long as they do on
            all devices; else it takes so many layers' time as it has FLOPs. In single numbers, every layer takes the same.
        schedules: what would run, per number of barriers; what is not allowed is missing, but 0 is not.
    """
    placement, slices = schedules[0].placement, schedules[0].slices
    parts = costs.part_prices
    if costs.vocabulary is None and parts is not None:
        head, costs = parts.head, costs.without_ends()
    elif costs.vocabulary is None:
        seconds = costs.seconds(placement, slices)
        head = head_in_layers(model) * sum(map(sum, (seconds[kind] for kind in (Kind.F, Kind.B)))) / sum(layout)
    else:
        passes = costs.vocabulary.seconds(placement.num_devices, slices)
        head = sum(map(sum, (passes[kind] for kind in (Kind.S, Kind.T))))
    # Costs per stage say what the layers take where they are, and nothing of other places.
    moving: dict[str, Any] = {"layout": layout} if costs.are_single else {}
    if moving and getattr(model, "hybrid_layer_pattern", None) is None:  # of which all layers are alike
        moving["layers"] = sum(layout)
    choice = choose_vocabulary(schedules[0], costs, head, **moving, with_passes=schedules)
    if choice.best.name == REDISTRIBUTE:
        layers = choice.best.layers
        tell(logger, "vocabulary: %s; --pipeline-model-parallel-layout for layers per stage %s", choice.reason, layers)
        # Layers are where the user has put them, so this is about what is left.
        choice = choice.without(REDISTRIBUTE)
    tell(logger, "vocabulary: %s", choice.reason)
    return 0 if choice.best.name == OFF else BARRIERS_OF_ALGORITHM[int(choice.best.name)]
