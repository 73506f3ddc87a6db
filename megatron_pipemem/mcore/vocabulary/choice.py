"""Tell whether a model's vocabulary is worth cutting, from its sizes, its layout and what passes take."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from megatron_pipemem.mcore.agreement import tell
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.features.vocabulary.choice import REDISTRIBUTE, choose_vocabulary
from megatron_pipemem.schedule.options import OFF

logger = logging.getLogger(__name__)


def head_in_layers(model: torch.nn.Module) -> float:
    """Return how many transformer layers take as long as the whole head, by the FLOPs of their matrix products.

    A mixture of experts counts with the experts that a token visits, in every layer.

    Args:
        model: a Megatron language model, or a chunk of one.
    """
    config = model.config
    heads = config.num_attention_heads * config.kv_channels
    keys = (config.num_query_groups or config.num_attention_heads) * config.kv_channels
    width = config.ffn_hidden_size
    if config.num_moe_experts:
        width = config.moe_router_topk * (config.moe_ffn_hidden_size or width)
    projections = config.hidden_size * (2 * heads + 2 * keys) + 2 * model.max_sequence_length * heads
    return (
        config.hidden_size
        * model.vocab_size
        / (projections + (3 if config.gated_linear_unit else 2) * config.hidden_size * width)
    )


def choose_barriers(
    model: torch.nn.Module, layout: Sequence[int], costs: Costs, schedules: Mapping[int, Schedule]
) -> int:
    """Return the barriers of the best way to deal with the model's head, 0 to leave it where it is.

    Args:
        model: a chunk, built and not yet cut.
        layout: layers of every stage.
        costs: of the layers alone. If they price passes, the head takes as long as these on all devices; else it takes so
            many layers' time as it has FLOPs. In single numbers, every layer takes the same.
        schedules: what would run, per number of barriers; what is not allowed is missing, but 0 is not.
    """
    placement = schedules[0].placement
    if costs.vocabulary is None:
        seconds = costs.seconds(placement)
        head = head_in_layers(model) * sum(map(sum, (seconds[kind] for kind in (Kind.F, Kind.B)))) / sum(layout)
    else:
        passes = costs.vocabulary.seconds(placement.num_devices)
        head = sum(map(sum, (passes[kind] for kind in (Kind.S, Kind.T))))
    # Costs per stage say what the layers take where they are, and nothing of other places.
    per_stage = any(
        isinstance(price, Sequence) for price in (costs.forward, costs.backward_input, costs.backward_weight)
    )
    moving = {} if per_stage else {"layers": sum(layout), "layout": layout}
    choice = choose_vocabulary(schedules[0], costs, head, **moving, with_passes=schedules)
    if choice.best.name == REDISTRIBUTE:
        layers = choice.best.layers
        tell(logger, "vocabulary: %s; --pipeline-model-parallel-layout for layers per stage %s", choice.reason, layers)
        # Layers are where the user has put them, so this is about what is left.
        choice = choice.without(REDISTRIBUTE)
    tell(logger, "vocabulary: %s", choice.reason)
    return 0 if choice.best.name == OFF else BARRIERS_OF_ALGORITHM[int(choice.best.name)]
