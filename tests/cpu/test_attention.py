"""Tokens of packed documents on context-parallel ranks. ``tests/end_to_end/test_packed.py`` trains on them."""

from __future__ import annotations

import torch
from refusals import refused

from megatron_pipemem.cpu.attention import _mask, shares


def test_every_document_is_shared():
    """The example of Transformer Engine's documentation."""
    held = shares([0, 8, 12], 2)
    assert [each.tolist() for each in held] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    whole = torch.block_diag(torch.ones(8, 8).tril(), torch.ones(4, 4).tril()).bool()
    for own in (torch.arange(12), *held):
        assert torch.equal(~_mask([0, 8, 12], own)[0, 0], whole[own])


def test_a_document_that_does_not_divide_is_refused():
    with refused("not-on-cpu", 6, 2, 4):
        shares([0, 8, 14], 2)
