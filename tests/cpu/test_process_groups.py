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


def test_coalesced_gathers_keep_numbers_of_several_types(monkeypatch):
    """Weights in 8 bits and biases are gathered like this."""
    for module in (distributed_c10d, torch.distributed):
        for name in process_groups._GATHERS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, process_groups._releasing(getattr(module, name)))
    parts = [torch.tensor([3, 250], dtype=torch.uint8), torch.tensor([0.5, 1e9, -7.0])]
    gathered = [torch.zeros_like(part) for part in parts]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with distributed_c10d._coalescing_manager(async_ops=True) as work:
            for output, part in zip(gathered, parts, strict=True):
                torch.distributed.all_gather_into_tensor(output, part, async_op=True)
        work.wait()
    finally:
        torch.distributed.destroy_process_group()
    assert all(map(torch.equal, gathered, parts))


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
