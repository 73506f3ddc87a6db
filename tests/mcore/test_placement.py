"""Megatron's questions about ranks, answered for placements that it cannot express."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import transformer_block
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from refusals import refused

import megatron_pipemem
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model.placement import ChunkPlacement, ProgramChunks, RoundRobinRank, _sum_tied_gradients
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.symbols import PatchSet
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.placement import Placement


class Group:
    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


GROUPS = SimpleNamespace(pp=Group(1, 4), embd="the first and the last rank")


@pytest.fixture
def as_rank(monkeypatch):
    """Pretend to be one pipeline rank of four with two virtual stages, and patch the questions."""
    patches, installed = PatchSet(), None

    def pretend(rank, chunks=None):
        nonlocal installed
        group = Group(rank, 4)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda **_: group)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 4)
        monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 2)
        monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)
        chunks = chunks or ChunkPlacement(
            lambda p, v: Placement.v_shape(p), is_round_robin=False, schedule_name="v-half"
        )
        if chunks is not installed:
            patches.remove()
            patches.install([(symbol, wrap) for symbol, wrap in chunks.replacements() if not symbol.is_of_program])
            installed = chunks
        return chunks

    yield pretend
    patches.remove()


@pytest.mark.parametrize("rank", range(4))
def test_while_a_chunk_runs_unqualified_questions_are_about_it(as_rank, rank):
    chunks = as_rank(rank)
    assert parallel_state.get_pipeline_model_parallel_rank() == rank
    with chunks.chunk(1):
        assert parallel_state.get_pipeline_model_parallel_rank() == 3 - rank
        assert parallel_state.is_pipeline_last_stage() == (rank == 0)
        with chunks.chunk(0):
            assert parallel_state.get_pipeline_model_parallel_rank() == rank
        assert parallel_state.get_pipeline_model_parallel_rank() == 3 - rank
    assert parallel_state.is_pipeline_last_stage() == (rank == 3), "outside, loggers see the real rank"


def test_an_error_inside_a_chunk_leaves_no_rank_behind(as_rank):
    chunks = as_rank(1)
    with pytest.raises(RuntimeError), chunks.chunk(1):
        raise RuntimeError
    assert parallel_state.get_pipeline_model_parallel_rank() == 1


def test_round_robin_placements_need_no_answers():
    chunks = ChunkPlacement(lambda p, v: Placement.interleaved(p, v), is_round_robin=True)
    assert [symbol.is_of_program for symbol, _ in chunks.replacements()] == [True]
    with chunks.chunk(1):  # needs no process groups either
        pass


def test_a_chunk_without_its_number_is_the_one_that_is_being_built():
    chunks = ChunkPlacement(lambda p, v: Placement.interleaved(p, v), is_round_robin=True)
    config = SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    tower = SimpleNamespace(pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=1)
    ask = partial(chunks._layers_of_stage, lambda config, vp_stage=None, pp_rank=None: (vp_stage, pp_rank))
    assert (ask(config), ask(config, 0, 3)) == ((None, None), (0, 3))
    with chunks._building(1):
        assert (ask(config), ask(config, pp_rank=2), ask(config, 0)) == ((1, None), (1, 2), (0, None))
        assert ask(tower) == (None, None)


def test_the_stand_in_group_knows_rank_and_size_and_cannot_communicate():
    group = RoundRobinRank(2, 4)
    assert (group.rank(), group.size()) == (2, 4)
    with pytest.raises(RuntimeError):
        group.allreduce([torch.zeros(1)])


def test_a_placement_that_megatron_cannot_build_is_refused():
    two_in_a_row = Placement("custom", (0, 0, 1, 1))
    with refused("unsupported-placement", kind=UnsupportedError):
        ChunkPlacement(lambda p, v: two_in_a_row, is_round_robin=False).placement(2)


@pytest.mark.parametrize(("virtual_stages", "chunks"), [(2, 2), (4, 4), (6, 6)])
def test_a_model_is_built_with_as_many_chunks_as_megatron_counts_with(as_rank, monkeypatch, virtual_stages, chunks):
    as_rank(1)
    source = ProgramStore(Request("hanayo"))
    placement = ChunkPlacement(source.placement, source.request.is_round_robin, schedule_name="hanayo")
    built = placement.build_chunks(Chunk, GROUPS, virtual_stages)
    assert [chunk.vp_stage for chunk in built] == list(range(chunks))
    group = parallel_state.get_pipeline_model_parallel_group()
    for chunk, stage in enumerate(placement.placement(group.size()).stages[1]):
        with placement.chunk(chunk):
            assert placement._rank_now == stage % 4
    with refused("needs-chunks", 3, "--num-virtual-stages-per-pipeline-rank", 4, kind=UnsupportedError):
        placement.build_chunks(Chunk, GROUPS, 3)


P, LAYERS = 4, 48


def sizes(vp_size, **others):
    """What Megatron's functions read that count a stage's layers."""
    return {
        **{"num_layers": LAYERS, "pipeline_model_parallel_size": P, "virtual_pipeline_model_parallel_size": vp_size},
        **dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), False),
        **dict.fromkeys(
            (
                "pipeline_model_parallel_layout",
                "num_layers_in_first_pipeline_stage",
                "num_layers_in_last_pipeline_stage",
            )
        ),
        **others,
    }


LAYOUT = "Et|t*2|t|t*3|t|t*2|t|tL"


@pytest.mark.parametrize("layout", [None, LAYOUT], ids=["even", "layout"])
@pytest.mark.parametrize("rank", range(P))
def test_layers_are_counted_right_from_outside_of_a_chunk(as_rank, monkeypatch, rank, layout):
    """By whoever exports weights or replays routers: with no rank, and with the real rank of this device or another."""
    if layout is None:
        counts = [LAYERS // 8] * 8
    else:
        layout = PipelineParallelLayerLayout.from_str(layout, P)
        counts = [1, 2, 1, 3, 1, 2, 1, 1]
    config = SimpleNamespace(**sizes(2, pipeline_model_parallel_layout=layout))
    as_rank(rank)
    asked_later = ModuleType("exporter")  # imports the functions while they are replaced
    asked_later.count, asked_later.offset = transformer_block.get_num_layers_to_build, get_transformer_layer_offset
    monkeypatch.setitem(sys.modules, "exporter", asked_later)
    for device, stages in enumerate(Placement.v_shape(P).stages):
        for chunk, stage in enumerate(stages):
            expected = sum(counts[:stage]), counts[stage]
            named = {"vp_stage": chunk, "pp_rank": device}
            assert (get_transformer_layer_offset(config, **named), get_num_layers_to_build(config, **named)) == expected
            if device == rank:
                assert (asked_later.offset(config, chunk), asked_later.count(config, chunk)) == expected
                if layout:
                    assert len(layout.get_layer_id_list(vp_stage=chunk)) == counts[stage]
                    assert layout.get_layer_offset(vp_stage=chunk) == expected[0]
            group = RoundRobinRank(stage % P, P)
            assert get_transformer_layer_offset(config, chunk, group.rank()) == expected[0], (
                "asked by a chunk's own group"
            )
    as_rank(rank, ChunkPlacement(lambda p, v: Placement.interleaved(p, v), is_round_robin=True))
    assert asked_later.offset is get_transformer_layer_offset and not hasattr(asked_later.offset, "__wrapped__")


def test_layers_of_a_first_rank_are_refused_where_it_holds_late_stages(as_rank):
    chunks = as_rank(1)
    with refused("unsupported-placement", "v-half", "--pipeline-model-parallel-layout", kind=UnsupportedError):
        chunks.build_chunks(partial(Chunk, num_layers_in_first_pipeline_stage=2), GROUPS, 2)


def test_a_model_that_is_trained_elsewhere_does_not_generate_there(as_rank):
    chunk, _ = as_rank(1).build_chunks(Chunk, GROUPS, 2)
    assert chunk(1, inference_context=None) == 1
    for argument in ("inference_context", "inference_params"):
        with refused("unsupported-setting", kind=UnsupportedError):
            chunk(1, **{argument: object()})


@pytest.mark.parametrize("frozen", [False, True])
def test_tied_gradients_are_summed_where_there_are_any(frozen):
    ends = []
    for first in (True, False):
        chunk = Chunk(first, not first, None, GROUPS)
        weight = torch.nn.Parameter(torch.ones(2), requires_grad=not frozen)
        weight.grad = None if frozen else torch.full((2,), 1.0 + first)
        chunk.share_embeddings_and_output_weights = True
        chunk.shared_embedding_or_output_weight = lambda weight=weight: weight
        ends.append((chunk, weight))
    _sum_tied_gradients([chunk for chunk, _ in ends])
    assert [weight.grad is None if frozen else weight.grad.tolist() for _, weight in ends] == [
        True if frozen else [3, 3]
    ] * 2


class Chunk(torch.nn.Module):
    """What a script would build."""

    def __init__(self, pre_process, post_process, vp_stage, pg_collection, **config):
        super().__init__()
        self.pre_process, self.post_process, self.vp_stage, self.pg_collection = (
            pre_process,
            post_process,
            vp_stage,
            pg_collection,
        )
        self.config = SimpleNamespace(**config)

    def forward(self, tokens, **_):
        return tokens

    def sharded_state_dict(self):
        return {}


# Chunks of a model that a program builds by itself.


class GPT(torch.nn.Module):
    """As Megatron's, as far as placing it looks."""

    def __init__(self, config, pre_process=True, post_process=True, pg_collection=None, vp_stage=None):
        super().__init__()
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        self.pg_collection, self.vp_stage = pg_collection, vp_stage
        self.rank = parallel_state.get_pipeline_model_parallel_rank()

    def sharded_state_dict(self):
        return parallel_state.get_pipeline_model_parallel_rank()


