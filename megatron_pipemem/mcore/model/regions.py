"""Say what selective recomputation drops of Megatron's layers: norms, the activation function of an MLP, unfused core
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP

from megatron_pipemem.runtime.selective import Replay, region


@contextmanager
def random_numbers_again(states: tuple) -> Iterator[None]:
    """Let random numbers be, within this block, those that followed when ``random._get_all_rng_states`` returned
    ``states``.
    """
    with random._fork_rng():
        random._set_all_rng_states(*states)
        yield


@contextmanager
def regions_of(model: torch.nn.Module) -> Iterator[None]:
    """Make the cheap parts of the model, while it runs within this block, regions of the recording forward
    (``runtime.selective``).

    Cheap are all norms that stand alone (not those that Transformer Engine fuses with a linear layer), what stands between the
    two linear layers of an MLP, and attention between its projections where it is Megatron's own, which keeps ``s x s``
    scores. What Megatron's own ``--recompute-*`` flags run under a checkpoint keeps nothing anyway.
    """
    norms = {
        child
        for parent in model.modules()
        for name, child in parent.named_children()
        if name.endswith("norm") and not isinstance(child, IdentityOp)
    }
    with ExitStack() as stack:
        for module in model.modules():
            forward = None
            if module in norms:
                forward = _as_region(module.forward, lambda: nullcontext)
            elif isinstance(module, DotProductAttention):
                forward = _as_region(module.forward, _remember_random_numbers)
            elif getattr(module.forward, "__func__", None) is MLP.forward:
                forward = partial(_mlp, module)
            if forward is not None:
                stack.enter_context(_shadowed(module, {"forward": forward}))
        yield


@contextmanager
def _shadowed(module: torch.nn.Module, stand_ins: Mapping[str, object]) -> Iterator[None]:
    """Let attributes of the instance hide what its class or its parts have: hooks on the module run as ever."""
    before = {name: module.__dict__[name] for name in stand_ins if name in module.__dict__}
    module.__dict__.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del module.__dict__[name]
        module.__dict__.update(before)


def _as_region(forward: Callable, replay: Callable[[], Replay]) -> Callable:
    def run(*arguments, **named):
        # Not the tensors themselves, which would stay as long as what is to run again.
        number, names = len(arguments), tuple(named)

        def positional(*values):
            return forward(*values[:number], **dict(zip(names, values[number:], strict=True)))

        return region(positional, replay)(*arguments, *named.values())

    return run


def _remember_random_numbers() -> Replay:
    return partial(random_numbers_again, random._get_all_rng_states())


class _StandIn(torch.nn.Module):
    """A function where Megatron wants a module."""

    def __init__(self, forward: Callable):
        super().__init__()
        self.forward = forward


def _mlp(mlp: MLP, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **named):
    """``MLP.forward`` with a region between its two linear layers."""
    if per_token_scale is not None and mlp.config.add_bias_linear:
        # The bias is then scaled and added behind the second layer, in Megatron's own code.
        return MLP.forward(mlp, hidden_states, per_token_scale, **named)

    def between(*of_first_layer_and_scale):
        *of_first_layer, scale = of_first_layer_and_scale
        stand_ins = {
            "linear_fc1": _StandIn(lambda _: tuple(of_first_layer)),
            "linear_fc2": _StandIn(lambda activated: (activated, None)),
        }
        with _shadowed(mlp, stand_ins):
            return MLP.forward(mlp, hidden_states=None, per_token_scale=scale, **named)[0]

    activated = region(between, lambda: nullcontext)(*mlp.linear_fc1(hidden_states), per_token_scale)
    return mlp.linear_fc2(activated)
