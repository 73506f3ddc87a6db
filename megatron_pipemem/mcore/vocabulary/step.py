"""What vocabulary parallelism adds to a step: batches for every rank, other end stages, and who performs the passes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext
from megatron_pipemem.mcore.vocabulary.batches import Call, calls_of, share_batch
from megatron_pipemem.mcore.vocabulary.build import shards_group_of, shards_of
from megatron_pipemem.mcore.vocabulary.stages import FirstStage, LastStage
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.groups import new_groups
from megatron_pipemem.runtime.vocabulary.passes import Channels, VocabularyPasses
from megatron_pipemem.schedule.core.placement import Placement


class VocabularySteps:
    """Keeps the communicators of the passes between steps."""

    def __init__(self) -> None:
        self._channels: dict[dist.ProcessGroup, Channels] = {}

    def begin(
        self,
        step: StepContext,
        stages: dict[int, ChunkStage],
        placement: Placement,
        pg_collection,
        pp_group: dist.ProcessGroup,
        shape: tuple[int, int],
        ledger: ActivationLedger | None,
    ) -> VocabularyPasses:
        """Prepare one step. Every rank of the job calls this at the same time.

        Args:
            step: shared by the rank's chunks.
            stages: the rank's runners by stage; those of the pipeline's ends are replaced.
            placement: of the stages.
            pg_collection: Megatron's process groups.
            pp_group: the pipeline.
            shape: ``(b, s)`` of a microbatch's tokens on this context-parallel rank.
            ledger: counts held bytes, if given.
        """
        if pp_group not in self._channels:
            self._channels[pp_group] = _connect(pp_group, shards_group_of(pg_collection))
        channels = self._channels[pp_group]
        chunks = {runner.chunk: runner.model for runner in stages.values()}
        ends = (0, placement.num_stages - 1)
        calls: list[list[Call] | None] = []
        for stage, kind in zip(ends, (FirstStage, LastStage), strict=True):
            runner = stages.get(stage)
            calls.append(None)
            if runner is None:
                continue
            with runner.as_chunk():
                calls[-1], iterator = calls_of(
                    step.forward_step_func, runner.data_iterator, runner.model, step.num_microbatches
                )
            stages[stage] = kind(
                step,
                runner.model,
                iterator,
                runner.chunk,
                runner.num_chunks,
                is_last=False,
                placement=runner.placement,
                delayed=runner.delayed,
            )
        batch = share_batch(
            (step.num_microbatches, *shape),
            *calls,
            (placement.devices[0], placement.devices[-1]),
            channels.pipeline,
            may_want_logits=step.forward_only,
        )
        return VocabularyPasses(
            placement,
            pp_group.rank(),
            shards_of([chunks[chunk] for chunk in sorted(chunks)]),
            channels,
            batch,
            stages.get(ends[1]),
            not step.forward_only,
            ledger,
        )

    def close(self) -> list[dist.ProcessGroup]:
        """Forget the communicators, and return them."""
        channels, self._channels = self._channels, {}
        return [group for each in channels.values() for group in (each.pipeline, each.shards)]


def _connect(pipeline: dist.ProcessGroup, shards: dist.ProcessGroup) -> Channels:
    """Groups over the same ranks as these, and both connected. Every rank of the job calls this at the same time."""
    (opened,) = new_groups([dist.get_process_group_ranks(pipeline)], pipeline, "PIPEMEM_VOCABULARY")
    gathering = opened
    if shards.size() != pipeline.size():  # without tensor parallelism they are the same ranks
        (gathering,) = new_groups([dist.get_process_group_ranks(shards)], shards, "PIPEMEM_VOCABULARY_SHARDS")
    hello = torch.zeros(1, device=torch.cuda.current_device())
    for group in dict.fromkeys((opened, gathering)):
        dist.all_reduce(hello, group=group)
    return Channels(opened, gathering)
