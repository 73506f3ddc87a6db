"""Whether a model's vocabulary is worth cutting, from its sizes."""

from __future__ import annotations

import logging

import torch

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary.choice import REDISTRIBUTE, choose_vocabulary
from megatron_pipemem.schedule.vocabulary.needs import BARRIERS_OF_ALGORITHM

logger = logging.getLogger(__name__)


def head_in_layers(model: torch.nn.Module) -> float:
    """How many transformer layers take as long as the whole head, by the FLOPs of their matrix products.

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


def choose_barriers(model: torch.nn.Module, schedule: Schedule) -> int:
    """Barriers of the best way to deal with the model's head under a schedule, 0 to leave it where it is.

    Args:
        model: a chunk, built and not yet cut.
        schedule: without vocabulary passes.
    """
    costs, layers = Costs(), model.config.num_layers
    seconds = costs.seconds(schedule.placement)
    head = head_in_layers(model) * sum(map(sum, (seconds[kind] for kind in ("F", "I", "W")))) / layers
    choice = choose_vocabulary(schedule, costs, head, layers=layers)
    logger.info("vocabulary: %s", choice.reason)
    best = choice.best
    if best.name == REDISTRIBUTE:
        # Layers are where the user's layout has put them, so of what is left the fastest.
        feasible = [option for name, option in choice.options.items() if name != REDISTRIBUTE]
        best = min(feasible, key=lambda option: option.makespan)
        logger.info(
            "vocabulary: with --pipeline-model-parallel-layout for %s layers per stage there is no need for "
            "--pipemem-vocab-parallel %s",
            choice.best.layers,
            best.name,
        )
    return 0 if best.name == OFF else BARRIERS_OF_ALGORITHM[int(best.name)]
