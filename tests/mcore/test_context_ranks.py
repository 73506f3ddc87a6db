"""Context-parallel ranks share every sequence slice."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from megatron_pipemem.features.slices.megatron.context_parallel import ContextRanks
from megatron_pipemem.features.slices.megatron.step import SlicedModel
from megatron_pipemem.features.slices.runtime import SlicePart


def ranks_of(size: int, tokens: tuple[int, ...]) -> list[ContextRanks]:
    """Return the ranks whose slices have these numbers of tokens on every rank."""
    bounds = [*pairwise(accumulate(tokens, initial=0))]
    groups = [SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank) for rank in range(size)]
    return [ContextRanks(group, bounds) for group in groups]


@pytest.mark.parametrize("tokens", [(4, 4), (6, 4, 2), (2,)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_have_equally_much_of_every_slice(size: int, tokens: tuple[int, ...]):
    sequence = torch.arange(2 * size * sum(tokens)).view(2, -1)
    parts = [ranks.split({"tokens": sequence, "labels": None})["tokens"] for ranks in ranks_of(size, tokens)]
    slices = [part.split(tokens, dim=1) for part in parts]
    for at, (begin, end) in enumerate(pairwise(accumulate(tokens, initial=0))):
        owned = torch.cat([of_rank[at] for of_rank in slices], dim=1)
        assert torch.equal(owned.sort(dim=1).values, sequence[:, size * begin : size * end])
        keys = {int((of_rank[at][0] + 1).sum()) for of_rank in slices}
        assert len(keys) == 1, "the causal pairs of queries and keys"
        for ranks, of_rank in zip(ranks_of(size, tokens), slices, strict=True):
            positions = [at for first, last in ranks.ranges(begin, end) for at in range(first, last)]
            assert of_rank[at][0].tolist() == positions


def test_a_mask_is_split_by_queries():
    mask = torch.arange(64).view(1, 1, 8, 8)
    batch = {"attention_mask": mask, "cu_seqlens": torch.arange(3), "labels": None}
    split = ranks_of(2, (2, 2))[1].split(batch)
    assert torch.equal(split["attention_mask"], mask[:, :, [1, 2, 5, 6]])
    assert split["cu_seqlens"] is batch["cu_seqlens"] and split["labels"] is None


@pytest.mark.parametrize("size", [2, 3])
def test_queries_attend_to_the_keys_up_to_their_own_end(size: int):
    """In two calls, whose keys end with the last query of each."""
    tokens = (4, 2)
    for ranks in ranks_of(size, tokens):
        calls = []

        def forward(query, key, value, mask, calls=calls):
            calls.append((query.tolist(), len(key), len(value), None if mask is None else mask.shape[-2:]))
            return query

        part = SlicePart(1, 4, 6, SimpleNamespace(tokens=6))
        positions = torch.tensor([at for first, last in ranks.ranges(4, 6) for at in range(first, last)])
        keys = torch.arange(6.0 * size)
        output = ranks.attend(forward, part, [], positions, keys, keys, torch.zeros(1, 1, 2, 6 * size))
        assert torch.equal(output, positions)
        assert [(query, last) for query, last, _, _ in calls] == [([at], at + 1) for at in positions.tolist()]
        assert [shape for *_, shape in calls] == [(1, at + 1) for at in positions.tolist()]


def test_a_batch_that_is_split_otherwise_is_refused():
    model = object.__new__(SlicedModel)
    model.ranks = ranks_of(2, (2, 2))[0]
    model._check_shared({"input_ids": None})
    with refused("slices-forward-step", "get_batch_on_this_cp_rank"):
        model._check_shared({"input_ids": torch.zeros(1, 4)})
    model.ranks.split({})
    model._check_shared({"input_ids": torch.zeros(1, 4)})
