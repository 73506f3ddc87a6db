"""Cut the embedding and the LM head of a model that Megatron has just built into shards.

Megatron first initializes the whole matrices, so the shards and all later layers start with the same values as in stock
Megatron. The whole matrices are dropped before DDP allocates gradients and the optimizer allocates its states.

With p pipeline ranks and t tensor-parallel ranks there are ``p * t`` shards. Shard ``k`` belongs to pipeline rank ``k
// t`` and tensor-parallel rank ``k % t``. Every rank keeps its shards as a submodule of its chunk 0, whichever stage
that is. So DDP, optimizers and checkpoints find them with all other parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_pg_rank

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.vocabulary.choice import REDISTRIBUTE, choose_vocabulary
from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions, VocabularyShards
from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition, WeightShard
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.compat import is_plain_head
from megatron_pipemem.mcore.model.language_model import kinds_of, layers_in, mean_weight, pattern_of
from megatron_pipemem.mcore.model.linear import is_ddps_hook
from megatron_pipemem.mcore.model.whole_model import layout_of
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.part_costs import head_seconds, without_ends
from megatron_pipemem.refusals import of_config
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.weight_gradients import AccumulatorHooks, is_plain
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import AUTO, OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM

logger = logging.getLogger(__name__)


def head_in_layers(model: Any) -> float:
    """Return how many mean layers of the model have as many matrix-product FLOPs as the whole LM head.

    In a mixture of experts, a layer has the experts that one token visits.
    """
    return model.config.hidden_size * model.vocab_size / mean_weight(model)


def choose_barriers(model: Any, layout: Sequence[float], costs: Costs, schedules: Mapping[int, Schedule]) -> int:
    """Return the number of barriers of the best way to compute the LM head. 0 means the whole head on its stage.

    ``layout`` has the layers of every stage (``layers_in``), and ``schedules`` maps each allowed number to a schedule.
    The head's time is that of S and T over all devices, if the costs have prices of passes; else the price of the
    head's part; else it follows from the head's FLOPs.
    """
    placement, units = schedules[0].placement, schedules[0].units
    head = head_seconds(costs)
    if costs.vocabulary is not None:
        passes = costs.vocabulary.seconds(placement.num_devices, units)
        head = sum(map(sum, (passes[kind] for kind in (Kind.S, Kind.T))))
    elif head is not None:
        costs = without_ends(costs)
    else:
        seconds = costs.seconds(placement, units)
        head = head_in_layers(model) * sum(map(sum, (seconds[kind] for kind in (Kind.F, Kind.B)))) / sum(layout)
    # Costs per stage are those of the layers on their stages, and say nothing about other stages.
    moving: dict[str, Any] = {"layout": layout} if costs.are_single else {}
    if moving and pattern_of(model) is None and len({*kinds_of(model)}) == 1:
        moving["layers"] = round(sum(layout))
    choice = choose_vocabulary(schedules[0], costs, head, **moving, with_passes=schedules)
    if choice.best == REDISTRIBUTE:
        stages = choice.reason, choice.moved
        tell(logger, "vocabulary: %s; --pipeline-model-parallel-layout for layers per stage %s", *stages)
        # The user has placed the layers, so only the other ways are left.
        choice = choice.without(REDISTRIBUTE)
    tell(logger, "vocabulary: %s", choice.reason)
    return 0 if choice.best == OFF else BARRIERS_OF_ALGORITHM[int(choice.best)]


NAME = "vocabulary"
"""The name of the submodule of chunk 0 that holds a rank's shards."""

EMBEDDING_KEY, HEAD_KEY = "embedding.word_embeddings.weight", "output_layer.weight"
"""The keys of the whole matrices in stock Megatron's checkpoints."""


class SavedShards(VocabularyShards):
    """This rank's shards, which Megatron saves and loads."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the shards under stock Megatron's keys: a checkpoint does not depend on the cut of the vocabulary."""
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
                global_offset=(self.embedding.shard.rows.start, 0),
                axis_fragmentations=None,  # shards differ by a row
                replica_id=replica,
                allow_shape_mismatch=True,  # stock pads the vocabulary depending on the tensor-parallel size
            )
        return entries


