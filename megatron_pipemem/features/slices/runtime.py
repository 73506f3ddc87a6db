"""Keep the keys or the values of a sequence that runs in slices, and gather their gradients.

Slices run forward from the first to the last, and backward from the last to the first (arXiv 2406.03488, section 3.2). Keys and
values of earlier slices stand in one tensor with those of the slice that runs, so attention reads them without a copy, and what
it saves for the backward is a view of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class KeyValueCache:
    """The keys, or the values, of one layer for one sequence.

    Args:
        tokens: of the whole sequence.
        hold: told of every tensor that is kept, to count it.
    """

    def __init__(self, tokens: int, hold: Callable[[torch.Tensor], object]):
        self._tokens, self._hold = tokens, hold
        self._whole: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    def append(self, part: torch.Tensor, begin: int) -> torch.Tensor:
        """Keep a slice, and return it behind all earlier ones, ``[begin + its tokens, ...]``.

        Running a slice again writes what stands there already. In the backward, the gradients that later slices have for this
        one are added to its own.

        Args:
            part: of the slice, ``[its tokens, ...]``.
            begin: tokens of all earlier slices.
        """
        grown: torch.Tensor = _Append.apply(part, self, begin)
        return grown

    def write(self, part: torch.Tensor, begin: int) -> torch.Tensor:
        """Keep a slice, and return it behind all earlier ones; autograd has no part in it."""
        if self._whole is None:
            self._whole = part.new_empty(self._tokens, *part.shape[1:])
            self._hold(self._whole)
        end = begin + part.size(0)
        # A new alias each time. Autograd keeps a version per alias, and views of earlier slices must not look overwritten.
        whole = self._whole.data
        whole[begin:end].copy_(part)
        return whole[:end]

    def add_gradient(self, gradient: torch.Tensor, begin: int) -> torch.Tensor:
        """Keep the gradients that a slice has for earlier ones, and return all of its own.

        Args:
            gradient: of what ``append`` returned to the slice.
            begin: as of ``append``.
        """
        own, end = gradient[begin:], gradient.size(0)
        if self._gradient is None:  # the last slice, whose keys no other has seen
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
