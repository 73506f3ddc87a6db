"""The runtime under the stream sanitizer: transport, split backward, recomputation, offload, vocabulary, losses."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch
import toy
import vocabulary_model
from lanes import rest_nightly
from streams import Group, Stream, Streams, Work
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.features.offload.runtime.channels import CudaChannel
from megatron_pipemem.features.offload.runtime.engine import OffloadEngine
from megatron_pipemem.features.offload.runtime.host import HostPool
from megatron_pipemem.features.vocabulary.runtime import collectives
from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions
from megatron_pipemem.runtime import transport
from megatron_pipemem.runtime.transport import (
    MessageFormat,
    Pipeline,
    edges,
    polls_departures,
)
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.family import Family
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families

DEVICES = 4
SEND = Action(Kind.SEND_F, 0, 0)
ALL = list(range(2 * DEVICES))
CASES = {
    "messages and split backward": {},
    "recompute": {"recompute": ALL},
    "selective": {"selective": ALL},
    "offload": {"offload": ALL},
    "offload and selective": {"offload": ALL, "selective": ALL},
}
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "gis")


def engine_on_streams(budget: int = 1 << 24, timed: bool = False, **options) -> OffloadEngine:
    channel = CudaChannel(torch.device("cuda", 0), timed)
    channel.device = torch.device("cpu")
    channel.host_memory = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    return OffloadEngine(channel, HostPool(budget, channel.host_memory, min(budget, 1 << 20)), min_bytes=1, **options)


def runs_here(family: Family) -> bool:
    return not (family.asynchronous or family.slices > 1) and family.replicas == 1


def run_device(device: int, case: dict, variable: str = "", steps: int = 2) -> None:
    """Steps of one device, whose messages bring whatever their memory holds."""
    schedule = toy.make_schedule({"microbatches": 6} | case, DEVICES)
    channels = {edge: Group(f"edge {edge}") for edge in edges(schedule.placement) if device in edge}
    pipeline = Pipeline(None, schedule.placement, device, range(DEVICES), channels)
    engine = engine_on_streams() if schedule.offloads else None
    for _ in range(steps):
        toy.run_step(lower(schedule), pipeline, engine, variable=variable)


@pytest.fixture(autouse=True)
def own_ranks(monkeypatch):
    monkeypatch.setattr(transport.dist, "get_group_rank", lambda group, rank: rank)


# Every kind of message and every feature once; the others repeat them on further placements.
FULL_LANE = [
    *(("v-half", case) for case in CASES),
    ("1f1b", "offload"),
    *((name, [*CASES][0]) for name in ("1f1b", "gis")),
]


@pytest.mark.parametrize(
    ("name", "case"), rest_nightly(product(SCHEDULES, CASES), FULL_LANE, "the same feature with v-half")
)
def test_a_device_has_no_race_and_frees_nothing_early(gpu, name, case):
    for device in range(DEVICES):
        run_device(device, {"schedule": name} | CASES[case])
    assert not gpu.late


def test_memory_of_messages_comes_back_late_if_their_stream_is_recorded(monkeypatch, gpu):
    """The alias of a message has another owner. Its memory is safe, because the computing waits for the message."""
    monkeypatch.setattr(transport, "unrecorded", lambda tensor: tensor)
    run_device(1, {"schedule": "v-half"})
    torch.ones(1)  # memory is found free at the next launch
    assert sum(gpu.late.values()) == 2 * 6 * 8  # steps, microbatches, messages of two stages
    assert {stream for _, stream in gpu.late} == {"edge (0, 1)", "edge (1, 0)", "edge (1, 2)", "edge (2, 1)"}


def test_a_message_that_is_freed_before_it_is_sent_is_found(monkeypatch):
    monkeypatch.setattr(transport.Transport, "free_sent", lambda messages, action: messages._sends.pop(action, None))
    monkeypatch.setattr(Work, "wait", lambda work: None)
    with Streams() as gpu:
        run_device(0, {"schedule": "1f1b"})
    assert "free" in gpu.kinds()


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_sent_tensor_of_another_stream_waits_for_the_stream_that_frees_it(monkeypatch, is_cuda):
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
    with Streams() as gpu:
        placement, other = Placement.linear(2), Stream()
        message = MessageFormat((4,), torch.float32, torch.device("cpu"))
        messages = transport.Transport(
            Pipeline(None, placement, 0, range(2), {edge: Group(f"{edge}") for edge in edges(placement)}), message
        )
        with torch.cuda.stream(other):
            tensor = torch.ones(4)
        gpu.compute.wait_stream(other)
        messages.post_send(SEND, tensor)
        messages.free_sent(SEND)
        del tensor
        with torch.cuda.stream(other):
            torch.ones(4)  # may take its place
    assert gpu.kinds() == (set() if is_cuda else {"free"})


def test_a_failed_step_keeps_the_memory_that_its_messages_use(monkeypatch, gpu):
    """Another rank may still send, and what the caller computes next must not be overwritten."""
    placement = Placement.linear(2)
    pipeline = Pipeline(None, placement, 0, range(2), {edge: Group(f"{edge}") for edge in edges(placement)})
    messages = transport.Transport(pipeline, MessageFormat((4,), torch.float32, torch.device("cpu")))
    messages.post_send(SEND, torch.ones(4))
    received = StorageWeakRef(messages.post_receive(Action(Kind.RECV_I, 0, 0)).untyped_storage())
    messages.finish()
    del messages
    assert not received.expired()
    (left,) = pipeline.unfinished
    left.take_in()
    del left
    assert received.expired() and not pipeline.unfinished


ASKING = [
    *((family.name, "") for family in families() if runs_here(family)),
    *product(("1f1b", "v-half"), ("step", "message")),
]


# A host asks by the kinds of messages, of the backward and of memory actions. Further families repeat them.
ASKING_FULL_LANE = [
    *((name, "") for name in ("gpipe", "1f1b", "zb-h1", "interleaved", "v-half", "po-h")),
    *((name, variable) for name, variable in ASKING if variable),
]


@pytest.mark.parametrize(
    ("name", "variable"), rest_nightly(ASKING, ASKING_FULL_LANE, "families with the same kinds of actions")
)
def test_a_host_asks_its_device_only_what_the_step_declares(monkeypatch, name, variable):
    asked = set()
    program = lower(build_schedule(name, num_devices=DEVICES, num_microbatches=6))
    # What the sanitizer calls the questions.
    declared = {"departures of messages"} if polls_departures(program) else set()
    if variable == "message":
        declared.add("values")
    if program.schedule.offloads:
        declared.add("events")
    if program.placement.num_chunks == 1 and variable != "message":
        assert not declared
    monkeypatch.setattr(toy, "rows_of", lambda microbatch, variable: toy.ROWS)
    recv = Group.recv
    monkeypatch.setattr(Group, "recv", lambda group, tensors, *ends: recv(group, with_header(tensors), *ends))
    for device in range(DEVICES):
        with Streams() as gpu:
            run_device(device, {"schedule": name}, variable, steps=1)
        asked |= set(gpu.asked)
        assert not gpu.findings
    assert asked <= declared


def test_an_undeclared_question_is_found(monkeypatch):
    forward = toy.Runner.forward
    monkeypatch.setattr(toy.Runner, "forward", lambda runner, *args, **kwargs: asks(forward(runner, *args, **kwargs)))
    with Streams() as gpu:
        run_device(1, {"schedule": "1f1b"})
    assert gpu.asked["values"] == 2 * 6


def asks(output: torch.Tensor) -> torch.Tensor:
    output.sum().item()
    return output


def with_header(received: list[torch.Tensor]) -> list[torch.Tensor]:
    """A header says the shape that all messages of this test have."""
    if received[0].dtype is torch.int64:
        received[0][:3] = torch.tensor((2, toy.ROWS, toy.WIDTH))
    return received


def no_wait(*_) -> None:
    pass


start = CudaChannel.start


def start_before_computing_ends(channel, direction, copies, after):
    with mock.patch.object(torch.cuda, "current_stream", lambda *_: Stream()):
        return start(channel, direction, copies, after)


def start_before_earlier_copies_end(channel, direction, copies, after):
    return start(channel, direction, copies, ())


@pytest.mark.parametrize(
    ("case", "planted"),
    [
        ({}, (Work, "wait", no_wait)),
        ({"offload": ALL}, (CudaChannel, "join", no_wait)),
        ({"offload": ALL}, (CudaChannel, "start", start_before_computing_ends)),
    ],
    ids=["a receive is not waited for", "a reload is not waited for", "an offload does not wait"],
)
def test_a_planted_fault_is_found(monkeypatch, case, planted):
    monkeypatch.setattr(*planted)
    with Streams() as gpu:
        run_device(1, {"schedule": "1f1b"} | case)
    assert "race" in gpu.kinds()


@pytest.mark.parametrize("planted", [False, True])
def test_host_memory_is_not_overwritten_while_a_reload_reads_it(monkeypatch, planted):
    """The pool has room for one microbatch. The second offload starts before the first reload has ended."""
    if planted:
        monkeypatch.setattr(CudaChannel, "start", start_before_earlier_copies_end)
    with Streams() as gpu:
        engine = engine_on_streams(budget=512, timed=True)
        with engine.step():
            outputs = {}
            for key in range(2):
                weight = torch.ones(100, requires_grad=True)
                with engine.capture(key):
                    outputs[key] = (torch.randn(100) * weight).sum()
            engine.offload(0)
            engine.wait(0)
            engine.reload(0)
            engine.offload(1)
            engine.wait(1)
            engine.reload(1)
            for key in range(2):
                engine.wait(key)
                outputs.pop(key).backward()
            assert [stall.seconds for stall in engine.statistics().stalls] == [1e-3] * 4
        engine.close()
    assert gpu.kinds() == ({"race"} if planted else set())


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_is_emptied_while_another_stream_reads_it_is_found(recorded):
    with Streams() as gpu:
        other, emptied = Stream(), torch.ones(4)
        other.wait_stream(gpu.compute)
        with torch.cuda.stream(other):
            emptied.sum()
        if recorded:
            emptied.record_stream(other)
        emptied.untyped_storage().resize_(0)
        torch.ones(4)  # may take its place
    assert gpu.kinds() == (set() if recorded else {"free"})


class SharedExpert(torch.nn.Module):
    """A layer whose second branch runs on a stream of its own, as Megatron's with --moe-shared-expert-overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatch, self.expert, self.up, self.down = (torch.nn.Linear(16, 16, bias=False) for _ in range(4))
        self.stream = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        dispatched = self.dispatch(x)
        with torch.cuda.stream(self.stream):
            shared = self.down(torch.nn.functional.gelu(self.up(x)))
        routed = self.expert(dispatched)
        torch.cuda.current_stream().wait_stream(self.stream)
        return routed + shared