CONFIG = {"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None}


def placed(monkeypatch, placement=Placement.v_shape, cut=None) -> ProgramChunks:
    monkeypatch.setattr(gpt_model, "GPTModel", GPT)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda: GROUPS.pp)
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 2)
    chunks = ChunkPlacement(lambda p, v: placement(p), False, cut, "v-half")
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: chunks._rank_now)
    return ProgramChunks(chunks)


def chunk(vp_stage, pre_process=False, post_process=False, **config):
    return gpt_model.GPTModel(
        SimpleNamespace(**CONFIG, **config), pre_process, post_process, pg_collection=GROUPS, vp_stage=vp_stage
    )


def test_chunks_see_the_ranks_that_the_placement_gives_them(monkeypatch):
    original = GPT.__init__
    with placed(monkeypatch).placing():
        models = [chunk(number) for _ in range(2) for number in range(2)]
    assert GPT.__init__ is original
    assert [model.rank for model in models] == [1, 2, 1, 2]
    assert [model.pg_collection.pp.rank() for model in models] == [1, 2, 1, 2]
    assert [model.sharded_state_dict() for model in models] == [1, 2, 1, 2]
    assert all(model.pg_collection.embd is None for model in models) and GROUPS.embd
    with refused("unsupported-setting", kind=UnsupportedError):
        models[0](1, inference_context=object())


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (
            [(0, {}), (1, {"post_process": True})],
            ("chunks-by-program", "(1, False, True)", "(1, False, False)"),
        ),
        ([(1, {})], ("chunks-by-program", "(1, False, False)", "(0, False, False)")),
        ([(None, {})], ("chunks-by-program", "(None, False, False)")),
        ([(0, {})], ("chunks-by-program", 1)),
        ([(0, {"mtp_num_layers": 1})], ("chunks-by-program", "build_model_chunks")),
    ],
)
def test_what_cannot_be_placed_is_refused(monkeypatch, built, words):
    program = placed(monkeypatch)
    with refused(*words, kind=UnsupportedError), program.placing():
        for number, how in built:
            chunk(number, **how)
    with program.placing():  # nothing of it is left
        assert [chunk(0).rank, chunk(1).rank] == [1, 2]


def test_two_replicas_and_a_cut_vocabulary_are_refused(monkeypatch):
    with refused("chunks-by-program", kind=UnsupportedError):
        placed(monkeypatch, cut=lambda *_: None).placing().__enter__()
    program = placed(monkeypatch, Placement.bidirectional)
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: None)
    with refused("chunks-by-program", kind=UnsupportedError), program.placing():
        chunk(None)


def test_needs_the_plugin():
    with refused("not-enabled", kind=UnsupportedError):
        megatron_pipemem.place_model_chunks()
