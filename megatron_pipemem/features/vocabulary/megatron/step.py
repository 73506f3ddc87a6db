"""Add vocabulary parallelism to a step: batches for every rank, other end stages, and who performs the passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.distributed as dist

from megatron_pipemem.features.slices.megatron.stage import SlicedStage
from megatron_pipemem.features.vocabulary.megatron.batches import share_batch
from megatron_pipemem.features.vocabulary.megatron.build import shards_group_of, shards_of
from megatron_pipemem.features.vocabulary.megatron.depths import keep_depths
from megatron_pipemem.features.vocabulary.megatron.stages import (
    FirstStage,
    LastStage,
    SlicedFirstStage,
    SlicedLastStage,
)
from megatron_pipemem.features.vocabulary.runtime.passes import Channels, VocabularyPasses
from megatron_pipemem.mcore.patching import Replacements
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.step.model_calls import Call, calls_of
from megatron_pipemem.mcore.symbols import PROCESS_MTP_LOSS
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.runtime.groups import destroy_groups, new_groups


class VocabularySteps(Extension):
    """Keeps the communicators of the passes between steps. Does nothing where the vocabulary is not cut.

    It comes behind what cuts sequences into slices, whose stages it takes for the pipeline's ends.
    """

    def __init__(self) -> None:
        self._channels: dict[dist.ProcessGroup, Channels] = {}

    def replacements(self) -> Replacements:
        return [(symbol, keep_depths) for symbol in PROCESS_MTP_LOSS]

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Share the batch, and put other stages at the pipeline's ends."""
        if not step.program.schedule.vocabulary_barriers:
            return ()
        context, placement, group = step.context, step.pipeline.placement, step.pipeline.group
        if group not in self._channels:
            self._channels[group] = _connect(group, shards_group_of(step.groups))
        channels = self._channels[group]
        ends = (0, placement.num_stages - 1)
        calls: list[list[Call | None] | None] = []
        sliced = [runner for runner in step.stages.values() if isinstance(runner, SlicedStage)]
        kinds = (SlicedFirstStage, SlicedLastStage) if sliced else (FirstStage, LastStage)
        for stage, kind in zip(ends, kinds, strict=True):
            runner = step.stages.get(stage)
            calls.append(None)
            if runner is None:
                continue
            with runner.as_chunk():
                calls[-1], iterator = calls_of(
                    context.forward_step_func, runner.data_iterator, runner.model, context.num_microbatches
                )
            given = {each.name: getattr(runner, each.name) for each in fields(runner) if each.init}
            step.stages[stage] = kind(**given | {"data_iterator": iterator, "is_last": False})
        first_calls, last_calls = calls
        batch = share_batch(
            step.tokens,
            first_calls,
            last_calls,
            (placement.devices[0], placement.devices[-1]),
            channels.pipeline,
            may_want_logits=step.forward_only,
            depths=getattr(context.config, "mtp_num_layers", None) or 0,
        )
        if sliced:
            batch = batch.cut(sliced[0].bounds)
        last = step.stages.get(ends[1])
        assert last is None or isinstance(last, LastStage)
        if last is not None:
            last.depths = batch.depths
        passes = VocabularyPasses(
            placement,
            step.pipeline.device,
            shards_of(step.chunks),
            channels,
            batch,
            last,
            not step.forward_only,
            step.observation.ledger,
            step.program.schedule.slices,
        )
        return [passes]

    def close(self, orderly: bool) -> None:
        channels, self._channels = self._channels, {}
        if orderly:
            destroy_groups([group for each in channels.values() for group in (each.pipeline, each.shards)])


def _connect(pipeline: dist.ProcessGroup, shards: dist.ProcessGroup) -> Channels:
    """Make groups over the same ranks as these, and connect both. Every rank of the job calls this at the same time."""
    (opened,) = new_groups([dist.get_process_group_ranks(pipeline)], pipeline, "PIPEMEM_VOCABULARY")
    gathering = opened
    if shards.size() != pipeline.size():  # without tensor parallelism they are the same ranks
        (gathering,) = new_groups([dist.get_process_group_ranks(shards)], shards, "PIPEMEM_VOCABULARY_SHARDS")
    hello = torch.zeros(1, device=torch.cuda.current_device())
    for group in dict.fromkeys((opened, gathering)):
        dist.all_reduce(hello, group=group)
    return Channels(opened, gathering)
