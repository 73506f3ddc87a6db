"""Chunks of a model that a program builds by itself: placed, or refused in a sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from refusals import refused

import megatron_pipemem
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model.placement import ChunkPlacement, ProgramChunks
from megatron_pipemem.schedule.placement import Placement

RANK, P = 1, 4


class Group:
    rank, size = staticmethod(lambda: RANK), staticmethod(lambda: P)


class GPT(torch.nn.Module):
    """As Megatron's, as far as placing it looks."""

    def __init__(self, config, pre_process=True, post_process=True, pg_collection=None, vp_stage=None):
        super().__init__()
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        self.pg_collection, self.vp_stage = pg_collection, vp_stage
        self.rank = parallel_state.get_pipeline_model_parallel_rank()

    def sharded_state_dict(self):
        return parallel_state.get_pipeline_model_parallel_rank()


GROUPS = SimpleNamespace(pp=Group, embd="the first and the last rank")
CONFIG = {"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None}


def placed(monkeypatch, placement=Placement.v_shape, cut=None) -> ProgramChunks:
    monkeypatch.setattr(gpt_model, "GPTModel", GPT)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda: Group)
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