def offload_shared_experts() -> None:
    model = torch.nn.Sequential(SharedExpert(), SharedExpert())
    engine = engine_on_streams(permanent=model.parameters())
    with engine.step():
        outputs = {}
        for key in range(3):
            x = torch.randn(8, 16).requires_grad_()
            with engine.capture(key):
                outputs[key] = model(x)
            engine.stay(key, [x, outputs[key]])
            engine.offload(key)
            engine.wait(key)
        for key in range(3):
            engine.reload(key)
            engine.wait(key)
            outputs.pop(key).sum().backward()
    engine.close()


def test_reloaded_activations_on_another_stream_are_not_freed_early(gpu):
    offload_shared_experts()


def test_without_a_record_they_would_be(monkeypatch):
    monkeypatch.setattr(CudaChannel, "use", no_wait)
    with Streams() as gpu:
        offload_shared_experts()
    assert gpu.kinds() == {"free"}


class Collectives:
    """What the vocabulary passes ask of ``torch.distributed``, on the stream of the group."""

    def get_global_rank(self, group: Group, rank: int) -> int:
        return rank

    def broadcast(self, tensor, source, group, async_op):
        sends = group.rank() == source
        return group.post([tensor] * sends, [tensor] * (not sends), "broadcast")

    def all_gather_into_tensor(self, everyones, own, group, async_op):
        return group.post([own], [everyones], "all_gather_into_tensor")

    def all_gather(self, parts, own, group, async_op):
        return group.post([own], parts, "all_gather")

    def reduce(self, tensor, destination, group, async_op):
        return group.post([], [tensor], "reduce")


VOCABULARY = [
    vocabulary_model.Case(50, 4, tied=tied, microbatches=3, options=HeadOptions(barriers=barriers))
    for tied, barriers in product((False, True), (1, 2))
]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("case", VOCABULARY)
def test_vocabulary_passes(gpu, monkeypatch, case, rank):
    monkeypatch.setattr(collectives, "dist", Collectives())
    vocabulary_model.run_rank(case, Group("vocabulary", rank, 4))


def test_a_vocabulary_collective_that_is_not_waited_for_is_found(monkeypatch):
    monkeypatch.setattr(collectives, "dist", Collectives())
    monkeypatch.setattr(collectives.Arriving, "wait", lambda arriving: arriving.tensor)
    with Streams() as gpu:
        vocabulary_model.run_rank(VOCABULARY[0], Group("vocabulary", 1, 4))
    assert "race" in gpu.kinds()
