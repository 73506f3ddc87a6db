"""Copies by threads: their order, what waiting for them costs, and that a dead one is an error instead of a hang."""

from __future__ import annotations

import threading

import pytest
import torch
from refusals import refused

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.channels import (
    Copy,
    Direction,
    ThreadChannel,
)
from megatron_pipemem.features.offload.runtime.engine import OffloadEngine
from megatron_pipemem.features.offload.runtime.host import HostPool, measure_bandwidths


class Gated(ThreadChannel):
    """Every copy of a direction waits until that direction is open; notes when copies begin."""

    def __init__(self):
        self.open = {direction: threading.Event() for direction in Direction}
        self.begun: list[tuple[Direction, int]] = []
        self.failure: BaseException | None = None
        super().__init__()

    def pace(self, direction, nbytes):
        self.open[direction].wait()
        self.begun.append((direction, nbytes))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def channel():
    channel = Gated()
    yield channel
    for gate in channel.open.values():
        gate.set()
    channel.close()


def engine_on(channel: ThreadChannel, budget: int = 1 << 16) -> OffloadEngine:
    return OffloadEngine(channel, HostPool(budget, channel.host_memory), min_bytes=1)


def capture(engine: OffloadEngine, key, size: int):
    """A graph that holds ``size`` floats, and a function that gets the gradient they make."""
    weight = torch.ones(size, requires_grad=True)
    with engine.capture(key):
        output = (torch.arange(size, dtype=torch.float32) * weight).sum()

    def gradient() -> torch.Tensor:
        output.backward()
        return weight.grad

    return gradient


def test_a_copy_begins_after_those_it_is_told_to_follow(channel):
    first, second = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    channel.open[Direction.OUT].set()
    reading = channel.start(Direction.IN, [Copy(torch.empty_like(first), first)], ())
    writing = channel.start(Direction.OUT, [Copy(first, second)], (reading,))
    unrelated = torch.zeros(4, dtype=torch.uint8)
    assert not writing.query()
    channel.open[Direction.IN].set()
    channel.join(writing)
    assert channel.begun == [(Direction.IN, 4), (Direction.OUT, 4)] and reading.query()
    channel.join(channel.start(Direction.OUT, [Copy(unrelated, second)], ()))
    assert torch.equal(unrelated, second)


def test_directions_do_not_wait_for_each_other(channel):
    source, out, back = (torch.full((4,), i, dtype=torch.uint8) for i in range(3))
    blocked = channel.start(Direction.OUT, [Copy(out, source)], ())
    channel.open[Direction.IN].set()
    channel.join(channel.start(Direction.IN, [Copy(back, source)], ()))
    assert torch.equal(back, source) and not blocked.query()


def test_a_stall_says_what_was_waited_for(channel):
    engine = engine_on(channel)
    with engine.step():
        gradient = capture(engine, (0, 7), 100)
        engine.offload((0, 7))
        waiting = threading.Timer(0.05, channel.open[Direction.OUT].set)
        waiting.start()
        engine.wait((0, 7))
        channel.open[Direction.IN].set()
        engine.reload((0, 7))
        channel._queues[Direction.IN].put(None)  # ends the thread when the reload has ended
        channel._threads[Direction.IN].join()
        engine.wait((0, 7))
        seen = engine.statistics()
        assert torch.equal(gradient(), torch.arange(100.0))
    (stall,) = seen.stalls
    assert (stall.key, stall.direction, stall.nbytes) == ((0, 7), Direction.OUT, 400)
    assert seen.stall_seconds == stall.seconds > 0


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("failure", [ValueError("no such memory"), SystemExit(3)], ids=type)
def test_a_failed_copy_is_an_error_of_ours(channel, direction, failure):
    engine = engine_on(channel)
    for gate in channel.open.values():
        gate.set()
    with (
        refused("offload-thread", direction.value, type(failure).__name__, kind=OffloadError) as error,
        engine.step(),
    ):
        gradient = capture(engine, 0, 100)
        channel.failure = failure if direction is Direction.OUT else None
        engine.offload(0)
        engine.wait(0)
        channel.failure = failure
        engine.reload(0)
        engine.wait(0)
    assert error.value.__cause__ is failure
    assert (engine.device_bytes, engine.host_bytes) == (0, 0)
    assert gradient is not None


def test_a_failed_copy_that_nobody_waits_for_ends_the_step(channel):
    engine = engine_on(channel)
    channel.failure = ValueError("no such memory")
    channel.open[Direction.OUT].set()
    with refused("offload-thread", kind=OffloadError), engine.step():
        gradient = capture(engine, 0, 100)
        engine.offload(0)
    assert gradient is not None


@pytest.mark.parametrize("before", [True, False], ids=["before", "while waiting"])
def test_a_thread_that_is_gone_is_an_error_not_a_hang(channel, before):
    engine = engine_on(channel)
    with (
        refused("offload-thread", kind=OffloadError),
        engine.step(),
    ):
        gradient = capture(engine, 0, 100)
        channel.open[Direction.OUT].set()
        engine.offload(0)
        engine.wait(0)
        channel._queues[Direction.IN].put(None)
        if before:
            channel._threads[Direction.IN].join()
        engine.reload(0)
        engine.wait(0)
    assert gradient is not None


def test_bandwidths_are_measured_through_a_channel():
    """Here through the one that pretends one; a GPU's has the same interface."""
    channel = ThreadChannel(bandwidth=200e6)
    try:
        speeds = measure_bandwidths(channel, nbytes=1 << 20, repeats=1, matrix=16)
    finally:
        channel.close()
    assert set(speeds) == {"d2h", "h2d", "both", "d2h_computing", "h2d_computing", "both_computing"}
    assert all(0 < rate <= 210e6 for rate in speeds.values())
