"""Make a chunk of a Megatron model compute one slice of a sequence instead of a whole sequence.

Forward pre-hooks do this while a step runs. The model gets the slice's tokens and labels, rotary embeddings begin at
the slice's first position, and attention gets the keys and values of the earlier slices too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.runtime import KeyValueCache

_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""Arguments of the model that have the shape ``[b, s]`` and are cut into slices."""
_WHOLE = ("decoder_input", "packed_seq_params", "inference_context")
"""Arguments of the model that cannot be cut into slices, and are refused."""
_POSITIONS = ("learned_absolute", "rope", "yarn", "none")


@dataclass(eq=False)
class KeyValueCaches:
    """The keys and values of one microbatch's sequences in all layers of a chunk.

    ``tokens`` is the length of a whole sequence. ``hold`` is called with each tensor that is kept here. ``leave_out``
    is called with each that Megatron keeps.
    """

    tokens: int
    hold: Callable[[torch.Tensor], object]
    leave_out: Callable[[torch.Tensor], object]
    _caches: dict[tuple[torch.nn.Module, str], KeyValueCache] = field(default_factory=dict)

    def of(self, layer: torch.nn.Module, name: str) -> KeyValueCache:
        """Return the cache of a layer. ``name`` is ``key`` or ``value``."""
        if (layer, name) not in self._caches:
            self._caches[layer, name] = KeyValueCache(self.tokens, self.hold)
        return self._caches[layer, name]


class _SlicePart(NamedTuple):
    """The slice that runs now: its tokens from ``begin`` up to, but without, ``end``, and its sequence's caches."""

    begin: int
    end: int
    caches: KeyValueCaches


class SlicedModel:
    """A model chunk that can run slice by slice. Raise an UnsupportedError if a part of the chunk cannot."""

    def __init__(self, chunk: torch.nn.Module):
        model = unwrap_model(chunk)
        if not isinstance(model, GPTModel):
            raise UnsupportedError(
                "slices-model",
                f"sequence slices run through a GPTModel, and this is a {type(model).__name__}; leave out -o slices, or take a "
                "schedule that has none",
            )
        if model.position_embedding_type not in _POSITIONS:
            raise UnsupportedError(
                "slices-model",
                f"position embeddings of type {model.position_embedding_type} cannot begin in the middle of a sequence; pass "
                "--position-embedding-type rope, or take a schedule without sequence slices",
            )
        self._model = model
        self._parameters = inspect.signature(model.forward)
        self._attention = [module for module in model.modules() if isinstance(module, Attention)]
        for attention in self._attention:
            _check_attention(attention)
        self._part: _SlicePart | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Register the hooks on the model, and turn off options that need whole sequences, while the block runs.

        The hooks have an effect only inside ``running``.
        """
        with ExitStack() as stack:

            def change(owner: object, name: str, value: object) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            def hook(module: torch.nn.Module, before: Callable) -> None:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)

            hook(self._model, self._cut_arguments)
            for module in self._model.modules():
                if isinstance(module, RotaryEmbedding):
                    hook(module, self._move_positions)
                    stack.callback(module.register_forward_hook(self._leave_out_angles).remove)
                elif getattr(module, "fuse_wgrad_accumulation", False):
                    # With this cache, Transformer Engine overwrites gradients in the backward of the step's first forward,
                    # and other slices run backward before it.
                    change(module, "disable_parameter_transpose_cache", True)
            for attention in self._attention:
                core = attention.core_attention
                hook(core, self._show_earlier)
                if isinstance(core, DotProductAttention):
                    # The fused kernels know causal masks of as many queries as keys only.
                    change(core.scale_mask_softmax, "scaled_masked_softmax_fusion", False)
            yield

    @contextmanager
    def running(self, begin: int, end: int, caches: KeyValueCaches) -> Iterator[None]:
        """Make the model compute the tokens from ``begin`` to ``end`` (exclusive) while the block runs.

        The block is a forward, a backward or a recomputation.
        """
        before, self._part = self._part, _SlicePart(begin, end, caches)
        try:
            yield
        finally:
            self._part = before

    def _cut_arguments(self, module: torch.nn.Module, arguments: tuple, named: dict):
        if self._part is None:
            return None
        begin, end, caches = self._part
        bound = self._parameters.bind(*arguments, **named)
        passed = bound.arguments
        for name in _WHOLE:
            if passed.get(name) is not None:
                raise UnsupportedError(
                    "slices-forward-step",
                    f"the forward step passes {name} to the model, and {name} cannot be cut into sequence slices; "
                    "leave it out, or take a schedule without slices",
                )
        for name in _PER_TOKEN:
            tensor = passed.get(name)
            if tensor is None:
                continue
            if tensor.dim() != 2 or tensor.size(1) != caches.tokens:
                raise UnsupportedError(
                    "slices-forward-step",
                    f"the forward step passes {name} of shape {tuple(tensor.shape)} to the model, and sequence slices need "
                    f"[microbatch, {caches.tokens}]; pass whole sequences of --seq-length tokens",
                )
            passed[name] = tensor[:, begin:end].contiguous()
        return bound.args, bound.kwargs

    def _move_positions(self, module: torch.nn.Module, arguments: tuple, named: dict):
        if self._part is None:
            return None
        return arguments, named | {"offset": named.get("offset", 0) + self._part.begin}

    def _leave_out_angles(self, module: torch.nn.Module, arguments: tuple, output: object) -> None:
        """Do not count the angles of rotary embeddings, which fused kernels save: Megatron keeps them between steps."""
        angles = output[0] if isinstance(output, tuple) else output  # yarn also returns a scale
        if self._part is not None and isinstance(angles, torch.Tensor):
            self._part.caches.leave_out(angles)

    def _show_earlier(self, core: torch.nn.Module, arguments: tuple, named: dict):
        if self._part is None:
            return None
        begin, end, caches = self._part
        query, key, value, mask, *rest = arguments
        key = caches.of(core, "key").append(key, begin)
        value = caches.of(core, "value").append(value, begin)
        if not isinstance(core, DotProductAttention):
            # Transformer Engine ignores the mask, and aligns its own to the last query and the last key.
            return (query, key, value, None, *rest), named | {"attn_mask_type": AttnMaskType.causal_bottom_right}
        if mask is None:
            positions = torch.arange(end, device=query.device)
            mask = positions > positions[begin:, None]  # [queries, keys]; True hides a key
            mask = mask[None, None]
        else:
            mask = mask[..., begin:end, :end]
        return (query, key, value, mask, *rest), named


def _check_attention(attention: Attention) -> None:
    """Raise an UnsupportedError if a layer's attention cannot run slice by slice.

    It must be able to use the keys and values of earlier slices, and be causal.
    """
    core = attention.core_attention
    if type(core) not in (DotProductAttention, TEDotProductAttention):
        raise UnsupportedError(
            "slices-attention",
            f"layer {attention.layer_number} attends by {type(core).__name__}, which does not take keys and values of earlier "
            "sequence slices; use dot-product attention of Megatron or Transformer Engine, or take a schedule without slices",
        )
    if attention.attn_mask_type is not AttnMaskType.causal:
        raise UnsupportedError(
            "slices-attention",
            f"layer {attention.layer_number} attends with a mask of type {attention.attn_mask_type.name}: in sequence slices a "
            "token sees earlier ones only, so attention must be causal; take a schedule without slices",
        )


def boundaries(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return ``(first token, end)`` of each slice, given the slices' tokens: ``[2, 3]`` gives ``[(0, 2), (2, 5)]``."""
    return list(pairwise(accumulate(tokens, initial=0)))
