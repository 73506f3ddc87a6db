"""Groups for sums over replicas of a stage. The sums themselves: ``end_to_end/test_bidirectional.py``."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_pipemem.features.replicas import runtime as replicas
from megatron_pipemem.features.replicas.runtime import connect_replicas
from megatron_pipemem.schedule.placement import Placement


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
