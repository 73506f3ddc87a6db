"""Define the modules: a rank's shards of embedding and head, and what stands where Megatron had the whole ones.

Shard ``k`` of ``p * t`` belongs to pipeline rank ``k // t`` and tensor-parallel rank ``k % t``. Every rank keeps its shards
as a submodule of its chunk 0, whatever stage that is, so that DDP, optimizers and checkpoints find them where they find
everything else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.utils import get_pg_rank

from megatron_pipemem.features.vocabulary.runtime.embedding import EmbeddingWeightGradient, VocabularyEmbedding
from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions, VocabularyHead
from megatron_pipemem.features.vocabulary.runtime.microbatch import HeadMicrobatch
from megatron_pipemem.features.vocabulary.runtime.partition import VocabularyPartition, WeightShard

NAME = "vocabulary"
"""Of the submodule of chunk 0."""

EMBEDDING_KEY, HEAD_KEY = "embedding.word_embeddings.weight", "output_layer.weight"
"""Stock's names of the whole matrices in checkpoints."""


class EmbeddingShard(torch.nn.Module):
    """This rank's rows of the embedding: a module, because Megatron gathers a module's parameters before its forward.

    Args:
        weight: ``[rows, h]``.
        partition: of the vocabulary.
        index: of this rank's shard.
    """

    def __init__(self, weight: torch.nn.Parameter, partition: VocabularyPartition, index: int):
        super().__init__()
        self.weight = weight
        self._shard = partition, index

    @property
    def layer(self) -> VocabularyEmbedding:
        return VocabularyEmbedding(WeightShard(self.weight, *self._shard))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer.forward(tokens)


class HeadShard(torch.nn.Module):
    """This rank's rows of the head, as ``EmbeddingShard``.

    Args:
        weight: ``[rows, h]``; ``None`` for a tied head, which is given the embedding's, that every step uses before.
        partition: of the vocabulary.
        index: of this rank's shard.
        options: of the head.
    """

    def __init__(
        self, weight: torch.nn.Parameter | None, partition: VocabularyPartition, index: int, options: HeadOptions
    ):
        super().__init__()
        self.weight: torch.nn.Parameter | None
        self.register_parameter("weight", weight)
        self._shard = partition, index
        self._options = options

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None, embedding: torch.nn.Parameter, for_backward: bool
    ) -> HeadMicrobatch | torch.Tensor:
        """Return what the losses need; logits where there are no labels.

        Args:
            x: the head's input.
            labels: of its tokens, if losses are wanted.
            embedding: weight of a tied head.
            for_backward: whether gradients will be asked for.
        """
        weight = embedding if self.weight is None else self.weight
        layer = VocabularyHead(WeightShard(weight, *self._shard), self._options)
        return layer.logits(x) if labels is None else layer.score(x, labels, for_backward=for_backward)


class VocabularyShards(torch.nn.Module):
    """One rank's share of embedding and head (``features.vocabulary.runtime.passes.ShardedLayers``).

    Args:
        partition: of the vocabulary.
        index: of this rank's shard.
        embedding: ``[rows, h]``.
        head: ``[rows, h]``, or ``None`` when it is tied to the embedding.
        options: of the head.
    """

    def __init__(
        self,
        partition: VocabularyPartition,
        index: int,
        embedding: torch.nn.Parameter,
        head: torch.nn.Parameter | None,
        options: HeadOptions,
    ):
        super().__init__()
        self.partition = partition
        self.index = index
        self.options = options
        self.embedding = EmbeddingShard(embedding, partition, index)
        self.head = HeadShard(head, partition, index, options)

    @property
    def hidden_size(self) -> int:
        return self.embedding.weight.size(1)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)

    def embedding_gradient(self, tokens: torch.Tensor, output_gradient: torch.Tensor) -> EmbeddingWeightGradient:
        return self.embedding.layer.weight_gradient(tokens, output_gradient)

    def score(self, x: torch.Tensor, labels: torch.Tensor | None, for_backward: bool) -> HeadMicrobatch | torch.Tensor:
        return self.head(x, labels, self.embedding.weight, for_backward)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the shards under stock's keys, so that a checkpoint does not remember how the vocabulary was cut.

        Args:
            prefix, sharded_offsets: as in Megatron.
            metadata: has the process group over which the model is replicated.
        """
        root = prefix.removesuffix(f"{NAME}.")
        assert metadata is not None, "Megatron says which ranks hold the same"
        replica = (0, 0, get_pg_rank(metadata["dp_cp_group"]))
        entries = {}
        for name, key in (("embedding", EMBEDDING_KEY), ("head", HEAD_KEY)):
            weight = getattr(self, name).weight
            if weight is None:
                continue
            entries[f"{prefix}{name}.weight"] = ShardedTensor(
                key=root + key,
                data=weight,
                dtype=weight.dtype,
                local_shape=tuple(weight.shape),
                global_shape=(self.partition.vocab_size, weight.size(1)),
                global_offset=(self.partition.rows(self.index).start, 0),
                axis_fragmentations=None,  # shards differ by a row
                replica_id=replica,
                allow_shape_mismatch=True,  # stock pads the vocabulary depending on the tensor-parallel size
            )
        return entries


class ArrivingEmbedding(torch.nn.Module):
    """Stand in the place of a stage's word embeddings, and give what the shards have looked up.

    Args:
        whole: the module it replaces.
    """

    def __init__(self, whole: tensor_parallel.VocabParallelEmbedding):
        super().__init__()
        self.register_parameter("weight", None)
        self._tp_group = whole.tp_group
        self._scatters = whole.reduce_scatter_embeddings
        self.arrived: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s, h]``, or ``[s/t, b, h]`` where stock scatters, as stock gives it.

        ``arrived`` has the rows of this tensor-parallel rank's shards, on all pipeline ranks, for every call to come.
        """
        assert self.arrived, "the stage ran outside of a step"
        arrived = self.arrived.pop(0)
        if self._scatters:
            arrived = arrived.transpose(0, 1).contiguous()
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(arrived, group=self._tp_group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(arrived, group=self._tp_group)


class DepartingHead(torch.nn.Module):
    """Stand in the place of the last stage's output layer: keep its input for the shards, and give logits without
    values.

    Args:
        whole: the module it replaces.
    """

    def __init__(self, whole: tensor_parallel.ColumnParallelLinear):
        super().__init__()
        self.register_parameter("weight", None)
        self.tp_group = whole.tp_group
        self.sequence_parallel = whole.sequence_parallel
        self.gathers_output = whole.gather_output
        self._output_size = whole.output_size
        self._output_size_per_rank = whole.output_size_per_partition
        self.input: torch.Tensor | None = None
        self.losses: torch.Tensor | None = None
        self.depths = 0
        """Tokens behind the next one that the step predicts as well."""
        self.further: Callable | None = None
        """What makes the step's loss of the losses of all depths, see ``depths``."""

    def forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        self.input = input
        gathers = self.gathers_output if runtime_gather_output is None else runtime_gather_output
        tokens = input.size(0) * (self.tp_group.size() if self.sequence_parallel else 1)
        size = self._output_size if gathers else self._output_size_per_rank
        return input.detach().new_full((), float("nan")).expand(tokens, input.size(1), size), None

    def losses_without_values(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Stand in the place of the model's cross entropy: ``[b, s]``, for the user's forward step to return as it is."""
        self.losses = torch.full(labels.shape, float("nan"), device=labels.device)
        return self.losses
