"""Make Megatron build and run placements that it cannot express.

Megatron deals model chunks round robin: chunk ``c`` of pipeline rank ``r`` is stage ``c * p + r``. In a V, chunk 1 of
device ``r`` is stage ``2p - 1 - r``. Round robin would give this stage to rank ``p - 1 - r``. One idea covers every
placement: *a chunk is built and run as if its device were the rank that round robin would give this chunk*. While a
chunk is built or executed, Megatron's question "which pipeline rank am I" gets that rank for an answer. Layer numbers,
layouts, embedding, head and batch reading are then right without further changes. At all other times the answer is the
real rank.

A bidirectional pipeline has two replicas of the model, and every device has one stage of each. Megatron sees one
replica, without a virtual pipeline. The stages of the other replica are the devices' chunks 1, for which the same idea
holds. ``features/replicas`` keeps the values of the replicas equal, and combines them in checkpoints and norms.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_pipemem.choose.model_cut import check_cut, megatron_cut
from megatron_pipemem.conflicts import check_replicas
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.refusals import check_sharing
from megatron_pipemem.mcore.symbols import (
    BUILD_STAGES,
    CHOOSE_WRITERS,
    FILL_ENTRIES,
    GET_MODEL,
    IS_FIRST,
    IS_LAST,
    LAYER_OFFSET,
    LAYOUT_NUM_LAYERS,
    LAYOUT_OFFSET,
    MODEL_INITS,
    NUM_LAYERS,
    PROVIDE_CHUNKS,
    RANK,
    SELECT_SEGMENT,
    SELECT_SEGMENT_OF_GROUPS,
    TIED_GRADIENTS,
    Feature,
    PatchSet,
    Replacements,
)
from megatron_pipemem.runtime.weight_gradients import gradient_of
from megatron_pipemem.schedule.placement import Placement


class DealtRank(int):
    """The pipeline rank that a chunk would have in round robin, as a type that tells it from a real rank."""


class RoundRobinRank(torch.distributed.ProcessGroup):
    """Replaces the pipeline group while one chunk is built or run. It has a rank and a size, and cannot communicate."""

    def rank(self) -> int:
        return DealtRank(super().rank())


def round_robin_rank(placement: Placement, device: int, chunk: int) -> int:
    """Return the pipeline rank that would hold this chunk of a device if chunks were dealt round robin."""
    return placement.stages[device][chunk] % placement.num_devices


def groups_of_chunk(groups: ProcessGroupCollection, placement: Placement, chunk: int) -> ProcessGroupCollection:
    """Return a copy of Megatron's process groups with the pipeline rank that this chunk would have in round robin.

    ``chunk`` is an index among this rank's chunks. The copy has no embedding group unless the placement is round robin.
    """
    rank = round_robin_rank(placement, groups.pp.rank(), chunk)
    seen = copy.copy(groups)
    if rank != groups.pp.rank():
        # torch's type stub lacks the constructor without a store.
        seen.pp = RoundRobinRank(rank, groups.pp.size())  # type: ignore[call-arg]
    if not placement.is_round_robin:
        # The stock embedding group spans the first and the last rank; here both ends may be on one rank.
        seen.embd = None
    return seen


_REAL_RANK = nullcontext()


@dataclass(eq=False)
class ChunkPlacement(Feature):
    """Builds and runs the chunks of a schedule, so that Megatron sees the right pipeline rank for each chunk."""

    # returns the placement for ``(num_devices, num_chunks)``; ``num_chunks`` is ``None`` if it is not known yet
    find: Callable[[int, int | None], Placement]
    is_round_robin: bool  # the placement can only be Megatron's own, and all answers are stock's
    # called as ``cut(chunks, placement, pg_collection)`` when a rank's chunks have been built
    cut: Callable[[list[torch.nn.Module], Placement, ProcessGroupCollection], None] | None = None
    schedule_name: str = ""  # for messages
    # called before a model is built, with its process groups and its pipeline
    joins: Callable[[ProcessGroupCollection, dist.ProcessGroup], None] = lambda groups, pipeline: None
    # makes the replicas of a rank's stages equal, if the placement has several
    replicate: Callable[[list[torch.nn.Module], Placement, dist.ProcessGroup], None] | None = None
    _found: dict[tuple[int, int | None], Placement] = field(default_factory=dict)
    _rank_now: int | None = None
    _num_chunks: int | None = None
    _built_now: int | None = None  # the chunk that is being built

    def placement(self, num_devices: int, num_chunks: int | None = None) -> Placement:
        """Return the placement on that many devices, or raise an UnsupportedError if Megatron cannot build it.

        The default of ``num_chunks`` is the number of chunks per rank of the model that was built last. Before a model
        is built, it is Megatron's number of virtual pipeline stages per rank.
        """
        key = (num_devices, num_chunks or self._num_chunks or virtual_pipeline_size())
        if key not in self._found:
            placement = self.find(*key)
            for stages in placement.stages:
                if [stage // num_devices for stage in stages] != list(range(placement.num_chunks)):
                    raise UnsupportedError(
                        "unsupported-placement",
                        f"placement {placement.name} does not give each device one of every {num_devices} consecutive stages, "
                        "but Megatron can build only such placements; pass another schedule",
                    )
            check_replicas(placement)
            self._found[key] = placement
        return self._found[key]

    @property
    def is_in_chunk(self) -> bool:
        """Whether Megatron sees the pipeline rank of a chunk at present, and not the real one."""
        return self._rank_now is not None

    def chunk(self, chunk: int | None) -> AbstractContextManager:
        """Return a context in which Megatron sees the pipeline rank that this chunk would have in round robin.

        ``chunk`` is an index among this rank's chunks. ``None`` keeps the real rank.
        """
        # With round robin, the rank of a chunk is the real rank.
        return _REAL_RANK if chunk is None or self.is_round_robin else self._as_rank(self._rank_of(chunk))

    def _rank_of(self, chunk: int) -> int:
        group = parallel_state.get_pipeline_model_parallel_group()
        return round_robin_rank(self.placement(group.size()), group.rank(), chunk)

    @contextmanager
    def _building(self, chunk: int) -> Iterator[None]:
        self._built_now = chunk
        try:
            yield
        finally:
            self._built_now = None

    @contextmanager
    def _as_rank(self, rank: int) -> Iterator[None]:
        outer = self._rank_now
        self._rank_now = rank
        try:
            yield
        finally:
            self._rank_now = outer

    def replacements(self) -> Replacements:
        """Return the functions to replace; for round robin with an uncut vocabulary, only that of Megatron-Bridge."""
        ranks: Replacements = [
            (RANK, lambda original: original() if self._rank_now is None else self._rank_now),
            (IS_FIRST, self._predicate),
            (IS_LAST, self._predicate),
            (TIED_GRADIENTS, self._tied_gradients),
            (CHOOSE_WRITERS, _write_one_copy),
            (FILL_ENTRIES, _fill_both_copies),
            *((symbol, _select_segment) for symbol in (SELECT_SEGMENT, SELECT_SEGMENT_OF_GROUPS)),
        ]
        provided: Replacements = [(PROVIDE_CHUNKS, self._provide_chunks)]
        building: Replacements = [(BUILD_STAGES, self._build_stages), (GET_MODEL, self._get_model), *provided]
        if self.is_round_robin:
            return provided if self.cut is None else building
        return [*ranks, *self._counting(), *building]

    def _counting(self) -> Replacements:
        """Return the functions to replace that count layers."""
        return [
            (symbol, self._layers_of_stage) for symbol in (LAYER_OFFSET, NUM_LAYERS, LAYOUT_OFFSET, LAYOUT_NUM_LAYERS)
        ]

    def placement_for_model(self, groups: ProcessGroupCollection, vp_size: int | None) -> Placement:
        """Return the placement for a model with ``vp_size`` virtual stages per rank, and use it from now on.

        Raises:
            UnsupportedError: the schedule needs another number of virtual stages, or other ranks have other settings.
        """
        self.joins(groups, groups.pp)
        placement = self.placement(groups.pp.size(), vp_size or 1)
        check_cut(megatron_cut(vp_size or 1), self.schedule_name, placement)
        self._num_chunks = vp_size or 1
        return placement

    def build_chunks(
        self, build: Callable[..., torch.nn.Module], pg_collection, vp_size: int | None
    ) -> list[torch.nn.Module]:
        """Build this rank's chunks in order, and make tied weights and the replicas of a stage equal.

        The call is ``build(pre_process=, post_process=, vp_stage=, pg_collection=) -> module``. Every chunk gets a copy
        of the process groups with the pipeline rank that the chunk would have in round robin. Megatron counts the
        layers of every chunk for ``vp_size`` virtual stages per rank. Raise an UnsupportedError if the schedule needs
        another number of virtual stages, or if the configuration gives a rank layers that the placement puts elsewhere.
        """
        device, placement = pg_collection.pp.rank(), self.placement_for_model(pg_collection, vp_size)
        chunks = []
        for chunk, stage in enumerate(placement.stages[device]):
            with self.chunk(chunk), self._building(chunk):
                chunks.append(
                    build(
                        pre_process=placement.previous_stage(stage) is None,
                        post_process=placement.next_stage(stage) is None,
                        vp_stage=chunk if placement.num_chunks > placement.replicas else None,
                        pg_collection=groups_of_chunk(pg_collection, placement, chunk),
                    )
                )
            _tell_chunk(chunks[-1], chunk)
            if not placement.is_round_robin:
                self.prepare_chunk(chunks[-1], chunk)
        check_sharing(get_model_config(chunks[0]), self.schedule_name, placement)
        if placement.replicas > 1:
            assert self.replicate is not None, "the schedule's own feature does it"
            self.replicate(chunks, placement, pg_collection.pp)
        if not placement.is_round_robin:
            copy_tied_weights(chunks)
        if self.cut is not None:
            self.cut(chunks, placement, pg_collection)
        return chunks

    def prepare_chunk(self, module: Any, chunk: int) -> None:
        """Make a built chunk use its own layer numbers in checkpoints.

        Its forward then raises an UnsupportedError if it is called to generate text.
        """
        # Layer numbers in checkpoint keys are computed again at every save and load.
        module.sharded_state_dict = self._as_rank(self._rank_of(chunk))(module.sharded_state_dict)
        module.register_forward_pre_hook(_refuse_generation, with_kwargs=True)

    def _layers_of_stage(self, original: Callable[..., int], model, *args, **kwargs) -> int:
        """Return the number of a chunk's layers, or of those before it, when Megatron asks, also outside of the chunk.

        ``original`` is the function of Megatron that counts the one or the other. It counts for a round-robin rank, so
        the real rank is replaced by that of the chunk. If a program builds a chunk without its number, it is that of
        the chunk that is being built.
        """
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        if bound.arguments.get("vp_stage") is None and _has_chunks(model):
            bound.arguments["vp_stage"] = self._built_now
        if self.is_in_chunk or self.is_round_robin:
            return original(*bound.args, **bound.kwargs)
        size, chunk = model.pipeline_model_parallel_size, bound.arguments.get("vp_stage")
        rank = bound.arguments.get("pp_rank")
        if size == 1 or chunk is None:
            return original(*bound.args, **bound.kwargs)
        if rank is None:
            rank = parallel_state.get_pipeline_model_parallel_rank()
        if not isinstance(rank, DealtRank):
            bound.arguments["pp_rank"] = rank = round_robin_rank(self.placement(size), rank, chunk)
        with self._as_rank(rank):
            return original(*bound.args, **bound.kwargs)

    def check_built(self, chunks: list[torch.nn.Module], placement: Placement, device: int) -> None:
        """Raise an UnsupportedError if a chunk was built without the plugin, with the layers of another stage.

        Under round robin nothing is checked, because Megatron gives each chunk the right layers.
        """
        if placement.is_round_robin:
            return
        for chunk, module in enumerate(chunks):
            groups = get_attr_wrapped_model(module, "pg_collection")
            if groups.pp.rank() != round_robin_rank(placement, device, chunk):
                raise UnsupportedError(
                    "enabled-too-late",
                    f"chunk {chunk} of pipeline rank {device} was not built for placement {placement.name}; call enable() "
                    "before the model is built (and after importing megatron.training if you use it), or build the "
                    "chunks with build_model_chunks() or within place_model_chunks()",
                )

    def _predicate(
        self, original: Callable[..., bool], ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        with self.chunk(vp_stage):
            return original(ignore_virtual=ignore_virtual, vp_stage=vp_stage)

    def _tied_gradients(self, original: Callable, model, config, embd_group=None, pp_group=None) -> None:
        size = parallel_state.get_pipeline_model_parallel_world_size() if pp_group is None else pp_group.size()
        if self.placement(size).is_round_robin:
            original(model, config, embd_group, pp_group)
        else:
            _sum_tied_gradients(model)

    def _build_stages(self, original: Callable, build_model_func, pg_collection, vp_size, model_type=None):
        placement = self.placement_for_model(pg_collection, vp_size)
        if placement.is_round_robin and self.cut is None:
            return original(build_model_func, pg_collection, vp_size, model_type)
        chunks = self.build_chunks(
            lambda pg_collection, **kwargs: build_model_func(pg_collection, **kwargs), pg_collection, vp_size
        )
        for chunk in chunks:
            chunk.model_type = model_type
        return chunks

    def _get_model(self, original: Callable, model_provider_func, *args, **kwargs):
        built: list[torch.nn.Module] = []
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        groups = kwargs.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
        placement = self.placement_for_model(groups, vp_size)
        if placement.is_round_robin and self.cut is None:
            return original(model_provider_func, *args, **kwargs)

        def provider(*, vp_stage: int | None = None, pg_collection=None, **ignored):
            if not built:
                passed_on = {k: v for k, v in ignored.items() if k not in ("pre_process", "post_process")}
                built.extend(
                    self.build_chunks(lambda **own: model_provider_func(**passed_on, **own), pg_collection, vp_size)
                )
            return built[vp_stage or 0] if placement.replicas == 1 else _Chunks(built)

        return original(provider, *args, **kwargs)

    def _provide_chunks(self, original: Callable, model_provider: Any, model_type: Any, pg_collection) -> list:
        """Build the chunks of a provider of Megatron-Bridge, whose own code would place the ends by the real ranks."""
        vp_size = model_provider.virtual_pipeline_model_parallel_size
        placement = self.placement_for_model(pg_collection, vp_size)
        if placement.is_round_robin and self.cut is None and (vp_size or 1) == 1:
            return original(model_provider, model_type, pg_collection=pg_collection)

        def provide(pg_collection: ProcessGroupCollection, **chunk: Any) -> torch.nn.Module:
            model_provider._pg_collection = pg_collection  # from which it takes the groups of a chunk
            return model_provider.provide(**chunk)

        patches = PatchSet()
        if placement.is_round_robin:
            patches.install(self._counting())
        try:
            built = self.build_chunks(provide, pg_collection, vp_size)
        finally:
            patches.remove()
        model_provider._pg_collection = pg_collection
        finished = SimpleNamespace(
            virtual_pipeline_model_parallel_size=vp_size,
            provide=lambda *, vp_stage=None, **_: built[vp_stage or 0] if placement.replicas == 1 else _Chunks(built),
        )
        return original(finished, model_type, pg_collection=pg_collection)


def _has_chunks(model: Any) -> bool:
    """Return whether a configuration or layout cuts a model into several chunks per rank. A vision tower is not cut."""
    sizes = (getattr(model, f"{kind}pipeline_model_parallel_size", None) or 1 for kind in ("virtual_", ""))
    return all(size > 1 for size in sizes)


def _tell_chunk(module: Any, chunk: int) -> None:
    """Give the number of a chunk to those of its modules that were built without it."""
    for part in module.modules():
        if getattr(part, "vp_stage", chunk) is None and _has_chunks(part.config):
            part.vp_stage = chunk


class _Chunks(list):
    """A list of chunks on which attributes can be set.

    Megatron sets an attribute on the model that it builds, and afterwards accepts a list of chunks.
    """


def _select_segment(original: Callable, main_pattern, pp_group, vp_stage, *args, **kwargs):
    """Select the layers of a hybrid model's chunk by the rank and size of a ``RoundRobinRank``.

    Megatron would ask torch for the rank of the group, and torch does not know this class. For any other group,
    Megatron's function runs unchanged.
    """
    if isinstance(pp_group, RoundRobinRank):
        # With a pipeline group of one rank (None), Megatron takes every segment for a virtual stage.
        vp_stage, pp_group = (vp_stage or 0) * pp_group.size() + pp_group.rank(), None
    return original(main_pattern, pp_group, vp_stage, *args, **kwargs)


def virtual_pipeline_size() -> int:
    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


def _refuse_generation(module: torch.nn.Module, args: tuple, kwargs: Mapping[str, object]) -> None:
    if any(kwargs.get(name) is not None for name in ("inference_context", "inference_params")):
        raise UnsupportedError(
            "unsupported-setting",
            "this model cannot generate text where it is trained: generation looks for the last stage on the last pipeline "
            "rank, and the schedule has it elsewhere; save a checkpoint and load it for generation without the plugin",
        )


def _tied_weights(chunks: list[torch.nn.Module]) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Return a list of one pair: the embedding's weight, and its copy in another chunk of this device.

    A tied head has a copy, and so has the stage of multi-token prediction. The list is empty if this device lacks the
    embedding or the copy.
    """
    embedding = copied = None
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        tied_head = model.post_process and getattr(model, "share_embeddings_and_output_weights", False)
        if model.pre_process:
            embedding = model
        elif tied_head or getattr(model, "mtp_process", False):
            copied = model
    if embedding is None or copied is None:
        return []
    pair = embedding.shared_embedding_or_output_weight(), copied.shared_embedding_or_output_weight()
    return [] if pair[1] is None else [pair]  # a cut vocabulary has one copy, elsewhere


