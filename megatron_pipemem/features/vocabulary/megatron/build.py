"""Cuts the embedding and the head of a model that Megatron has just built.

Megatron draws the whole matrices first, so that the shards start with the very values that stock would have started with,
and so do all other layers that draw after them. The whole matrices are dropped before DDP allocates gradients and the
optimizer its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.config.refusals import VOCABULARY
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.vocabulary.megatron.choice import choose_barriers, layers_in
from megatron_pipemem.features.vocabulary.megatron.layers import (
    NAME,
    ArrivingEmbedding,
    DepartingHead,
    VocabularyShards,
)
from megatron_pipemem.features.vocabulary.runtime.options import HeadOptions
from megatron_pipemem.features.vocabulary.runtime.partition import VocabularyPartition
from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.programs import Programs
from megatron_pipemem.mcore.refusals import check_config
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.placement import Placement

_PIECE_BYTES = 64 * 2**20


class _Whole(NamedTuple):
    """Hold what every rank must know of a model whose ends other ranks have built."""

    vocab_size: int
    hidden_size: int
    tied: bool


def cut_model(
    programs: Programs,
    chunks: list[torch.nn.Module],
    placement: Placement,
    pg_collection: ProcessGroupCollection | None,
) -> None:
    """Cut the vocabulary of a rank's chunks as the request says; under ``auto`` by what training would take either way.

    Every rank calls this when it has built its chunks.
    """
    if placement.num_devices == 1:
        return
    barriers = programs.request.barriers
    if programs.request.vocab_parallel == AUTO:
        model = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True)
        assert pg_collection is not None, "whoever builds the model has made them"
        layout = layout_of(chunks, placement, pg_collection.pp)
        barriers = choose_barriers(model, layout, programs.costs, programs.ways(placement, len(chunks)))
    programs.vocabulary_is(barriers, placement.num_devices)
    if barriers:
        cut_vocabulary(chunks, placement, pg_collection, barriers, programs.request.vocab_piece_tokens)


def cut_vocabulary(
    chunks: list[torch.nn.Module], placement: Placement, pg_collection, barriers: int, piece_tokens: int | None
) -> None:
    """Replace the whole embedding and head by this rank's shards, with the same values. Every rank calls this after building.

    Args:
        chunks: of this rank, not yet wrapped.
        placement: of the chunks.
        pg_collection: Megatron's process groups.
        barriers: of the schedules to come.
        piece_tokens: see ``HeadOptions``.

    Raises:
        UnsupportedError: the model has another head or embedding than those that can be cut.
    """
    if placement.num_devices == 1:
        return
    shards_group = shards_group_of(pg_collection)
    device, t = pg_collection.pp.rank(), pg_collection.tp.size()
    index = device * t + pg_collection.tp.rank()
    if shards_group.rank() != index:
        raise _uncuttable(
            f"this rank is {shards_group.rank()} of its model-parallel group, not {index}: vocabulary parallelism needs "
            "pipeline-major rank orders such as Megatron's default;"
        )
    models: list[Any] = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in chunks]
    first, last = (_end(models, placement, device, stage) for stage in (0, placement.num_stages - 1))
    _check_ends(models[0], first, last)
    first_device, last_device = placement.devices[0], placement.devices[-1]
    told = None
    if first is not None:
        embeddings = first.embedding.word_embeddings
        told = _Whole(embeddings.num_embeddings, embeddings.embedding_dim, first.share_embeddings_and_output_weights)
    whole = gather(told, shards_group)[first_device * t]
    partition = VocabularyPartition(whole.vocab_size, shards_group.size())
    if whole.vocab_size < partition.shards:
        raise _uncuttable(f"a vocabulary of {whole.vocab_size} cannot be cut over {partition.shards} ranks;")
    config = models[0].config

    def shard_of(weight: torch.Tensor | None, owner: int) -> torch.nn.Parameter:
        """This rank's rows of a matrix of which the ranks of device ``owner`` have ``weight``."""
        on_cpu = config.use_cpu_initialization
        shard = torch.empty(
            len(partition.rows(index)),
            whole.hidden_size,
            dtype=config.params_dtype,
            device="cpu" if on_cpu else torch.cuda.current_device(),
        )
        _deal(weight, shard, partition, shards_group, range(owner * t, (owner + 1) * t))
        parameter: Any = torch.nn.Parameter(shard)  # which gets Megatron's marks
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        parameter.is_embedding_or_output_parameter = True
        if config.use_mup:
            parameter.is_embedding_parameter = True
        return parameter

    embedding = shard_of(None if first is None else first.embedding.word_embeddings.weight, first_device)
    head = None if whole.tied else shard_of(None if last is None else last.output_layer.weight, last_device)
    if first is not None:
        first.embedding.word_embeddings = ArrivingEmbedding(first.embedding.word_embeddings)
    if last is not None:
        if getattr(last, "mtp_process", False):
            last.embedding.word_embeddings = ArrivingEmbedding(last.embedding.word_embeddings)
            _save_no_copy(last)
        last.output_layer = DepartingHead(last.output_layer)
        last.compute_language_model_loss = last.output_layer.losses_without_values
    for model in models:
        # Nothing is left at either end for Megatron to tie, to sum up or to save there: the shards save themselves.
        model.share_embeddings_and_output_weights = True
        model.tie_embeddings_and_output_weights_state_dict = lambda *args, **kwargs: None
    scale = config.mup_output_mult if config.use_mup else 1.0
    options = HeadOptions(barriers=barriers, piece_tokens=piece_tokens, scale=scale)
    models[0].add_module(NAME, VocabularyShards(partition, index, embedding, head, options))


