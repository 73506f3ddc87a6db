"""Watch Megatron's mixtures of experts: what they leave of a microbatch, and how many tokens their experts get."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity


def expert_layers(model: torch.nn.Module) -> tuple[MoELayer, ...]:
    """Return the layers of a model that are mixtures of experts."""
    return tuple(module for module in model.modules() if isinstance(module, MoELayer))


@contextmanager
def nothing_left_behind(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Take from the token dispatchers, when this block ends, the tensors that it has left there.

    Megatron's dispatchers keep probabilities and routing of the last microbatch, and with them its graph and the stage's
    input, until the next one comes, which may be long after its backward. The flex dispatcher keeps them in its manager of
    DeepEP, HybridEP or NCCL EP.

    Args:
        layers: whose dispatchers work in this block.
    """
    keepers = [
        vars(keeper)
        for layer in layers
        for keeper in (layer.token_dispatcher, getattr(layer.token_dispatcher, "_comm_manager", None))
        if keeper is not None
    ]
    before = [dict(now) for now in keepers]
    yield
    for now, earlier in zip(keepers, before, strict=True):
        for name in [name for name, value in now.items() if isinstance(value, torch.Tensor)]:
            if now[name] is not earlier.get(name):
                now[name] = None


@contextmanager
def routing_noted(models: Iterable[torch.nn.Module], note: Callable[[int, int, int], None]) -> Iterator[None]:
    """Tell ``note``, within this block, whenever the experts of a layer get tokens.

    Args:
        models: whose layers.
        note: gets the number of tokens, each counted once per expert that gets it; the most that it can be under a capacity
            factor, 0 without one; and what it would be if all experts got as many.
    """

    def tell(layer: MoELayer, experts: torch.nn.Module, arguments: tuple) -> None:
        visits = math.prod(layer.token_dispatcher.hidden_shape[:-1]) * layer.config.moe_router_topk
        note(arguments[0].size(0), _most_tokens(layer, visits), visits)

    hooks = [
        layer.experts.register_forward_pre_hook(partial(tell, layer))
        for model in models
        for layer in expert_layers(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _most_tokens(layer: MoELayer, visits: int) -> int:
    config, dispatcher = layer.config, layer.token_dispatcher
    if config.moe_expert_capacity_factor is None:
        return 0
    capacity = get_capacity(visits, config.num_moe_experts, config.moe_expert_capacity_factor)
    # No rank sends more than it has.
    return min(capacity * layer.num_local_experts, visits) * dispatcher.ep_size * dispatcher.tp_size