class ArrivingEmbedding(torch.nn.Module):
    """Replaces the word embeddings of a stage. Its forward returns embeddings that the shards have looked up before."""

    def __init__(self, embedding: tensor_parallel.VocabParallelEmbedding):
        super().__init__()
        self.register_parameter("weight", None)
        self._tp_group = embedding.tp_group
        self._scatters = embedding.reduce_scatter_embeddings
        self.arrived: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings in stock Megatron's shape: ``[b, s, h]``, or ``[s/t, b, h]`` if stock scatters them.

        ``arrived`` must have one tensor for each coming call, ``[b, s, h]``: the sum over all pipeline ranks of the
        rows that the shards of this tensor-parallel rank have found.
        """
        assert self.arrived, "the stage ran outside of a step"
        arrived = self.arrived.pop(0)
        if self._scatters:
            arrived = arrived.transpose(0, 1).contiguous()
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(arrived, group=self._tp_group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(arrived, group=self._tp_group)


class DepartingHead(torch.nn.Module):
    """Replaces the output layer of the last stage. It keeps its input for the shards, and returns logits of NaN."""

    def __init__(self, head: tensor_parallel.ColumnParallelLinear):
        super().__init__()
        self.register_parameter("weight", None)
        self.tp_group = head.tp_group
        self.sequence_parallel = head.sequence_parallel
        self.gathers_output = head.gather_output
        self._output_size = head.output_size
        self._output_size_per_rank = head.output_size_per_partition
        self.input: torch.Tensor | None = None
        self.losses: torch.Tensor | None = None
        self.depths = 0
        """How many tokens after the next one are predicted too in this step (multi-token prediction)."""
        self.further: Callable | None = None
        """Computes the loss of the step from the token losses of all prediction depths."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        self.input = input_
        tokens = input_.size(0) * (self.tp_group.size() if self.sequence_parallel else 1)
        size = self.num_logits(self.gathers_output if runtime_gather_output is None else runtime_gather_output)
        return input_.detach().new_full((), float("nan")).expand(tokens, input_.size(1), size), None

    def num_logits(self, gathers: bool) -> int:
        """Return the number of logits of a token on this tensor-parallel rank."""
        return self._output_size if gathers else self._output_size_per_rank

    def losses_without_values(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return losses of NaN, ``[b, s]``, in place of the model's cross entropy. The forward step must return them
        unchanged.
        """
        self.losses = torch.full(labels.shape, float("nan"), device=labels.device)
        return self.losses


_PIECE_BYTES = 64 * 2**20


class _Matrix(NamedTuple):
    """The properties of an uncut embedding or head, which only its owner knows and all ranks need."""

    vocab_size: int
    hidden_size: int
    trains: bool
    marks: Mapping[str, object]  # attributes of the parameter, by which optimizers and programs treat it specially


class _OwnEnds(NamedTuple):
    """The matrices that a rank has at the ends of the model, or the code and sentence why one cannot be cut."""

    embedding: _Matrix | None = None
    head: _Matrix | None = None
    is_tied: bool = False
    refusal: tuple[str, str] | None = None


_OF_COPIES = ("shared", "shared_embedding", "tensor_model_parallel", "partition_dim", "partition_stride")
"""Attributes of Megatron that say which ranks hold the same rows of a parameter. Shards have their own, or none."""


def cut_model(
    programs: ProgramStore,
    chunks: list[torch.nn.Module],
    placement: Placement,
    pg_collection: ProcessGroupCollection | None,
) -> None:
    """Cut the vocabulary of a rank's chunks if the request says so, or with ``auto`` if the simulated step gets faster.

    Every rank calls this when it has built its chunks. ``programs`` gets the number of barriers.
    """
    if placement.num_devices == 1:
        return
    barriers = programs.request.barriers
    if programs.request.vocab_cut == AUTO:
        model = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True)
        assert pg_collection is not None, "they are made before the model"
        layout = layout_of(chunks, placement, pg_collection.pp, layers_in)
        barriers = choose_barriers(
            model, layout, programs.costs, programs.schedules_by_barriers(placement, len(chunks))
        )
    programs.set_vocabulary_barriers(barriers, placement.num_devices)
    if barriers:
        if get_attr_wrapped_model(chunks[0], "config").cross_entropy_loss_fusion:
            tell(logger, "vocabulary: --cross-entropy-loss-fusion has no effect, because the shards compute the loss")
        cut_vocabulary(chunks, placement, pg_collection, barriers, programs.request.vocab_piece_tokens)


def cut_vocabulary(
    chunks: list[torch.nn.Module], placement: Placement, pg_collection, barriers: int, piece_tokens: int | None
) -> None:
    """Replace the whole embedding and LM head by this rank's shards, with the same values.

    Every rank calls this after it has built its chunks, and before DDP wraps them.
    """
    if placement.num_devices == 1:
        return
    shards_group = shards_group_of(pg_collection)
    device, t = pg_collection.pp.rank(), pg_collection.tp.size()
    index = device * t + pg_collection.tp.rank()
    models: list[Any] = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in chunks]
    first, last = (_end(models, placement, device, stage) for stage in (0, placement.num_stages - 1))
    first_device, last_device = placement.devices[0], placement.devices[-1]
    own = _own_ends(models[0], first, last)
    if shards_group.rank() != index:
        error = _uncuttable(
            f"a rank has number {shards_group.rank()} in its model-parallel group, and vocabulary parallelism needs number "
            f"{index}: ranks must be ordered by pipeline stage first; use Megatron's default order of ranks, or"
        )
        own = _OwnEnds(refusal=(error.code, str(error)))
    everyones = gather(own, [shards_group])
    for refusal in (ends.refusal for ends in everyones):
        if refusal is not None:  # on all ranks, as none may wait for one that is refused
            raise UnsupportedError(*refusal)
    is_tied, embedding_matrix = everyones[first_device * t].is_tied, everyones[first_device * t].embedding
    assert embedding_matrix is not None, "the first device has the embedding"
    partition = VocabularyPartition(embedding_matrix.vocab_size, shards_group.size())
    if embedding_matrix.vocab_size < partition.shards:
        raise _uncuttable(f"a vocabulary of {embedding_matrix.vocab_size} cannot be cut over {partition.shards} ranks;")
    config = models[0].config

    def shard_of(weight: torch.Tensor | None, owner: int, embedding_matrix: _Matrix | None) -> WeightShard:
        """Return this rank's rows of a matrix that only device ``owner`` has. ``weight`` is that matrix, or ``None``
        elsewhere.
        """
        assert embedding_matrix is not None, "the owner has sent its description"
        on_cpu = config.use_cpu_initialization
        shard = torch.empty(
            len(partition.rows(index)),
            embedding_matrix.hidden_size,
            dtype=config.params_dtype,
            device="cpu" if on_cpu else torch.cuda.current_device(),
        )
        _deal(weight, shard, partition, shards_group, range(owner * t, (owner + 1) * t))
        parameter: Any = torch.nn.Parameter(shard, requires_grad=embedding_matrix.trains)
        vars(parameter).update(embedding_matrix.marks)
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        parameter.is_embedding_or_output_parameter = True
        if config.use_mup:
            parameter.is_embedding_parameter = True
        return WeightShard(parameter, partition, index)

    weight = None if first is None else first.embedding.word_embeddings.weight
    embedding, head = shard_of(weight, first_device, embedding_matrix), None
    if not is_tied:
        weight = None if last is None else last.output_layer.weight
        head = shard_of(weight, last_device, everyones[last_device * t].head)
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
    models[0].add_module(NAME, SavedShards(embedding, head, options))


def shards_of(chunks: list[torch.nn.Module]) -> SavedShards:
    """Return the shards of embedding and LM head on this rank, of chunks that may be wrapped."""
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
    """Return the model-parallel group, in which Megatron's default order puts tensor-parallel ranks side by side."""
    group = getattr(pg_collection, "mp", None)
    return parallel_state.get_model_parallel_group() if group is None else group


def _end(models: list[Any], placement: Placement, device: int, stage: int) -> Any:
    """Return this device's model of the pipeline's first or last ``stage``, or None if another device has it."""
    stages = placement.stages[device]
    return models[stages.index(stage)] if stage in stages else None


def _own_ends(model: Any, first: Any, last: Any) -> _OwnEnds:
    """Return the matrices of this rank, or why one cannot be cut. ``first`` and ``last`` are its models of these
    stages.
    """
    try:
        _check_ends(model, first, last)
        embedding = None if first is None else _matrix(first.embedding.word_embeddings, "embedding")
        head = None if last is None else _matrix(last.output_layer, "head")
        if getattr(last, "mtp_process", False):
            _matrix(last.embedding.word_embeddings, "copy of the embedding")
    except UnsupportedError as error:
        return _OwnEnds(refusal=(error.code, str(error)))
    return _OwnEnds(embedding, head, model.share_embeddings_and_output_weights)


def _matrix(module: Any, name: str) -> _Matrix:
    """Return the properties of a module's matrix. Raise an UnsupportedError if shards would lose some of them."""
    hooks = [kind for kind in _HOOKS_OF_MODULES if getattr(module, kind)]
    if hooks or "forward" in vars(module):
        raise _uncuttable(
            f"the {name} has hooks or a forward of its own, which its shards would not call; remove them, or"
        )
    weight = module._parameters.get("weight")
    if weight is None:
        raise _uncuttable(f"the weight of the {name} is computed from other tensors, and its shards would not be;")
    if not is_plain(weight) or AccumulatorHooks(is_ddps_hook).hooked([weight]):
        raise _uncuttable(
            f"the weight of the {name} has hooks on its gradient, of which a shard has only a part; remove them, or"
        )
    marks = {key: value for key, value in vars(weight).items() if key not in _OF_COPIES}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float | str | None):
            raise _uncuttable(
                f"the weight of the {name} has the attribute {key}, a {type(value).__name__}, which its shards cannot get; "
                "take a number or text, or"
            )
    vocab_size = getattr(module, "num_embeddings", None) or module.output_size
    return _Matrix(vocab_size, weight.size(1), weight.requires_grad, marks)


