"""The CPU lane's optimizer, checkpoint writer and attention. ``end_to_end/test_packed.py`` trains on packed documents."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd as rotate
from refusals import refused

from megatron_pipemem.tools.cpu.upstream import FusedAdam, _copied, _mask, shares


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


def test_training_does_not_change_what_is_to_be_written():
    weight = torch.ones(3)
    plan = [("file", "key", ([("bytes", b"x")], [("item", weight)]))]
    ((file, key, (data, ((item, tensor),))),) = _copied(plan)
    weight.zero_()
    assert (file, key, data, item) == ("file", "key", [("bytes", b"x")], "item")
    assert tensor.tolist() == [1, 1, 1]


def test_every_document_is_shared():
    """The example of Transformer Engine's documentation."""
    held = shares([0, 8, 12], 2)
    assert [tensor.tolist() for tensor in held] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    whole = torch.block_diag(torch.ones(8, 8).tril(), torch.ones(4, 4).tril()).bool()
    for own in (torch.arange(12), *held):
        assert torch.equal(~_mask([0, 8, 12], own)[0, 0], whole[own])


def test_a_document_that_does_not_divide_is_refused():
    with refused("not-on-cpu", 6, 2, 4):
        shares([0, 8, 14], 2)


def test_megatron_rotates_parts_of_documents():
    """So pretraining data with packed documents, of which ranks get parts of sequences, are refused with two ranks."""
    one, *two = (SimpleNamespace(size=lambda n=n: n, rank=lambda r=r: r) for n, r in ((1, 0), (2, 0), (2, 1)))
    ends, tokens, angles = [0, 40, 64], torch.randn(64, 1, 8), torch.rand(40, 1, 1, 8)
    whole = rotate(tokens, torch.tensor(ends), angles, cp_group=one)
    for bounds, is_right in ((ends, True), ([0, 64], False)):
        for group, own in zip(two, shares(bounds, 2), strict=True):
            assert torch.equal(rotate(tokens[own], torch.tensor(ends), angles, cp_group=group), whole[own]) is is_right
