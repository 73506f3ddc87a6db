"""The order of copies on GPU streams, on streams that are simulated: as late as they may, or whenever chance has it.

The copies run on memory of this host, but only when the simulated streams and events allow it. Computing happens at once; that
a copy waits for it is checked when the copy is enqueued. A tensor that is freed before its copy has run is caught.
"""

from __future__ import annotations

import contextlib
import random
import weakref

import pytest

torch = pytest.importorskip("torch")

from offload_blocks import MIN_BYTES, batch, offloaded_gradients, plain_gradients, saved_bytes, stack  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from megatron_pipemem.features.offload.runtime.channels import CudaChannel, Direction  # noqa: E402
from megatron_pipemem.features.offload.runtime.engine import OffloadEngine  # noqa: E402
from megatron_pipemem.features.offload.runtime.host import HostPool  # noqa: E402

LENGTHS = (12, 5, 12, 9, 12)


class Race(Exception):
    """What would be a race, or memory freed too early, on a GPU."""


class Event:
    def __init__(self, gpu: Gpu):
        self.gpu, self.fired, self.computed = gpu, False, 0

    def record(self, stream: Stream) -> None:
        stream.enqueue(self._fire)
        self.computed = self.gpu.computed if stream is self.gpu.compute else 0

    def _fire(self) -> bool:
        self.fired = True
        return True

    def query(self) -> bool:
        self.gpu.by_chance()
        return self.fired

    def synchronize(self) -> None:
        self.gpu.run_until(self)

    def elapsed_time(self, later: Event) -> float:
        return 1.5


class Stream:
    def __init__(self, gpu: Gpu):
        self.gpu, self.queue, self.after_computing = gpu, [], 0

    def enqueue(self, work) -> None:
        if self is self.gpu.compute:
            assert work()
        else:
            self.queue.append(work)
        self.gpu.by_chance()

    def wait_event(self, event: Event) -> None:
        if self is self.gpu.compute:
            self.gpu.run_until(event)
        else:
            self.after_computing = max(self.after_computing, event.computed)
            self.enqueue(lambda: event.fired)

    def advance(self) -> bool:
        if self.queue and self.queue[0]():
            del self.queue[0]
            return True
        return False

    def synchronize(self) -> None:
        while self.queue:
            assert any([stream.advance() for stream in self.gpu.lanes]), "the streams wait for each other"


class Gpu(TorchFunctionMode):
    """Takes the place of ``torch.cuda``, and of every copy that is not on the compute stream."""

    def __init__(self, seed: int | None):
        super().__init__()
        self.chance = None if seed is None else random.Random(seed)
        self.computed, self.lanes = 0, []
        self.compute = self.current = Stream(self)

    def install(self, monkeypatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.lanes.append(Stream(self)) or self.lanes[-1])
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextlib.contextmanager
    def on(self, stream: Stream):
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def run_until(self, event: Event) -> None:
        while not event.fired:
            assert any([stream.advance() for stream in self.lanes]), "the streams wait for each other"

    def by_chance(self) -> None:
        if self.chance is not None:
            for stream in self.chance.sample(self.lanes, len(self.lanes)):
                while self.chance.random() < 0.4 and stream.advance():
                    pass

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if self.current is self.compute:
            self.computed += 1
            return function(*args, **(kwargs or {}))
        assert function is torch.Tensor.copy_ and kwargs == {"non_blocking": True}
        if self.current.after_computing < self.computed:
            raise Race("a copy does not wait for what has been computed")
        references = [weakref.ref(tensor) for tensor in args]

        def copy() -> bool:
            destination, source = (reference() for reference in references)
            if destination is None or source is None:
                raise Race("memory was freed before its copy has run")
            with torch._C.DisableTorchFunction():
                destination.copy_(source)
            return True

        self.current.enqueue(copy)
        return args[0]


def engine_on(gpu: Gpu, channel: CudaChannel, budget: int, **options) -> OffloadEngine:
    channel.device = torch.device("cpu")
    pool = HostPool(budget, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), 1 << 12)
    return OffloadEngine(channel, pool, min_bytes=MIN_BYTES, **options)