def copy_tied_weights(chunks: list[torch.nn.Module]) -> None:
    with torch.no_grad():
        for embedding, copied in _tied_weights(chunks):
            copied.data.copy_(embedding.data)


def _sum_tied_gradients(model: list[torch.nn.Module]) -> None:
    """Set both gradients of a tied embedding to their sum, on the rank that holds both copies.

    Megatron would do an all-reduce between the first and the last rank. Nothing changes if this rank lacks one of them,
    or if the embedding is frozen.
    """
    for embedding, head in _tied_weights(model):
        if not embedding.requires_grad:  # frozen, and without gradients
            continue
        gradients = [gradient_of(weight) for weight in (embedding, head)]
        total = gradients[0] + gradients[1]
        for gradient in gradients:
            gradient.copy_(total)


# A rank with both copies of a tied embedding has two entries of a checkpoint with the same key. Stock never has that, and takes
# entries with the same key for copies on different data-parallel ranks.


def _write_one_copy(original: Callable, sharded_state_dict, *args, **named) -> None:
    """Let a rank write only one of its two copies of a tied embedding, or of the embedding's optimizer state."""
    original(sharded_state_dict, *args, **named)
    written = set()
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
            part = (entry.key, entry.global_offset)
            if part in written:
                entry.replica_id = 1
            written.add(part)