_HOOKS_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _check_ends(model: Any, first: Any, last: Any) -> None:
    """Raise an UnsupportedError if the embedding or the LM head is a module that cannot be cut."""
    check_gates(GateQuestion(Request("1f1b", vocab_cut="1"), of_config(model.config)))
    if getattr(model.config, "mtp_num_layers", None) and getattr(model.config, "context_parallel_size", 1) > 1:
        raise UnsupportedError(
            "vocabulary-model",
            "multi-token prediction looks up tokens of other context-parallel ranks, which a cut embedding does not get; "
            "pass --context-parallel-size 1, or --pipemem-vocab-cut off",
        )
    if not isinstance(model, LanguageModule):
        raise _uncuttable(f"a {type(model).__name__} is more than a language model;")
    if first is not None and type(getattr(first, "embedding", None)) is not LanguageModelEmbedding:
        raise _uncuttable(
            f"{type(first).__name__} has no LanguageModelEmbedding whose rows could be cut over the pipeline;"
        )
    if first is not None and type(first.embedding.word_embeddings) is not tensor_parallel.VocabParallelEmbedding:
        kind = type(first.embedding.word_embeddings).__name__
        raise _uncuttable(f"word embeddings of the class {kind} cannot be cut over the pipeline;")
    if last is None:
        return
    loss = last.compute_language_model_loss
    if getattr(loss, "__func__", None) is not LanguageModule.compute_language_model_loss:
        raise _uncuttable(
            f"{type(last).__name__} has a loss of its own (compute_language_model_loss), and shards compute only the "
            "cross entropy; change the losses in the loss function of the forward step, or"
        )
    head = getattr(last, "output_layer", None)
    if not is_plain_head(head):
        raise _uncuttable(
            f"the output layer of {type(last).__name__} is a {type(head).__name__}; only Megatron's ColumnParallelLinear can "
            "be cut over the pipeline: use it (no fp8 output projection, no --cross-entropy-fusion-impl linear), or"
        )
    if getattr(head, "output_dtype", None) is not None:
        raise _uncuttable(
            "a head whose logits have another dtype cannot be cut over the pipeline; drop --output-logit-dtype, or"
        )
    if getattr(head, "bias", None) is not None:
        raise _uncuttable("an output layer with a bias cannot be cut over the pipeline; drop the bias, or")


