"""What the forward-backward function keeps between steps, and lets go of."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from quantised import Quantised, WithEmptyStorage, eight_bits
from refusals import refused

import megatron_pipemem
from megatron_pipemem.features.vocabulary.megatron.step import LastStage
from megatron_pipemem.gates import StepGates
from megatron_pipemem.mcore import plugin
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext
from megatron_pipemem.mcore.plugin import programs_for
from megatron_pipemem.mcore.report.run_report import RecordedStep
from megatron_pipemem.mcore.step import forward_backward as step
from megatron_pipemem.mcore.step.forward_backward import ForwardBackward
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.transport import (
    Pipeline,
    edges,
    new_groups,
)
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONE_CHUNK, TWO_CHUNKS = Placement.linear(4), Placement.interleaved(4, 2)


@pytest.fixture
def function(monkeypatch) -> ForwardBackward:
    def connect(placement, group, device):
        (channel,) = new_groups([[0]], group, "TEST")
        return Pipeline(group, placement, 0, [0], dict.fromkeys(edges(placement), channel))

    monkeypatch.setattr(step, "connect", connect)
    programs = programs_for(Request("interleaved"))
    return ForwardBackward(programs, ChunkPlacement(programs.placement, True))


def test_two_models_on_one_pipeline_have_each_their_channels(world, function):
    """Only the ring of two chunks joins the last device with the first."""
    two = function._connect(world, TWO_CHUNKS, "cpu", False)
    one = function._connect(world, ONE_CHUNK, "cpu", False)
    assert (3, 0) in two.channels and (3, 0) not in one.channels
    assert function._connect(world, Placement.interleaved(4, 2), "cpu", False) is two


def test_a_gpu_tells_the_memory_that_opening_the_channels_took(world, function, monkeypatch):
    free, reserved = iter((900, 500)), iter((50, 70))  # the allocator takes 20 for the first messages
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    assert function._connect(world, TWO_CHUNKS, 0, True).opened_bytes == 400 - 20
    assert function._connect(world, ONE_CHUNK, 0, False).opened_bytes is None


@pytest.mark.parametrize("broken_off", [False, True])
def test_closing_destroys_the_groups_unless_others_may_be_gone(world, function, broken_off):
    channels = function._connect(world, ONE_CHUNK, "cpu", False).channels
    function._is_in_step = broken_off
    function.close()
    open_groups = dist.distributed_c10d._world.pg_map
    assert all((group in open_groups) == broken_off for group in channels.values())
    assert world in open_groups


@pytest.mark.parametrize("kind", [ChunkStage, LastStage])
def test_every_stage_makes_its_quantised_weights_in_its_first_forward(monkeypatch, kind):
    """The second copy of a model never sees microbatch 0."""
    firsts = []

    def forward_step(*args, is_first_microbatch, current_microbatch, **kwargs):
        firsts.append((current_microbatch, is_first_microbatch))
        model.output_layer.input = torch.zeros(1)
        return torch.zeros(1), torch.zeros([], dtype=torch.int)

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    model = torch.nn.Linear(1, 1)
    model.pre_process, model.output_layer = False, SimpleNamespace(input=None, losses=None)
    model.set_input_tensor = lambda tensors: None
    context = StepContext(SimpleNamespace(), None, 8, 1, False, False, None, False, num_tokens=torch.zeros([]))
    round_robin = ChunkPlacement(lambda p, v: None, is_round_robin=True)
    stage = kind(context, model, None, 0, 1, False, round_robin, ())
    for microbatch in (1, 3, 5):
        stage.forward(microbatch, None)
    assert firsts == [(1, True), (3, False), (5, False)]


@pytest.mark.parametrize(
    ("name", "settings", "of_ddp", "words"),
    [
        ("v-half", {"moe_enable_routing_replay": True}, {}, ("moe_enable_routing_replay",)),
        ("gis", {"moe_enable_routing_replay": True}, {}, ("moe_enable_routing_replay",)),
        ("1f1b", {}, {"num_distributed_optimizer_instances": 2}, ("--num-distributed-optimizer-instances", 1)),
        ("pipedream-2bw", {}, {"use_distributed_optimizer": True}, ("--use-distributed-optimizer",)),
        ("interleaved", {"moe_enable_routing_replay": True}, {}, None),
        ("zb-h1", {"moe_enable_routing_replay": True}, {"use_distributed_optimizer": True}, None),
    ],
)
def test_a_first_step_asks_the_gates_about_the_model_and_ddp(name, settings, of_ddp, words):
    """Where they are passed, the next refusal is that of missing data iterators."""
    programs = programs_for(Request(name))
    function = ForwardBackward(programs, ChunkPlacement(programs.placement, True))
    placement, chunk = programs.placement(1, None), torch.nn.Linear(1, 1)
    chunk.ddp_config = SimpleNamespace(**of_ddp)
    with refused(*(("wrong-count",) if words is None else ("unsupported-setting", *words))):
        function._check([chunk] * placement.num_chunks, [], SimpleNamespace(**settings), placement, StepGates())


@pytest.mark.parametrize("kind", [Quantised, WithEmptyStorage])
def test_weights_that_the_first_forward_quantises_are_no_activations(monkeypatch, kind):
    """As Transformer Engine does in the first microbatch of a step, for all of them."""
    cached, ledger = kind(eight_bits(40)), ActivationLedger()
    layer = torch.nn.Module()
    layer.set_input_tensor, layer._fp8_workspaces = (lambda tensors: None), {}

    def forward_step(*args, **kwargs):
        layer._fp8_workspaces["weight"] = cached
        ledger.hold(cached)
        return torch.zeros(1), None

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    context = StepContext(SimpleNamespace(), None, 2, 1, False, False, None, False, num_tokens=torch.tensor(0))
    here = SimpleNamespace(chunk=lambda chunk: nullcontext())
    stage = ChunkStage(context, layer, None, 0, 1, False, here, (), [ledger.exclude])
    for microbatch in range(2):
        stage.forward(microbatch, torch.ones(1))
        ledger.record(Action(Kind.F, 0, microbatch))
    assert [entry.bytes for entry in ledger.entries] == [0, 0]


def living() -> Counter:
    """Tensors and objects of this package, by type."""
    types = map(type, gc.get_objects())
    return Counter(t for t in types if issubclass(t, torch.Tensor) or str(t.__module__).startswith("megatron_pipemem."))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("recorded", ["nothing", "times", "times and bytes"])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("v-half", 2)])
def test_steps_leave_nothing_behind(world, monkeypatch, tmp_path, name, chunks, recorded, fails):
    """A loop may collect garbage seldom (``--manual-gc``). A step that fails may have run a part of its passes."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(parallel_state, "_PIPELINE_MODEL_PARALLEL_GROUP", world)
    monkeypatch.setattr(parallel_state, "_PIPELINE_GLOBAL_RANKS", [0])
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", chunks if chunks > 1 else None)
    from stock_steps import tiny_step

    class Stops(Exception):
        pass

    def read(data):
        if next(data) == 3 and fails:
            raise Stops
        return {}

    call = tiny_step(1, chunks, 8, lambda: torch.zeros(2, 1, 8), read)

    def step():
        with suppress(Stops):
            call(
                data_iterator=[iter(range(4)) for _ in range(chunks)],
                num_microbatches=4,
                seq_length=2,
                micro_batch_size=1,
            )

    if recorded == "times and bytes":
        monkeypatch.setattr("megatron_pipemem.mcore.report.run_record.RunRecord.counts", lambda record, program: True)
    megatron_pipemem.enable(name, report=None if recorded == "nothing" else str(tmp_path / "report"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            step()
        gc.collect()
        before = living()
        for _ in range(20):
            step()
        assert gc.collect() == 0
        more = living()
        more.subtract(before)
        more = {kind: number for kind, number in more.items() if number}
        assert more == ({} if recorded == "nothing" or fails else {RecordedStep: 20})
    finally:
        gc.enable()
        plugin.disable()
