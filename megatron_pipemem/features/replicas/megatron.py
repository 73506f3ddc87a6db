"""Train two replicas of the model in one pipeline, which Megatron treats as one model.

The gradients of both replicas are summed before any other code uses them. So both optimizers make the same change to
equal weights, and the replicas stay equal without sending weights again. Checkpoints contain the first replica and are
loaded into both. Gradient norms count the first replica only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.replicas.runtime import Channels, ReplicaReducer, connect_replicas
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.step.batches import Dealer, deal
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.refusals import REPLICAS
from megatron_pipemem.runtime.activation_ledger import is_quantised
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.runtime.transport import Pipeline, destroy_groups
from megatron_pipemem.runtime.weight_gradients import gradient_of
from megatron_pipemem.schedule.placement import Placement

_TIED_ENDS = 2
"""Megatron gives the tied embedding on the last stage a ``replica_id`` after that of the first stage, which it saves.
"""


@torch.no_grad()
def make_replicas(chunks: Sequence[torch.nn.Module], placement: Placement, group: dist.ProcessGroup) -> None:
    """Copy the weights of a stage's first replica into this rank's second chunk, and mark that chunk as a replica.

    With p pipeline ranks, the first replica of rank r's second chunk is the first chunk of rank p - 1 - r. So every
    rank of the pipeline ``group`` calls this, and sends the weights of its own first chunk. Raise an UnsupportedError
    if the model cannot have two replicas, for example because its weights are quantised.
    """
    original, replica = chunks
    if any(map(is_quantised, original.parameters())):
        raise UnsupportedError(
            "unsupported-setting",
            f"quantised weights are not supported{REPLICAS.feature}: {REPLICAS.sentences['fp8_param']}",
        )
    device = group.rank()
    other = placement.num_devices - 1 - device
    if device == other:
        for value, parameter in zip(original.parameters(), replica.parameters(), strict=True):
            parameter.copy_(value)
    else:
        peer = dist.get_global_rank(group, other)
        for sends in (True, False) if device < other else (False, True):
            for parameter in (original if sends else replica).parameters():
                carried = parameter.to(torch.cuda.current_device())
                if sends:
                    dist.send(carried, peer, group=group)
                else:
                    dist.recv(carried, peer, group=group)
                    parameter.copy_(carried)
    marked: Any  # with Megatron's mark
    for marked in replica.parameters():
        marked.shared = True
    _save_as_replica(replica)


def _save_as_replica(module: Any) -> None:
    """Make a module load its state from the entries of the first replica in a checkpoint, and never write it."""
    original = module.sharded_state_dict

    def sharded_state_dict(*args, **kwargs):
        state = original(*args, **kwargs)
        for entry in nested_values(state):
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory, ShardedObject)):
                entry.replica_id = _behind(entry.replica_id)
        return state

    module.sharded_state_dict = sharded_state_dict


def _behind(replica_id: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Return a ``replica_id`` for Megatron's checkpoints that is larger than all that the first replica has.

    ``replica_id`` is that of a checkpoint entry. Megatron writes only entries in which it is 0, or has only zeros.
    """
    if isinstance(replica_id, int):
        return replica_id + _TIED_ENDS
    first, *remaining = replica_id
    return (first + _TIED_ENDS, *remaining)


def gradients(chunk: torch.nn.Module) -> list[torch.Tensor]:
    """Return the gradient tensors of a chunk's trained parameters. A parameter without a gradient gets zeros."""
    return [gradient_of(parameter) for parameter in chunk.parameters() if parameter.requires_grad]


def extensions(_: object, __: object, chunk_placement: ChunkPlacement) -> list[Extension]:
    """Return the extension of a run with two replicas, and make the run copy the weights when the model is built."""
    chunk_placement.replicate = make_replicas
    return [ReplicaSteps()]


class ReplicaSteps(Extension):
    """The extension that sums gradients over the replicas of the model. It does nothing for schedules with one replica.

    Its process groups are kept between steps.
    """

    def __init__(self) -> None:
        self._channels: dict[Pipeline, Channels] = {}
        self._dealer: Dealer | None = None

    def prepare(self, step: Step) -> None:
        self._dealer = None
        if step.pipeline.placement.replicas > 1:
            self._dealer, step.iterators = deal(step.iterators[0], step.program.schedule, step.pipeline.device)

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        pipeline = step.pipeline
        if pipeline.placement.replicas == 1:
            return ()
        if pipeline not in self._channels:
            self._channels[pipeline] = connect_replicas(pipeline.placement, pipeline.group, step.message.device)
        reducer = ReplicaReducer(
            pipeline.placement,
            pipeline.device,
            self._channels[pipeline],
            lambda stage: gradients(step.stages[stage].model),
        )
        return [reducer]

    def before_finalize(self, step: Step) -> None:
        if self._dealer is not None:
            self._dealer.finish()

    def close(self, orderly: bool) -> None:
        channels, self._channels = self._channels, {}
        if orderly:
            destroy_groups([group for opened in channels.values() for group in opened.values()])
