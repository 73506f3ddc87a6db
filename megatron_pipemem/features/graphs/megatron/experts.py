"""Leave the experts of a captured forward out of its graphs, as Megatron's modules ``moe_router`` and ``moe_preprocess`` do.

A layer's router, its shared experts and the order of its tokens are captured. Tokens then travel to their experts, are
computed there, and travel back without a graph, because their number differs from step to step. The sum of a token's
experts has a fixed size again. Shared experts that overlap the messages run without a graph, too, with that sum.

    graph: attention, norm, route, preprocess | gap: dispatch, experts, combine | graph: postprocess, residual, attention, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model.stages import attributes_of, shadowed
from megatron_pipemem.runtime.sections import Section

_DISPATCHERS = (MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher)
_BEFORE_MESSAGES = {"cuda_dtoh_point": "before_ep_alltoall"}
"""Where a dispatcher copies the numbers of tokens to the host: within the gap, as Megatron's does with ``moe_preprocess``."""


def layers_with_experts(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the layers of a model that have experts as ``mlp``. Raise an UnsupportedError if experts are elsewhere."""
    layers = tuple(module for module in model.modules() if isinstance(getattr(module, "mlp", None), MoELayer))
    inside = {layer.mlp for layer in layers if hasattr(layer, "mlp_bda")}
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and (module not in inside or type(module.token_dispatcher) not in _DISPATCHERS):
            raise UnsupportedError(
                "graph-model",
                f"the experts of {name} are not those of one of Megatron's transformer layers with its dispatchers allgather, "
                "alltoall and flex; pass --cuda-graph-impl none",
            )
    return layers


_OUTSIDE = ("dispatch", "routed_experts_compute", "combine", "postprocess")
"""The methods of experts that run in a gap, the last one only if shared experts do."""


@dataclass(frozen=True)
class _Gap:
    """The gap of one layer: the experts of a microbatch, with the dispatcher's state from the graph before.

    ``names`` are the attributes (``attributes_of``) that hold tensors of that graph, in the order in which they follow the
    tokens and probabilities. Each has the position of its dictionary before it. ``constants`` are the attributes that hold
    no tensors, one mapping per dictionary. ``precision`` returns the context in which Transformer Engine computed the graph.
    ``shared`` are shared experts that overlap messages, whose input is the last tensor if the dispatcher takes it before them.
    """

    dispatcher: Any
    methods: Sequence[Callable]
    names: Sequence[tuple[int, str]]
    constants: Sequence[Mapping[str, Any]]
    precision: Callable[[], AbstractContextManager]
    shared: Any = None

    def __call__(self, tokens: torch.Tensor, probs: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        state, of_shared = others[: len(self.names)], others[len(self.names) :]
        keepers = attributes_of(self.dispatcher)
        before = [dict(attributes) for attributes in keepers]
        for attributes, constants in zip(keepers, self.constants, strict=True):
            attributes.update(constants)
        keepers[0]["shared_experts"] = self.shared
        for (position, name), tensor in zip(self.names, state, strict=True):
            keepers[position][name] = tensor
        try:
            with self.precision():
                return self.compute(tokens, probs, *of_shared)
        finally:
            for attributes, earlier in zip(keepers, before, strict=True):
                attributes.clear()
                attributes.update(earlier)

    def compute(self, tokens: torch.Tensor, probs: torch.Tensor, *of_shared: torch.Tensor) -> torch.Tensor:
        dispatch, compute, combine, add_shared = self.methods
        if of_shared:
            self.shared.pre_forward_comm(*of_shared)
        output, _ = compute(*dispatch(tokens, probs))
        output = combine(output)
        return output if self.shared is None else add_shared(output, None)


def _precision(config: Any) -> Callable[[], AbstractContextManager]:
    """Return a function that returns the context in which Transformer Engine's layers compute now, such as one of fp8.

    Megatron opens it around layers, and a replay runs none.
    """
    if not (config.fp8 or getattr(config, "fp4", None)):
        return nullcontext
    from transformer_engine.pytorch import fp8_autocast
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as state

    return partial(
        fp8_autocast,
        enabled=state.is_fp8_enabled(),
        fp8_recipe=state.get_fp8_recipe(),
        fp8_group=state.get_fp8_group(),
    )


@contextmanager
def experts_left_out(
    model: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    cut: Callable[..., torch.Tensor],
    earlier: Callable[[int], Section],
) -> Iterator[None]:
    """Cut the captured forward of a model's layers with experts within a ``with`` block, before and after tokens travel.

    ``cut`` and ``earlier`` are those of the forward's ``PassGraphs``.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_left_out(layer, cut, earlier))
        for block in model.modules():
            if isinstance(block, MultiTokenPredictionBlock) and not {*layers}.isdisjoint(block.modules()):
                stack.enter_context(_depths_joined(block, earlier))
        yield


@contextmanager
def _left_out(layer: Any, cut: Callable[..., torch.Tensor], earlier: Callable[[int], Section]) -> Iterator[None]:
    experts, residual_add = layer.mlp, layer.mlp_bda
    dispatcher, finish = experts.token_dispatcher, experts.postprocess
    methods = [getattr(experts, name) for name in _OUTSIDE]
    overlapped = dispatcher.shared_experts
    of_shared: list[torch.Tensor] = []  # the input of overlapped shared experts, until the gap has it
    # Such as the order of experts on other ranks, which no microbatch changes.
    permanent = {
        id(value) for held in attributes_of(dispatcher) for value in held.values() if isinstance(value, torch.Tensor)
    }

    def dispatch(tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keepers = attributes_of(dispatcher)
        constants = [
            {name: value for name, value in held.items() if not isinstance(value, torch.Tensor)} for held in keepers
        ]
        # Some are probabilities that a flex dispatcher takes from its manager: the experts' backward gives their gradients.
        state = {
            (position, name): value
            for position, held in enumerate(keepers)
            for name, value in held.items()
            if isinstance(value, torch.Tensor) and id(value) not in permanent
        }
        if on_host := [name for (_, name), value in state.items() if value.device != tokens.device]:
            raise UnsupportedError(
                "graph-model",
                f"the dispatcher of experts makes {', '.join(on_host)} on the host, which a replay does not repeat; pass "
                "--cuda-graph-impl none",
            )
        gap = _Gap(dispatcher, methods, tuple(state), constants, _precision(experts.config), overlapped)
        others = [*state.values(), *of_shared]
        of_shared.clear()
        return cut(gap, tokens, probs, *others), probs

    def postprocess(output: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        if overlapped is not None:
            return output
        return finish(output, None if shared is None else earlier(1).hand_over(shared))

    def mlp_bda(*settings: bool) -> Callable:
        def add(output: Any, residual: torch.Tensor, probability: float) -> torch.Tensor:
            return residual_add(*settings)(output, earlier(1).hand_over(residual), probability)

        return add

    inside = {
        "dispatch": dispatch,
        "routed_experts_compute": lambda output, probs: (output, None),
        "combine": lambda output: output,
        "postprocess": postprocess,
    }
    of_dispatcher: dict[str, Any] = dict(_BEFORE_MESSAGES) if hasattr(dispatcher, "cuda_dtoh_point") else {}
    if overlapped is not None:
        of_dispatcher["shared_experts"] = SimpleNamespace(pre_forward_comm=of_shared.append)
    with (
        shadowed(dispatcher, of_dispatcher),
        shadowed(experts, inside),
        shadowed(layer, {"mlp_bda": mlp_bda}),
    ):
        yield


@contextmanager
def _depths_joined(block: Any, earlier: Callable[[int], Section]) -> Iterator[None]:
    """Hand the hidden states of all depths of multi-token prediction over to the graph that joins them.

    A depth itself takes the hidden states before it from its own graph. With two depths:

        graph: decoder, ..., H, ... | gap | graph: ..., H1, ... | gap | graph: ..., H2, cat(H, H1, H2)
    """
    join, before, left = block.forward, None, 0

    def run_depths(**arguments: Any) -> torch.Tensor:
        nonlocal before, left
        before, left = arguments["hidden_states"], block.config.mtp_num_layers
        joined = join(**arguments | {"hidden_states": earlier(0).hand_over(before)})
        before = None
        return joined

    def run_depth(run: Callable[..., tuple], **arguments: Any) -> tuple:
        nonlocal before, left
        if arguments["hidden_states"].requires_grad:  # not detached by Megatron
            arguments["hidden_states"] = before
        before, *others = run(**arguments)
        left -= 1
        return (earlier(0).hand_over(before) if left else before, *others)

    with ExitStack() as stack:
        for depth in block.layers:
            stack.enter_context(shadowed(depth, {"forward": partial(run_depth, depth.forward)}))
        with shadowed(block, {"forward": run_depths}):
            yield
