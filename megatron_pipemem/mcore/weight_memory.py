"""Bytes of the weights that a rank holds: of all its stages, copies of the model and versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_pipemem.schedule.placement import Placement


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What these take, each once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def count_weights(chunks: Sequence[torch.nn.Module], stages: Sequence[int]) -> dict[int, int]:
    """Bytes of the parameters of every stage on this rank, gradients and optimizer not included.

    Args:
        chunks: of this rank.
        stages: their numbers.
    """
    return {stage: tensor_bytes(chunk.parameters()) for stage, chunk in zip(stages, chunks, strict=True)}


def predict_weights(placement: Placement, device: int, bytes_of: Mapping[int, int], versions: int = 1) -> int:
    """Bytes of a device's weights as its schedule says.

    Args:
        placement: of the schedule.
        device: whose.
        bytes_of: parameters of every stage of the first copy of the model, wherever it is.
        versions: of every stage that the device holds.
    """
    return versions * sum(bytes_of[stage % placement.model_stages] for stage in placement.stages[device])
