"""Tokens of packed documents on context-parallel ranks. ``tests/end_to_end/test_packed.py`` trains on them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd as rotate
from refusals import refused

from megatron_pipemem.cpu.upstream import _mask, shares


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


def test_megatron_rotates_parts_of_documents():
    """So pretraining data with packed documents, of which ranks get parts of sequences, are refused with two ranks."""
    one, *two = (SimpleNamespace(size=lambda n=n: n, rank=lambda r=r: r) for n, r in ((1, 0), (2, 0), (2, 1)))
    ends, tokens, angles = [0, 40, 64], torch.randn(64, 1, 8), torch.rand(40, 1, 1, 8)
    whole = rotate(tokens, torch.tensor(ends), angles, cp_group=one)
    for bounds, is_right in ((ends, True), ([0, 64], False)):
        for group, own in zip(two, shares(bounds, 2), strict=True):
            assert torch.equal(rotate(tokens[own], torch.tensor(ends), angles, cp_group=group), whole[own]) is is_right
