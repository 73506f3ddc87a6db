"""Keep the keys or values of a sequence that runs in slices, and sum their gradients.

Slices run forward from the first to the last, and backward from the last to the first (arXiv 2406.03488, section 3.2).
The keys (or values) of all slices are in one tensor. So attention reads those of earlier slices without a copy, and
autograd saves views of this tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class KeyValueCache:
    """The keys, or the values, of one layer for the sequences of one microbatch.

    ``tokens`` is the length of a whole sequence. ``hold`` is called with each tensor that is kept here.
    """

    def __init__(self, tokens: int, hold: Callable[[torch.Tensor], object]):
        self._tokens, self._hold = tokens, hold
        self._buffer: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    def append(self, part: torch.Tensor, begin: int) -> torch.Tensor:
        """Store a slice's keys (or values), and return those of this and earlier slices, ``[begin + tokens, ...]``.

        A recomputed slice stores the same values again. In the backward, the slice's gradient includes those of later
        slices.
        """
        grown: torch.Tensor = _Append.apply(part, self, begin)
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

    def add_gradient(self, gradient: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the gradient of one slice's keys (or values), summed over this and all later slices.

        The part for earlier slices is kept until they run backward, so the slices call this from the last to the first.
        """
        own, end = gradient[begin:], gradient.size(0)
        if self._gradient is None:  # the last slice, whose keys only it has read
            if begin:
                self._gradient = gradient[:begin].clone()
                self._hold(self._gradient)
            return own
        self._gradient[:begin] += gradient[:begin]
        return own + self._gradient[begin:end]


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: torch.Tensor, cache: KeyValueCache, begin: int) -> torch.Tensor:
        ctx.cache, ctx.begin = cache, begin
        return cache.write(part.detach(), begin)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return ctx.cache.add_gradient(gradient, ctx.begin), None, None