def train(gpu: Gpu, channel: CudaChannel, guard: bool = False) -> None:
    """Two steps with hardly any host memory to spare, gradients compared."""
    model = stack()
    batches = [batch(i, length, torch.float32) for i, length in enumerate(LENGTHS)]
    expected, sizes = plain_gradients(model, batches), [saved_bytes(model, x) for x in batches]
    engine = engine_on(gpu, channel, 1 << (sum(sizes) - 1).bit_length(), permanent=model.parameters(), guard=guard)
    with gpu:
        for _ in range(2):
            with engine.step():
                gradients = offloaded_gradients(model, engine, batches)
                seen = engine.statistics()
        engine.close()
    if not all(map(torch.equal, gradients, expected)):
        raise Race("other gradients")
    assert seen.bytes_out == seen.bytes_in == sum(sizes)
    assert [stall.seconds for stall in seen.stalls] == ([1.5e-3] * (2 * len(batches)) if channel._timed else [])


@pytest.mark.parametrize(("guard", "timed"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("seed", [None, *range(10)])
def test_any_legal_timing_gives_the_same_gradients(monkeypatch, seed, guard, timed):
    gpu = Gpu(seed)
    gpu.install(monkeypatch)
    train(gpu, CudaChannel(torch.device("cuda", 0), timed), guard)


class NotAfterComputing(CudaChannel):
    def start(self, direction, copies, after):
        stream = self._lanes[direction]
        with torch.cuda.stream(stream):
            for copy in copies:
                copy.destination.copy_(copy.source, non_blocking=True)
        return super().start(direction, [], after)


class NotWaitedFor(CudaChannel):
    """Computing is not ordered after the copies of one direction."""

    direction: Direction

    def start(self, direction, copies, after):
        ticket = super().start(direction, copies, after)
        object.__setattr__(ticket, "direction", direction)
        return ticket

    def join(self, ticket, on_stall):
        if ticket.direction is not self.direction:
            super().join(ticket, on_stall)


class OffloadNotWaitedFor(NotWaitedFor):
    direction = Direction.OUT


class ReloadNotWaitedFor(NotWaitedFor):
    direction = Direction.IN


@pytest.mark.parametrize("broken", [NotAfterComputing, OffloadNotWaitedFor, ReloadNotWaitedFor])
def test_the_simulation_notices_what_it_is_for(monkeypatch, broken):
    gpu = Gpu(None)
    gpu.install(monkeypatch)
    with pytest.raises(Race):
        train(gpu, broken(torch.device("cuda", 0)))


class NotAfterEarlier(CudaChannel):
    def start(self, direction, copies, after):
        return super().start(direction, copies, ())


@pytest.mark.parametrize("channel", [CudaChannel, NotAfterEarlier])
def test_host_memory_is_not_overwritten_while_a_reload_reads_it(monkeypatch, channel):
    """The pool has room for one, and nobody waits for the first reload before the second offload is started."""

    def run(seed: int) -> None:
        gpu = Gpu(seed)
        gpu.install(monkeypatch)
        engine = engine_on(gpu, channel(torch.device("cuda", 0)), 512)
        weights = [torch.ones(100, requires_grad=True) for _ in range(2)]
        with gpu, engine.step():
            outputs = {}
            for key, weight in enumerate(weights):
                with engine.capture(key):
                    outputs[key] = (torch.arange(100.0) * (key + 1) * weight).sum()
            engine.offload(0)
            engine.wait(0)
            engine.reload(0)
            engine.offload(1)
            engine.wait(1)
            engine.reload(1)
            for key in (0, 1):
                engine.wait(key)
                outputs.pop(key).backward()
        for key, weight in enumerate(weights):
            if not torch.equal(weight.grad, torch.arange(100.0) * (key + 1)):
                raise Race("other gradients")

    if channel is CudaChannel:
        for seed in range(40):
            run(seed)
    else:
        with pytest.raises(Race):
            for seed in range(40):
                run(seed)
