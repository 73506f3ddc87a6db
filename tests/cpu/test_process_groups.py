"""Tensors that collectives over gloo work on."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import distributed_c10d

from megatron_pipemem.tools.cpu import process_groups


def test_coalesced_collectives_get_the_callers_own_tensors(monkeypatch):
    """Others would end in Python while gloo's thread has them."""
    monkeypatch.setattr(distributed_c10d._world, "_pg_coalesce_state", {"group": []}, raising=False)
    assert distributed_c10d._world.pg_coalesce_state
    given, parts = torch.ones(2), [torch.ones(1)]
    passed = process_groups._releasing(lambda *arguments: arguments)(given, parts)
    assert passed[0] is given and passed[1] is parts


@pytest.mark.parametrize("end", ["waited for", "dropped", "shared"])
def test_tensors_are_kept_until_gloo_has_dropped_them(monkeypatch, end):
    monkeypatch.setattr(process_groups, "_RELEASE_SECONDS", 0.01)
    lent = [torch.ones(2, requires_grad=True)]
    gloo = lent[0] * lent[0]  # its graph has a reference in C++, as gloo's thread has
    work = process_groups._ReleasingWork(distributed_c10d.Work(), lent)
    if end == "waited for":
        process_groups._await_release(lent)
    elif end == "shared":
        work._hand_out_work()
    del work
    assert lent == [] and len(process_groups._late) == 1
    del gloo
    process_groups._keep([])
    assert process_groups._late == []
