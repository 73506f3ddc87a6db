"""Vocabulary shards of a sleeping device: the real layers and collectives on a few words, in passes that take their price."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from emulated.device import ROWS, WIDTH, Device
from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions, Normalised, VocabularyShards
from megatron_pipemem.features.vocabulary.runtime.passes import Batch, Channels, VocabularyPasses
from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition, WeightShard
from megatron_pipemem.schedule.action import VOCABULARY_COMPUTE, Action
from megatron_pipemem.schedule.schedule import Schedule

WORDS = 61


def open_channels() -> Channels:
    """Every rank calls this at the same time."""
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1), group=group)
    return Channels(group, group)


class SleepingVocabulary:
    """This rank's shards of an embedding and a head, and what the last stage does for the head.

    The sleeping stages between the two hand on what they get, so what every loss must be is known. Every batch has labels:
    nobody asks for logits.

    Args:
        device: takes the time of the passes, and records them.
        schedule: has the passes.
        channels: carry the collectives.
    """

    def __init__(self, device: Device, schedule: Schedule, channels: Channels):
        self._device, self._schedule, self._channels = device, schedule, channels
        rank, m = dist.get_rank(), schedule.num_microbatches
        partition = VocabularyPartition(WORDS, schedule.placement.num_devices)
        drawn = torch.Generator().manual_seed(0)
        self._embedding, self._head = (torch.randn(WORDS, WIDTH, generator=drawn) for _ in range(2))
        embedding, head = (
            WeightShard(torch.nn.Parameter(whole.tensor_split(partition.shards)[rank].clone()), partition, rank)
            for whole in (self._embedding, self._head)
        )
        self._shards = VocabularyShards(embedding, head, HeadOptions(barriers=schedule.vocabulary_barriers))
        tokens, self._labels = (torch.randint(WORDS, (m, 1, ROWS), generator=drawn) for _ in range(2))
        self._batch = Batch(list(tokens), list(self._labels))

    def passes(self) -> VocabularyPasses:
        """Those of one step."""
        return _SleepingPasses(
            self._device,
            self._schedule.placement,
            dist.get_rank(),
            self._shards,
            self._channels,
            self._batch,
            self,
            trains=True,
        )

    # Last stage

    def gather_head_input(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def scatter_head_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def loss(self, microbatch: int, scored: Sequence[Normalised]) -> torch.Tensor:
        """Sums the losses.

        Raises:
            RuntimeError: a loss is not that of the whole matrices.
        """
        logits = self._embedding[self._batch.tokens[microbatch][0]] @ self._head.t()
        expected = torch.nn.functional.cross_entropy(logits, self._labels[microbatch, 0], reduction="none")
        losses = torch.cat([rank.losses for rank in scored])
        if not torch.allclose(losses[:, 0], expected, rtol=1e-4):
            raise RuntimeError(f"losses of microbatch {microbatch} are {losses[:, 0]} and should be {expected}")
        return torch.ones_like(losses)


class _SleepingPasses(VocabularyPasses):
    """Takes their price for the passes. Collectives are as fast as they are."""

    def __init__(self, sleeper: Device, *arguments, **options):
        super().__init__(*arguments, **options)
        self._sleeper = sleeper

    def perform(self, action: Action) -> None:
        since = time.perf_counter()
        super().perform(action)
        if action.kind in VOCABULARY_COMPUTE:
            self._sleeper.work(action.kind, action.stage, since)
