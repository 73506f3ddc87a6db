"""The partition, and the sharded input embedding against torch's own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused
from vocabulary_model import shards_of

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.features.vocabulary.runtime.shards import (
    VocabularyEmbedding,
    VocabularyPartition,
    WeightShard,
)

sizes = st.builds(VocabularyPartition, st.integers(1, 70), st.integers(1, 9))


def embeddings_of(partition: VocabularyPartition, weight: torch.Tensor) -> list[VocabularyEmbedding]:
    return [
        VocabularyEmbedding(WeightShard(torch.nn.Parameter(piece), partition, rank))
        for rank, piece in enumerate(shards_of(weight, partition))
    ]


@given(sizes)
def test_every_row_has_one_owner_and_storage_differs_by_a_row(partition):
    rows = [row for shard in range(partition.shards) for row in partition.rows(shard)]
    assert rows == list(range(partition.vocab_size))
    stored = [len(piece) for piece in torch.arange(partition.vocab_size).tensor_split(partition.shards)]
    assert stored == [len(partition.rows(shard)) for shard in range(partition.shards)]
    assert max(stored) - min(stored) <= 1
    assert max(stored) == partition.largest < partition.vocab_size / partition.shards + 1


@examples(150)
@given(sizes, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.integers(0, 1000))
def test_outputs_are_exact_and_gradients_those_of_the_whole_matrix(partition, dtype, main_grad, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(partition.vocab_size, 3, generator=generator).to(dtype)
    tokens = torch.randint(partition.vocab_size, (5, 2), generator=generator)
    embeddings = embeddings_of(partition, weight)
    output = torch.stack([embedding(tokens) for embedding in embeddings]).sum(0)
    assert torch.equal(output, weight[tokens]) and output.dtype == dtype

    reference = weight.double().requires_grad_()
    upstream = torch.randn(5, 2, 3, generator=generator).to(dtype)
    reference[tokens].backward(upstream.double())
    gradients = []
    for embedding in embeddings:
        parameter = embedding.shard.parameter
        if main_grad:
            parameter.main_grad = torch.zeros(parameter.shape)
        embedding.add_weight_gradient(tokens, upstream)
        gradients.append(parameter.main_grad if main_grad else parameter.grad)
        if gradients[-1] is None:
            assert not embedding.shard.rows
            gradients[-1] = torch.zeros_like(parameter)
    # 16 bit sums round at every step unless they go to a main gradient.
    tolerance = 1e-6 if main_grad or dtype == torch.float32 else 3e-2
    torch.testing.assert_close(torch.cat(gradients).double(), reference.grad, rtol=tolerance, atol=tolerance)


def test_a_frozen_embedding_has_no_gradient():
    embedding = embeddings_of(VocabularyPartition(5, 2), torch.randn(5, 3))[0]
    embedding.shard.parameter.requires_grad_(False)
    embedding.add_weight_gradient(torch.tensor([0]), torch.ones(1, 3))
    assert embedding.shard.parameter.grad is None


def test_foreign_gradients_do_not_reach_this_shard():
    """Not even as infinity times zero."""
    embedding = embeddings_of(VocabularyPartition(4, 2), torch.randn(4, 1))[0]
    embedding.add_weight_gradient(torch.tensor([1, 3]), torch.tensor([[2.0], [float("inf")]]))
    assert embedding.shard.parameter.grad.flatten().tolist() == [0, 2]


def test_what_does_not_fit_is_refused():
    partition = VocabularyPartition(5, 2)
    embedding = embeddings_of(partition, torch.randn(5, 3))[0]
    with refused("token-range", 0, 5, kind=VocabularyError):
        embedding(torch.tensor([0, 5]))
    with refused("wrong-shape", kind=VocabularyError):
        embedding.add_weight_gradient(torch.tensor([0, 1]), torch.ones(3, 3))
    with refused("bad-number", 1, kind=VocabularyError):
        VocabularyPartition(0, 2)
    with refused("bad-number", 2, kind=VocabularyError):
        partition.rows(2)


def test_hooks_on_a_shard_are_called():
    """By autograd, for each microbatch, and before or after DDP's."""
    (embedding,) = embeddings_of(VocabularyPartition(4, 1), torch.ones(4, 3))
    parameter = embedding.shard.parameter
    parameter.register_hook(torch.sign)
    for scale in (0.5, 2.0):
        embedding.add_weight_gradient(torch.tensor([[1, 3]]), torch.full((1, 2, 3), scale))
    assert torch.equal(parameter.grad, torch.tensor([[0.0], [2.0], [0.0], [2.0]]).expand(4, 3))
