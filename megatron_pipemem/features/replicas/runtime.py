"""Sum the gradients of a stage's replicas, for pipelines whose devices hold the model more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction
from megatron_pipemem.runtime.transport import new_groups
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement

Channels = Mapping[tuple[int, ...], dist.ProcessGroup]


def connect_replicas(placement: Placement, group: dist.ProcessGroup, device: torch.device | int | str) -> Channels:
    """Create a process group for each set of devices with replicas of a stage, and return this rank's, by devices.

    Every rank of the pipeline ``group`` must call this at the same time. Each new group sums a number once, because its
    first communication would wait for all of its devices (see ``transport.connect``).
    """
    if placement.replicas == 1:
        return {}
    ranks = dist.get_process_group_ranks(group)
    sets = sorted({placement.holders(stage) for stage in range(placement.model_stages)})
    shared = [devices for devices in sets if len(devices) > 1]
    opened = new_groups([[ranks[device] for device in devices] for devices in shared], group, "PIPEMEM_REPLICAS")
    channels = {devices: created for devices, created in zip(shared, opened, strict=True) if group.rank() in devices}
    hello = torch.zeros(1, device=device)
    for channel in channels.values():
        dist.all_reduce(hello, group=channel)
    return channels


@dataclass(eq=False)
class ReplicaReducer:
    """The step feature that sums gradients over the replicas of each stage, for one step on one rank.

    ``gradients(stage)`` returns the tensors to sum in place. Their shapes and order are the same for every replica.
    """

    placement: Placement
    device: int
    channels: Channels
    gradients: Callable[[int], Iterable[torch.Tensor]]
    _posted: set[int] = field(default_factory=set)
    _works: dict[int, list[dist.Work]] = field(default_factory=dict)

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers of REDUCE_REPLICAS and REDUCE_GRAD. The latter first waits for the sum over the stage's
        replicas.
        """
        reduce = executor.handlers[Kind.REDUCE_GRAD]

        def reduce_sum(instruction: Instruction) -> None:
            self.wait(instruction.action.stage)
            reduce(instruction)

        return {
            Kind.REDUCE_REPLICAS: lambda instruction: self.post(instruction.action.stage),
            Kind.REDUCE_GRAD: reduce_sum,
        }

    def post(self, stage: int) -> None:
        """Note that a stage's gradients are complete, and start the sum if those of its replicas here are."""
        self._posted.add(stage)
        own_replicas = self._own_replicas(stage)
        if not self._posted.issuperset(own_replicas):
            return
        first, *others = ([*self.gradients(replica)] for replica in own_replicas)
        for other in others:
            torch._foreach_add_(first, other)
        channel = self.channels.get(self.placement.holders(stage))
        self._works[own_replicas[0]] = [] if channel is None else _start_sum(first, channel)

    def wait(self, stage: int) -> None:
        """Wait for the sum over the replicas of ``stage``. Afterwards all replicas on this device have the sum."""
        own_replicas = self._own_replicas(stage)
        works = self._works.pop(own_replicas[0], None)
        if works is None:  # waited for on behalf of another replica
            return
        for work in works:
            work.wait()
        first, *others = ([*self.gradients(replica)] for replica in own_replicas)
        for other in others:
            torch._foreach_copy_(other, first)

    def _own_replicas(self, stage: int) -> list[int]:
        return [
            replica for replica in self.placement.counterparts(stage) if self.placement.devices[replica] == self.device
        ]


def _start_sum(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start summing the tensors over the group in place, in one operation per dtype, as backends need it."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    works = []
    for same in by_type.values():
        with dist._coalescing_manager(group, async_ops=True) as work:
            for tensor in same:
                dist.all_reduce(tensor, group=group)
        works.append(work)
    return works
