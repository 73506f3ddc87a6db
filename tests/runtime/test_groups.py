"""Process groups of our own, in a job of one rank, and those of a stage's replicas."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forking import fork_ranks

from megatron_pipemem.features.replicas import runtime as replicas
from megatron_pipemem.features.replicas.runtime import connect_replicas
from megatron_pipemem.runtime import transport as groups
from megatron_pipemem.runtime.transport import destroy_groups, new_groups
from megatron_pipemem.schedule.placement import Placement


def is_open(group: dist.ProcessGroup) -> bool:
    try:
        return dist.get_process_group_ranks(group) == [0]
    except KeyError:
        return False


def test_groups_wait_as_long_as_their_parent(world):
    parent = dist.new_group([0], timeout=timedelta(seconds=77))
    opened = new_groups([[0], [0]], parent, "TEST")
    assert len({*opened}) == 2
    for group in opened:
        assert group.group_desc == "TEST"
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def open_beside_others(results: str) -> None:
    """Two pipelines of two ranks open groups of their own, one of them twice as often; rank 0 has one more group."""
    rank = dist.get_rank()
    first, second, _ = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 3])
    pipeline, ranks = (first, [0, 1]) if rank < 2 else (second, [2, 3])
    sums = []
    for _ in range(2 if rank < 2 else 1):
        group, lone = new_groups([ranks, ranks[:1]], pipeline, "TEST")
        number = torch.tensor([10**rank])
        dist.all_reduce(number, group=group)
        sums.append(number.item())
        assert (lone is dist.GroupMember.NON_GROUP_MEMBER) == (rank % 2 == 1)
        destroy_groups([group])
    Path(results, str(rank)).write_text(json.dumps(sums))


def test_groups_need_only_the_ranks_of_their_pipeline(tmp_path):
    assert fork_ranks(4, open_beside_others, str(tmp_path)) == 0
    sums = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert sums == [[11, 11], [11, 11], [1100], [1100]]


def test_a_default_group_that_is_bound_to_a_device_is_not_split(world, monkeypatch):
    """NCCL would need every rank of the job for that."""
    seen = []

    def note(ranks, **how):
        seen.append((ranks, world.bound_device_id, how["use_local_synchronization"]))
        return ranks

    monkeypatch.setattr(groups.dist, "new_group", note)
    world.bound_device_id = torch.device("cuda:0")
    assert new_groups([[0], [1]], world, "TEST") == [[0], dist.GroupMember.NON_GROUP_MEMBER]
    assert seen == [([0], None, True)]
    assert world.bound_device_id == torch.device("cuda:0")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.parametrize(
    ("limits", "most", "expected"),
    [
        ({}, 4, 4),
        ({}, None, None),
        ({"max_ctas": 16}, 4, 16),
        ({"min_ctas": 8}, 4, 8),
    ],
)
def test_nccl_takes_few_thread_blocks_unless_the_parent_has_a_limit(limits, most, expected):
    parent = dist.ProcessGroupNCCL.Options()
    parent._timeout = timedelta(seconds=77)
    unset = parent.config.max_ctas
    for name, value in limits.items():
        setattr(parent.config, name, value)
    options = groups.nccl_options(parent, most)
    assert options.is_high_priority_stream and options._timeout == timedelta(seconds=77)
    assert options.config.max_ctas == (unset if expected is None else expected)
    assert parent.config.max_ctas == limits.get("max_ctas", unset)


def test_groups_are_destroyed_once_and_only_ours(world):
    ours, other = new_groups([[0], [0]], world, "TEST")
    destroy_groups([ours, ours])
    assert not is_open(ours) and is_open(other) and is_open(world)


def test_groups_that_went_with_the_default_one_are_gone_already(world):
    ours = new_groups([[0]], world, "TEST")
    dist.destroy_process_group()
    destroy_groups(ours)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy_groups(ours)
    assert is_open(dist.group.WORLD)


def test_groups_of_replicas_open_before_the_first_step(monkeypatch):
    """Where a backend opens a group at its first sum, that would wait for the other device in the middle of a program."""
    wanted, hellos = [], []
    monkeypatch.setattr(replicas, "new_groups", lambda ranks, *_: wanted.extend(ranks) or [*map(tuple, ranks)])
    monkeypatch.setattr(replicas.dist, "get_process_group_ranks", lambda group: [1, 3, 5])
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda tensor, group: hellos.append((group, tensor.device.type)))
    placement = Placement.bidirectional(3)
    assert connect_replicas(placement, SimpleNamespace(rank=lambda: 2), "meta") == {(0, 2): (1, 5)}
    assert connect_replicas(placement, SimpleNamespace(rank=lambda: 1), "meta") == {}
    assert (wanted, hellos) == ([[1, 5], [1, 5]], [((1, 5), "meta")])