def layout_of(
    chunks: list[torch.nn.Module],
    placement: Placement,
    pipeline: dist.ProcessGroup,
    count: Callable[[Any], float] = layers_in,
) -> tuple[float, ...]:
    """Return the number of layers of every stage as they were built. Every rank calls this.

    Args:
        chunks: of this rank.
        placement: of the stages.
        pipeline: its process group.
        count: returns the layers of a chunk.
    """
    models = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in chunks]
    everyones = gather([count(model) for model in models], pipeline)
    layout = [0.0] * placement.num_stages
    for stages, layers in zip(placement.stages, everyones, strict=True):
        for stage, held in zip(stages, layers, strict=True):
            layout[stage] = held
    return tuple(layout)


def shards_of(chunks: list[torch.nn.Module]) -> VocabularyShards:
    """Return this rank's shards, of wrapped or bare chunks.

    Raises:
        UnsupportedError: the model was built before ``enable()`` or around it.
    """
    model = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True)
    shards = getattr(model, NAME, None)
    if shards is None:
        raise UnsupportedError(
            "enabled-too-late",
            "this model's vocabulary was not cut over the pipeline; call enable() before the model is built (and after "
            "importing megatron.training if you use it), or build the chunks with build_model_chunks()",
        )
    return shards


def shards_group_of(pg_collection) -> dist.ProcessGroup:
    """Return the ranks of one replica of the model, those of the same pipeline rank side by side."""
    group = getattr(pg_collection, "mp", None)
    return parallel_state.get_model_parallel_group() if group is None else group


def _end(models: list[Any], placement: Placement, device: int, stage: int) -> Any:
    """Return the model of the pipeline's first or last stage, if this device holds it, else None."""
    stages = placement.stages[device]
    return models[stages.index(stage)] if stage in stages else None


def _check_ends(model: Any, first: Any, last: Any) -> None:
    """Raises:
    UnsupportedError: the model's ends are others than Megatron's language models have.

    Args:
        model: any chunk of this rank.
        first: the first stage's model, if it is here.
        last: the last stage's model, if it is here.
    """
    check_config(model.config, VOCABULARY)
    if getattr(model.config, "mtp_num_layers", None) and getattr(model.config, "context_parallel_size", 1) > 1:
        raise UnsupportedError(
            "vocabulary-model",
            "multi-token prediction looks up tokens that other context-parallel ranks have, and the shards of an embedding "
            "do not; pass --context-parallel-size 1, or --pipemem-vocab-parallel off",
        )
    if first is not None and type(getattr(first, "embedding", None)) is not LanguageModelEmbedding:
        raise _uncuttable(
            f"{type(first).__name__} has no LanguageModelEmbedding whose rows could be cut over the pipeline;"
        )
    if last is None:
        return
    head = getattr(last, "output_layer", None)
    if type(head) is not tensor_parallel.ColumnParallelLinear:
        raise _uncuttable(
            f"the output layer of {type(last).__name__} is a {type(head).__name__}; only Megatron's ColumnParallelLinear can "
            "be cut over the pipeline: use it (no fp8 output projection), or"
        )
    if getattr(head, "output_dtype", None) is not None:
        raise _uncuttable(
            "logits of a number format of their own cannot be cut over the pipeline; drop --output-logit-dtype, or"
        )
    if getattr(head, "bias", None) is not None:
        raise _uncuttable("an output layer with a bias cannot be cut over the pipeline; drop the bias, or")


def _uncuttable(reason: str) -> UnsupportedError:
    """Return the error for a model whose vocabulary cannot be cut; the way out is always the same."""
    return UnsupportedError("vocabulary-model", f"{reason} pass --pipemem-vocab-parallel off")


@torch.no_grad()
def _deal(
    weight: torch.Tensor | None,
    shard: torch.Tensor,
    partition: VocabularyPartition,
    group: dist.ProcessGroup,
    owners: range,
) -> None:
    """Give every rank its rows of a matrix that the owners have in equal parts, a bounded number of bytes at a time."""
    rows = partition.rows(group.rank())
    part = partition.vocab_size // len(owners)
    for piece in _pieces(part, shard):
        buffer = torch.empty(len(piece), shard.size(1), dtype=shard.dtype, device=torch.cuda.current_device())
        for number, owner in enumerate(owners):
            if group.rank() == owner:
                assert weight is not None, "owners have it"
                buffer.copy_(weight[piece.start : piece.stop])
            dist.broadcast(buffer, src=dist.get_global_rank(group, owner), group=group)
            start = number * part + piece.start
            wanted = range(max(rows.start, start), min(rows.stop, start + len(piece)))
            if wanted:
                shard[wanted.start - rows.start : wanted.stop - rows.start] = buffer[
                    wanted.start - start : wanted.stop - start
                ]


def _pieces(rows: int, like: torch.Tensor) -> Iterator[range]:
    size = max(1, _PIECE_BYTES // (like.size(1) * like.element_size()))
    return (range(start, min(start + size, rows)) for start in range(0, rows, size))


def _save_no_copy(model: Any) -> None:
    """Let the model of multi-token prediction save its layers, and no copy of the embedding."""
    original = model.sharded_state_dict

    def sharded_state_dict(*args, **kwargs):
        model.mtp_process = False
        try:
            return original(*args, **kwargs)
        finally:
            model.mtp_process = True

    model.sharded_state_dict = sharded_state_dict
