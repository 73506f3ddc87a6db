"""Make process groups beside those of Megatron."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

MESSAGE_CTAS = 4
"""Thread blocks that NCCL may take for one group of messages. Receives are posted ahead, and a kernel that waits for its
message keeps its multiprocessors from the computation: NCCL's default is up to 32 of them."""


@functools.cache
def within_node(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of a group are of one node, where nodes have consecutive ranks."""
    ranks, size = (
        dist.get_process_group_ranks(group),
        int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())),
    )
    return min(ranks) // size == max(ranks) // size


def new_groups(
    wanted: Iterable[Sequence[int]],
    parent: dist.ProcessGroup,
    description: str,
    *,
    messages: bool = False,
    backend: str | None = None,
) -> list[dist.ProcessGroup]:
    """Open process groups that wait as long as another one does. Every rank of the job must call this at the same time.

    Torch has every rank take part in the creation of every group, in one order, so the ranks first tell each other what
    they want.

    Args:
        wanted: global ranks of every group; the same on all ranks of ``parent``.
        parent: whose timeout the groups get, instead of torch's default. Of NCCL, ours run on streams of high priority, and
            with the limits on thread blocks that the parent has (``--nccl-communicator-config-path``).
        description: shown in torch's logs.
        backend: of the groups; by default the default group's.
        messages: the groups carry messages; NCCL may take ``MESSAGE_CTAS`` thread blocks for them if the parent sets no limit.
            While the default group is bound to no device, NCCL connects pairs of ranks when they exchange a first message, so
            the groups of all parents with one number are one group then: a job of many pipelines opens no more than one.

    Returns:
        The groups in the order of ``wanted``; ``GroupMember.NON_GROUP_MEMBER`` for those without this rank.
    """
    ours = tuple(tuple(ranks) for ranks in wanted)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, ours)
    theirs: Any = parent._get_backend(parent._device_types[0])  # its options are those of its kind
    timeout = None if theirs.options is None else theirs.options._timeout  # not every backend has options

    def create(ranks: Sequence[int]) -> dist.ProcessGroup:
        is_nccl = backend is None and theirs.name() == dist.Backend.NCCL
        options = nccl_options(theirs.options, messages) if is_nccl else None
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=description)

    world: Any = dist.group.WORLD
    if messages and theirs.name() == dist.Backend.NCCL and world.bound_device_id is None:
        return [create(ranks) for ranks in _joined(everyones)][: len(ours)]
    created = {each: [create(ranks) for ranks in each] for each in sorted({*everyones})}
    return created[ours]


def _joined(everyones: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return the ranks of the groups with the same number, in order."""
    return [sorted({rank for each in same for rank in each}) for same in zip_longest(*everyones, fillvalue=())]


def nccl_options(parent: dist.ProcessGroupNCCL.Options, messages: bool) -> dist.ProcessGroupNCCL.Options:
    """Return what a group of ours asks of NCCL; see ``new_groups``. Every group needs an object of its own."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = parent._timeout
    unset = options.config.max_ctas
    for name in ("min_ctas", "max_ctas", "cga_cluster_size"):
        setattr(options.config, name, getattr(parent.config, name))
    if messages and options.config.max_ctas == unset:
        options.config.max_ctas = max(MESSAGE_CTAS, options.config.min_ctas)
    return options


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close groups on which nothing is under way. Those that went with the default group are skipped."""
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
