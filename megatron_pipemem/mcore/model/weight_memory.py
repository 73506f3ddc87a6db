"""Count the bytes of the weights that a rank holds: of all its stages, replicas of the model and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_pipemem.schedule.placement import Placement


class WeightBytes(NamedTuple):
    """Hold the bytes of the parameters on one rank, gradients and optimizer not included."""

    of_stages: Mapping[int, int]
    """bytes of one version of every stage that the rank holds"""
    counted: int
    """bytes of all versions and replicas, as they are there"""
    planned_versions: int
    versions: int
    """how many there have been at once"""


def count_weights(chunks: Sequence[torch.nn.Module], stages: Sequence[int]) -> WeightBytes:
    """Count the bytes of chunks with one version of their parameters.

    Args:
        chunks: of this rank.
        stages: their numbers.
    """
    numbered = zip(stages, chunks, strict=True)
    of_stages = {stage: sum(parameter.nbytes for parameter in chunk.parameters()) for stage, chunk in numbered}
    return WeightBytes(of_stages, sum(of_stages.values()), 1, 1)


def predict_weights(placement: Placement, device: int, bytes_of: Mapping[int, int], versions: int = 1) -> int:
    """Return the bytes of a device's weights as its schedule says.

    Args:
        placement: of the schedule.
        device: whose.
        bytes_of: parameters of every stage of the first replica of the model, wherever it is.
        versions: of every stage that the device holds.
    """
    return versions * sum(bytes_of[stage % placement.model_stages] for stage in placement.stages[device])
