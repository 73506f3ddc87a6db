"""Packed documents are cut into slices with the keys that each slice needs; some arguments of a model cannot be cut."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from refusals import refused

from megatron_pipemem.features.slices.megatron.documents import SlicedDocuments
from megatron_pipemem.features.slices.megatron.step import SlicedModel
from megatron_pipemem.features.slices.runtime import KeyValueCache, SequenceState, SlicePart, used_keys


def cut(number: int, used: list[int], places: list[int] | None = None, **more: object) -> SlicedDocuments:
    """Return the documents of one of three slices of 12 tokens."""
    ends, padded = (None if values is None else torch.tensor(values, dtype=torch.int32) for values in (used, places))
    offsets = {f"cu_seqlens_{side}": ends for side in ("q", "kv")}
    offsets |= {f"cu_seqlens_{side}_padded": padded for side in ("q", "kv")}
    packed = PackedSeqParams(**{"qkv_format": "thd", "max_seqlen_q": 6, "max_seqlen_kv": 6} | offsets | more)
    return SlicedDocuments(packed, 4 * number, 4 * number + 4, 12)


@pytest.mark.parametrize("name", ["decoder_input", "output_processor"])
def test_arguments_that_need_whole_sequences_are_refused(name):
    """A hook on the output would run for every slice."""
    model = SlicedModel.__new__(SlicedModel)
    model._parameters = signature(GPTModel.forward.__get__(model))
    model._part = SlicePart(0, 0, 4, SequenceState(12, lambda tensor: None))
    with refused("slices-forward-step", name):
        model._cut_arguments(torch.nn.Identity(), (None, None, None), {name: object()})


@pytest.mark.parametrize(
    ("number", "queries", "keys", "positions"),
    [(0, [0, 4], [0, 4], [0, 1, 2, 3]), (1, [0, 2, 4], [0, 6, 8], [4, 5, 0, 1]), (2, [0, 4], [6, 12], [2, 3, 4, 5])],
)
def test_keys_begin_with_the_document_in_which_a_slice_begins(number, queries, keys, positions):
    documents = cut(number, [0, 6, 12, 12])
    assert documents.own.cu_seqlens_q.tolist() == documents.own.cu_seqlens_kv.tolist() == queries
    assert (documents.seen.cu_seqlens_q.tolist(), documents.seen.cu_seqlens_kv.tolist()) == (queries, keys)
    assert documents.since == keys[0] and documents.positions.tolist() == positions
    assert documents.longest == max(positions) + 1
    assert documents.as_one.cu_seqlens_q.tolist() == [0, len(positions)]


def test_padding_between_documents_is_cut_at_its_own_places():
    documents = cut(1, [0, 5, 10], [0, 6, 12])
    assert documents.own.cu_seqlens_q.tolist() == [0, 1, 3] and documents.own.cu_seqlens_q_padded.tolist() == [0, 2, 4]
    assert documents.seen.cu_seqlens_kv.tolist() == [0, 5, 7] and documents.seen.cu_seqlens_kv_padded.tolist() == [
        0,
        6,
        8,
    ]
    assert documents.seen.max_seqlen_q == 2 and documents.seen.max_seqlen_kv == 5


@pytest.mark.parametrize("wrong", [{"used": [0, 6, 10]}, {"used": [0, 12], "qkv_format": "sbhd"}])
def test_documents_that_are_not_those_of_the_sequence_are_refused(wrong):
    with refused("slices-forward-step", 12):
        cut(0, **wrong)
    assert cut(0, [0, 12], tokens_per_sample=12).since == 0
    with refused("slices-forward-step", "tokens_per_sample"):
        cut(0, [0, 12], tokens_per_sample=6)


def test_gradients_of_keys_that_a_slice_does_not_use_are_ignored():
    """Attention leaves them as they were in memory."""
    cache = KeyValueCache(4, lambda tensor: None)
    parts = [torch.ones(2, 1, requires_grad=True) for _ in range(2)]
    grown = [cache.append(part, 2 * number, since=number) for number, part in enumerate(parts)]
    grown[1].backward(torch.tensor([[torch.nan], [5.0], [7.0], [8.0]]))
    grown[0].backward(torch.tensor([[1.0], [2.0]]))
    assert [part.grad.flatten().tolist() for part in parts] == [[1.0, 7.0], [7.0, 8.0]]


def test_keys_are_used_from_a_document_to_the_end_of_a_part():
    keys = torch.arange(4.0, requires_grad=True)
    used = used_keys(keys, 1, 3)
    assert used.tolist() == [0.0, 1.0, 2.0] and used.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    used.backward(torch.tensor([torch.nan, 5.0, 6.0]))
    assert keys.grad.tolist() == [0.0, 5.0, 6.0, 0.0]
