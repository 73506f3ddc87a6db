"""What Megatron asks of the package ``fla``, computed by PyTorch on any device, for tests: the real one needs Triton."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch


def by_sequence(compute: Callable, ends: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """Compute each of the packed sequences, which ``ends`` separate as ``cu_seqlens`` does, by itself."""
    parts = [compute(*(tensor[:, begin:end] for tensor in tensors)) for begin, end in pairwise(ends.tolist())]
    return torch.cat(parts, 1)
