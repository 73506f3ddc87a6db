"""Number formats of Transformer Engine's compiled extension."""

from __future__ import annotations

from enum import IntEnum

import torch


class DType(IntEnum):
    """Number formats."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
