"""Marks the weights of a model whose gradients are computed in I."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_pipemem.runtime.weight_gradients import EARLY, is_early
from megatron_pipemem.schedule.options import EarlyWeights, early_weights

_EXPERTS = re.compile(r"(?:^|\.)experts\.(?:local_experts\.\d+\.)?linear_(fc[12])\.weight")
"""Weights of routed experts, which Megatron computes one by one or in groups."""


def early_modules(asked: str, config: Any) -> frozenset[EarlyWeights]:
    """Return the modules of a model whose weight gradients are computed in I.

    Args:
        asked: see ``options.early_weights``.
        config: Megatron's configuration of the model.
    """
    if not getattr(config, "num_moe_experts", None):
        return early_weights(asked, 0, 0)
    ranks = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) / ranks
    return early_weights(asked, config.hidden_size, width)


def mark_early(chunks: Sequence[torch.nn.Module], modules: Collection[EarlyWeights]) -> list[torch.nn.Parameter]:
    """Mark the weights of these modules. Returns those that were not marked before.

    Args:
        chunks: of this rank.
        modules: to compute the gradients of in I.
    """
    found = dict.fromkeys(weight for chunk in chunks for name, weight in _weights(chunk) if name in modules)
    marked = [weight for weight in found if not is_early(weight)]
    for weight in marked:
        setattr(weight, EARLY, True)
    return marked


def _weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, weight in chunk.named_parameters():
        if expert := _EXPERTS.search(name):
            yield f"experts_{expert[1]}", weight
    modules: Iterator[Any] = chunk.modules()
    for module in modules:
        # A head that is cut over the pipeline is another module, and computes its weight gradient by itself.
        if isinstance(getattr(module, "output_layer", None), ColumnParallelLinear):
            tied = module.share_embeddings_and_output_weights
            yield "head", module.shared_embedding_or_output_weight() if tied else module.output_layer.weight
