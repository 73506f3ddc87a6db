"""Norms of the queries and keys of a gated delta net."""

from __future__ import annotations

import torch


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return ``x`` with rows of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
