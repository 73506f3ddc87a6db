"""Compiling programs for the number of microbatches at hand."""

from __future__ import annotations

import pytest
import torch

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.mcore.source import Source
from megatron_pipemem.mcore.step.observation import has_single_queue
from megatron_pipemem.mcore.step.programs import ProgramCache
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.validator import validate_program
from megatron_pipemem.schedule.knowledge import Shape
from megatron_pipemem.schedule.request import Request


def compile(programs, m=8, chunks=2, forward_only=False, agree=lambda digest: None, group_size=None):
    return programs.compile(Shape(4, chunks, m, group_size), forward_only=forward_only, agree=agree).program


def family(name, **settings):
    return ProgramCache(Source(Request.of(name, **settings)))


def test_compiles_once_per_shape_and_asks_for_agreement_each_time_it_does():
    programs, digests = family("v-half"), []
    first = compile(programs, agree=digests.append)
    assert compile(programs, agree=digests.append) is first and len(digests) == 1
    compile(programs, m=5, agree=digests.append)
    compile(programs, forward_only=True, agree=digests.append)
    assert len(set(digests)) == 3
    again = []
    compile(family("v-half"), agree=again.append)
    assert again == digests[:1], "every rank builds the same program"


def test_a_program_that_ranks_disagree_on_is_not_kept():
    programs = family("1f1b")

    def disagree(digest):
        raise UnsupportedError("ranks differ")

    with pytest.raises(UnsupportedError):
        compile(programs, chunks=1, agree=disagree)
    seen = []
    compile(programs, chunks=1, agree=seen.append)
    assert seen


def test_evaluation_runs_nothing_but_forwards_and_messages():
    program = compile(family("v-min"), forward_only=True)
    kinds = {action.kind for actions in program.actions for action in actions}
    assert kinds == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_megatrons_group_size_is_used_unless_the_user_set_one():
    by_megatron = compile(family("interleaved"), m=12, group_size=6)
    by_user = compile(family("interleaved", options={"group_size": 6}), m=12, group_size=4)
    assert by_megatron.schedule.orders == by_user.schedule.orders
    assert compile(family("interleaved"), m=12).schedule.orders != by_user.schedule.orders


def test_a_cap_below_what_the_schedule_needs_is_refused_with_the_minimum():
    with pytest.raises(UnsupportedError, match="0.75"):
        compile(family("v-half", memory_cap=0.5))


def test_programs_for_a_single_queue_are_proved_for_it():
    programs = family("v-half")
    usual = compile(programs)
    with pytest.raises(ScheduleError, match="where every device has one queue"):
        validate_program(usual, single_queue=True)
    programs.single_queue = True
    queued = compile(programs)
    assert queued.schedule == usual.schedule and queued.actions != usual.actions
    validate_program(queued, single_queue=True)
    programs.single_queue = True
    assert compile(programs) is queued


def test_gpus_with_one_connection_have_a_single_queue(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert not has_single_queue(gpu) and has_single_queue(cpu, forced=True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert has_single_queue(gpu) and not has_single_queue(cpu)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert not has_single_queue(gpu)
