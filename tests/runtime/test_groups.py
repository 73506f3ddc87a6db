"""Process groups of our own, in a job of one rank, and those of a stage's replicas."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

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


def test_every_rank_creates_what_all_want_in_one_order(world, monkeypatch):
    """Ranks 0 and 1 want two groups, ranks 2 and 3 one; rank 0 sees all three being made."""
    everyones = [((2, 3),), ((0, 1), (0,)), ((2, 3),), ((0, 1), (0,))]
    made = []

    def gather(received, ours):
        assert ours == ((0, 1), (0,))
        received[:] = everyones

    monkeypatch.setattr(groups.dist, "all_gather_object", gather)
    monkeypatch.setattr(groups.dist, "new_group", lambda ranks, **_: made.append(ranks) or tuple(ranks))
    assert new_groups([[0, 1], [0]], world, "TEST") == [(0, 1), (0,)]
    assert made == [[0, 1], [0], [2, 3]]


@pytest.mark.parametrize("bound", [False, True])
def test_unbound_nccl_opens_a_group_of_messages_once_for_all_pipelines(world, monkeypatch, bound):
    """Of two pipelines of three ranks, with four channels each."""
    edges = [(0, 1), (0, 1), (1, 2), (1, 2)]
    everyones = [tuple(tuple(first + end for end in edge) for edge in edges) for first in (0, 3) for _ in range(3)]
    made = []
    backend = SimpleNamespace(name=lambda: dist.Backend.NCCL, options=SimpleNamespace(_timeout=timedelta(seconds=7)))
    parent = SimpleNamespace(_device_types=["cuda"], _get_backend=lambda device: backend)
    monkeypatch.setattr(
        groups.dist, "all_gather_object", lambda received, ours: received.__setitem__(slice(None), everyones)
    )
    monkeypatch.setattr(groups.dist, "new_group", lambda ranks, **_: made.append(ranks) or tuple(ranks))
    monkeypatch.setattr(groups, "nccl_options", lambda parent, messages: None)
    if bound:
        monkeypatch.setattr(type(dist.group.WORLD), "bound_device_id", 0)
    opened = new_groups(everyones[0], parent, "TEST", messages=True)
    shared = [(0, 1, 3, 4)] * 2 + [(1, 2, 4, 5)] * 2
    assert opened == (edges if bound else shared)
    assert len(made) == (8 if bound else 4)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.parametrize(
    ("limits", "messages", "expected"),
    [
        ({}, True, groups.MESSAGE_CTAS),
        ({}, False, None),
        ({"max_ctas": 16}, True, 16),
        ({"min_ctas": 8}, True, 8),
    ],
)
def test_nccl_takes_few_thread_blocks_for_messages_unless_told_otherwise(limits, messages, expected):
    parent = dist.ProcessGroupNCCL.Options()
    parent._timeout = timedelta(seconds=77)
    unset = parent.config.max_ctas
    for name, value in limits.items():
        setattr(parent.config, name, value)
    options = groups.nccl_options(parent, messages)
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
