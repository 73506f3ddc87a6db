"""The Hadamard transform in PyTorch, under the name of its CUDA package."""

from __future__ import annotations

import torch


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Multiply the last dimension, a power of two, by the Hadamard matrix and ``scale``."""
    parts, width = x.float(), 1
    while width < x.size(-1):
        first, second = parts.unflatten(-1, (-1, 2, width)).unbind(-2)
        parts, width = torch.stack((first + second, first - second), -2).flatten(-3), 2 * width
    return (parts * scale).to(x.dtype)
