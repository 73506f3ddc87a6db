"""The pipeline rank that Megatron would give a model chunk if it dealt chunks round robin (see ``placement``)."""

from __future__ import annotations

import copy

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pipemem.schedule.placement import Placement


class DealtRank(int):
    """The rank that round robin would give a chunk. Whoever hands it on asks about that chunk and about no real rank."""


class RoundRobinRank(torch.distributed.ProcessGroup):
    """Stands in for the pipeline group within one chunk: knows rank and size, cannot communicate."""

    def rank(self) -> int:
        return DealtRank(super().rank())


def round_robin_rank(placement: Placement, device: int, chunk: int) -> int:
    """Return the pipeline rank that would hold a chunk if chunks were dealt round robin.

    Args:
        placement: which stage the chunk is.
        device: that holds it.
        chunk: its index among the device's chunks.
    """
    return placement.stages[device][chunk] % placement.num_devices


def groups_of_chunk(groups: ProcessGroupCollection, placement: Placement, chunk: int) -> ProcessGroupCollection:
    """Return Megatron's process groups as a chunk of this rank is to see them.

    Args:
        groups: of this rank.
        placement: of the schedule.
        chunk: its index among this rank's chunks.
    """
    rank = round_robin_rank(placement, groups.pp.rank(), chunk)
    seen = copy.copy(groups)
    if rank != groups.pp.rank():
        # torch's stub forgets the constructor that takes no store.
        seen.pp = RoundRobinRank(rank, groups.pp.size())  # type: ignore[call-arg]
    if not placement.is_round_robin:
        # The stock embedding group spans the first and the last rank; here both ends may be on one rank.
        seen.embd = None
    return seen
