"""Tell whether everything that a rank launches goes into one hardware queue."""

from __future__ import annotations

import os

import torch

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron asks for 1 of them with tensor or context parallelism before Blackwell."""


def has_single_queue(device: torch.device, forced: bool = False) -> bool:
    """Return whether programs for this device are to be lowered for a single queue.

    Args:
        device: where the model is.
        forced: lower for a single queue whatever the device.
    """
    return forced or (device.type == "cuda" and os.environ.get(CONNECTIONS) == "1")
