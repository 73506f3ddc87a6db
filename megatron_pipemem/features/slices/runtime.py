"""Keep the tensors that the slices of a sequence share: keys, values and their gradients, and losses of routers.

Slices run forward from the first to the last, and backward from the last to the first (arXiv 2406.03488, section 3.2).
The keys (or values) of all slices are in one tensor. So attention reads those of earlier slices without a copy, and
autograd saves views of this tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class KeyValueCache:
    """The keys, or the values, of one layer for the sequences of one microbatch.

    ``tokens`` is the length of a whole sequence. ``hold`` is called with each tensor that is kept here.
    """

    def __init__(self, tokens: int, hold: Callable[[torch.Tensor], object]):
        self._tokens, self._hold = tokens, hold
        self._buffer: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    def append(self, part: torch.Tensor, begin: int, since: int = 0) -> torch.Tensor:
        """Store a slice's keys (or values), and return those of this and earlier slices, ``[begin + tokens, ...]``.

        A recomputed slice stores the same values again. In the backward, the slice's gradient includes those of later
        slices. Tokens of the result before ``since`` are not used, so their gradient is ignored.
        """
        grown: torch.Tensor = _Append.apply(part, self, begin, since)
        return grown

    def write(self, part: torch.Tensor, begin: int) -> torch.Tensor:
        """Do the same as ``append``, without autograd."""
        if self._buffer is None:
            self._buffer = part.new_empty(self._tokens, *part.shape[1:])
            self._hold(self._buffer)
        end = begin + part.size(0)
        # A new alias each time: autograd has a version per alias, and views of earlier slices must not seem overwritten.
        alias = self._buffer.data
        alias[begin:end].copy_(part)
        return alias[:end]

    def add_gradient(self, gradient: torch.Tensor, begin: int, since: int = 0) -> torch.Tensor:
        """Return the gradient of one slice's keys (or values), summed over this and all later slices.

        The part for earlier slices is kept until they run backward, so the slices call this from the last to the first.
        """
        own, end = gradient[begin:], gradient.size(0)
        if self._gradient is None:  # the last slice, whose keys only it has read
            if begin:
                self._gradient = gradient[:begin].clone()
                self._gradient[:since] = 0
                self._hold(self._gradient)
            return own
        self._gradient[since:begin] += gradient[since:begin]
        return own + self._gradient[begin:end]


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: torch.Tensor, cache: KeyValueCache, begin: int, since: int) -> torch.Tensor:
        ctx.cache, ctx.begin, ctx.since = cache, begin, since
        return cache.write(part.detach(), begin)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return ctx.cache.add_gradient(gradient, ctx.begin, ctx.since), None, None, None


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys: torch.Tensor, since: int, end: int) -> torch.Tensor:
        ctx.tokens, ctx.since, ctx.end = keys.size(0), since, end
        return keys.detach()[:end]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        whole = gradient.new_zeros(ctx.tokens, *gradient.shape[1:])
        whole[ctx.since : ctx.end] = gradient[ctx.since :]
        return whole, None, None


def used_keys(keys: torch.Tensor, since: int, end: int) -> torch.Tensor:
    """Return the keys before ``end``. Their gradient before ``since`` is ignored, because the caller does not use them."""
    used: torch.Tensor = _Used.apply(keys, since, end)
    return used


@dataclass(eq=False)
class SequenceState:
    """The tensors that the slices of one microbatch's sequences share in a chunk.

    ``tokens`` is the number of tokens of a sequence that this rank has, and ``ranks`` that of context-parallel ranks.
    ``hold`` is called with each tensor that is kept in a cache.
    """

    tokens: int
    hold: Callable[[torch.Tensor], object]
    ranks: int = 1
    has_backward: bool = True
    losses: dict[tuple[torch.nn.Module, str], Any] = field(default_factory=dict)
    """of routers, by the name of the loss"""
    documents: dict[int, Any] = field(default_factory=dict)
    """packed documents by slice, and those of this rank's ranges"""
    _caches: dict[tuple[torch.nn.Module, str], KeyValueCache] = field(default_factory=dict)

    def cache(self, layer: torch.nn.Module, name: str) -> KeyValueCache:
        """Return the cache of a layer. ``name`` is ``key`` or ``value``."""
        if (layer, name) not in self._caches:
            self._caches[layer, name] = KeyValueCache(self.tokens * self.ranks, self.hold)
        return self._caches[layer, name]


class SlicePart(NamedTuple):
    """The slice that runs now: its tokens from ``begin`` up to, but without, ``end``."""

    number: int  # within its microbatch, from 0
    begin: int
    end: int
    sequence: SequenceState

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.tokens

    @property
    def share(self) -> float:
        """The slice's share of the tokens of a sequence."""
        return (self.end - self.begin) / self.sequence.tokens
