"""The CPU lane's Adam computes what PyTorch's does, and keeps its steps where Apex's does."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_pipemem.cpu.upstream import FusedAdam


def groups():
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.nn.Parameter(torch.randn(3, generator=generator)) for _ in range(2))
    return [{"params": [first], "lr": 0.1, "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.5}]


def train(optimizer, steps):
    for step in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().cos() + step
        optimizer.step()
    return [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("decoupled", [True, False])
def test_bit_identical_to_pytorch_also_when_resumed_from_either(decoupled):
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups(), lr=0.01)
    half = train(reference, 2)
    saved = copy.deepcopy(reference.state_dict())
    own = FusedAdam(groups(), adam_w_mode=decoupled, lr=0.01)
    assert all(map(torch.equal, train(own, 2), half))
    assert [group["step"] for group in own.param_groups] == [2, 2]
    assert all(state.keys() == {"exp_avg", "exp_avg_sq"} for state in own.state.values())
    whole = train(reference, 3)
    for state in (saved, copy.deepcopy(own.state_dict())):
        resumed = FusedAdam(groups(), adam_w_mode=decoupled, lr=0.01)
        for parameter, value in zip((p for g in resumed.param_groups for p in g["params"]), half, strict=True):
            parameter.data.copy_(value)
        resumed.load_state_dict(state)
        assert all(map(torch.equal, train(resumed, 3), whole))
