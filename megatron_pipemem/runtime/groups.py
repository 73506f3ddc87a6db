"""Process groups beside those of Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist


def new_groups(wanted: Iterable[Sequence[int]], parent: dist.ProcessGroup, description: str) -> list[dist.ProcessGroup]:
    """Open process groups that wait as long as another one does. Every rank of the job must call this at the same time.

    Torch has every rank take part in the creation of every group, in one order, so the ranks first tell each other what
    they want.

    Args:
        wanted: global ranks of every group; the same on all ranks of ``parent``.
        parent: whose timeout the groups get, instead of torch's default.
        description: shown in torch's logs.

    Returns:
        The groups in the order of ``wanted``; ``GroupMember.NON_GROUP_MEMBER`` for those without this rank.
    """
    ours = tuple(tuple(ranks) for ranks in wanted)
    everyones: list[tuple[tuple[int, ...], ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, ours)
    options = parent._get_backend(parent._device_types[0]).options
    timeout = None if options is None else options._timeout  # not every backend has options
    created = {
        theirs: [dist.new_group(list(ranks), timeout=timeout, group_desc=description) for ranks in theirs]
        for theirs in sorted({*everyones})
    }
    return created[ours]


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close groups on which nothing is under way. Those that went with the default group are skipped."""
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