def _fill_both_copies(original: Callable, sharded_state_dict, *args, **named) -> None:
    """Give each copy a tensor of its own. With one tensor for both, the optimizer would update it twice."""
    original(sharded_state_dict, *args, **named)
    filled: set[int] = set()

    def own(value: object) -> object:
        if isinstance(value, torch.Tensor) and id(value) in filled:
            return value.clone()
        filled.add(id(value))
        return value

    dict_list_map_inplace(own, sharded_state_dict)


# Programs that build their chunks themselves, by calling the model's class once per chunk.


_BUILD = "build the chunks with build_model_chunks()"


@dataclass(eq=False)
class ProgramChunks:
    """Places chunks that a program builds with its own code, within ``place_model_chunks()``."""

    placement: ChunkPlacement
    _built: list[torch.nn.Module] = field(default_factory=list)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Return a context in which each language model that is built becomes the next chunk of this rank.

        Raises:
            UnsupportedError: a model cannot be placed this way, or the program has not built all chunks.
        """
        if self.placement.cut is not None:
            raise UnsupportedError(
                "chunks-by-program", f"vocabulary parallelism needs all chunks to be built by one call; {_BUILD}"
            )
        patches = PatchSet()
        if not self.placement.is_round_robin:
            patches.install([(symbol, self._build) for symbol in MODEL_INITS])
        try:
            yield
            if self._built:
                raise UnsupportedError(
                    "chunks-by-program",
                    f"the program built only {len(self._built)} model chunks of this pipeline rank; build all of them in one "
                    "block of place_model_chunks()",
                )
        finally:
            patches.remove()
            self._built.clear()

    def _build(self, original: Callable[..., None], *args, **kwargs) -> None:
        """Initialise a language model as the next chunk of this rank, with the layers of its stage in the placement.

        Under round robin, Megatron's own initialisation runs unchanged. Raise an UnsupportedError if the arguments are
        those of another chunk, or if the placement or the model needs chunks that Megatron's training loop builds.
        """
        if self.placement.is_in_chunk:  # build_model_chunks() says which
            original(*args, **kwargs)
            return
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        values, chunk = bound.arguments, len(self._built)
        groups = values["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
        placement = self.placement.placement_for_model(groups, virtual_pipeline_size())
        if placement.is_round_robin:
            original(*args, **kwargs)
            return
        device, config, name = groups.pp.rank(), values["config"], self.placement.schedule_name
        check_sharing(config, name, placement)
        if placement.replicas > 1 or getattr(config, "mtp_num_layers", None):
            raise UnsupportedError(
                "chunks-by-program",
                f"schedule {name} cannot place two replicas of a model, or multi-token prediction, that a program builds by "
                f"itself; {_BUILD}",
            )
        stage = placement.stages[device][chunk]
        expected = chunk, placement.previous_stage(stage) is None, placement.next_stage(stage) is None
        actual = values["vp_stage"], values["pre_process"], values["post_process"]
        if actual != expected:
            raise UnsupportedError(
                "chunks-by-program",
                f"the program builds pipeline rank {device}'s model chunk with (vp_stage, pre_process, post_process) = "
                f"{actual} where schedule {name} has {expected}; let is_pipeline_first_stage() and is_pipeline_last_stage() of "
                f"parallel_state tell the ends of the model, or {_BUILD}",
            )
        values["pg_collection"] = groups_of_chunk(groups, placement, chunk)
        with self.placement.chunk(chunk):
            original(*bound.args, **bound.kwargs)
        model = bound.args[0]
        self.placement.prepare_chunk(model, chunk)
        self._built.append(model)
        if len(self._built) == placement.num_chunks:
            copy_tied_weights(self._built)
            self._built.clear()