def _uncuttable(reason: str) -> UnsupportedError:
    """Return the error for a model whose vocabulary cannot be cut: the remedy is always to turn the cut off.

    The remedy ends the sentence of ``reason``, which must end with ``;``, or with ``or`` after another remedy.
    """
    return UnsupportedError("vocabulary-model", f"{reason} pass --pipemem-vocab-cut off")


@torch.no_grad()
def _deal(
    weight: torch.Tensor | None,
    shard: torch.Tensor,
    partition: VocabularyPartition,
    group: dist.ProcessGroup,
    owners: range,
) -> None:
    """Broadcast a matrix, which ``owners`` have in equal parts, 64 MiB at a time, and copy each rank's rows to
    ``shard``.
    """
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
            overlap = range(max(rows.start, start), min(rows.stop, start + len(piece)))
            if overlap:
                shard[overlap.start - rows.start : overlap.stop - rows.start] = buffer[
                    overlap.start - start : overlap.stop - start
                ]


def _pieces(rows: int, like: torch.Tensor) -> Iterator[range]:
    size = max(1, _PIECE_BYTES // (like.size(1) * like.element_size()))
    return (range(start, min(start + size, rows)) for start in range(0, rows, size))


def _save_no_copy(model: Any) -> None:
    """Make a model with multi-token prediction leave its copy of the word embeddings out of checkpoints."""
    original = model.sharded_state_dict

    def sharded_state_dict(*args, **kwargs):
        model.mtp_process = False
        try:
            return original(*args, **kwargs)
        finally:
            model.mtp_process = True

    model.sharded_state_dict = sharded_state_dict
