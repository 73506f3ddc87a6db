"""A stream sanitizer for CPU ranks: finds uses of a tensor that would be a race, or would come too late, on a GPU.

Tensors stay on the host and every operation runs at once. Streams and events are vector clocks. The sanitizer notes every
operation that reaches the dispatcher, with the current stream. A storage knows its last write and its reads. It reports

* ``race``: a use that is not ordered after another stream's write, or a write that is not ordered after a read;
* ``free``: a storage is freed or emptied after another stream than its home stream has used it, without
  ``record_stream``, and the home stream goes on without being ordered after that use. The caching allocator may have
  given the memory to a new tensor.

It also counts memory that comes back ``late``: a stream was recorded for it, as NCCL does for the tensors of messages. The
caching allocator records an event when such memory is freed, and reuses it when the host sees the event done.

``torch.cuda._sanitizer`` finds races on a GPU. Nothing in PyTorch finds memory that is freed too early.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TOUCHES_NOTHING = {
    "aten::alias",
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::set_",
}

BRINGS_A_VALUE = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}

# The engine sums the gradients of a tensor between nodes, with events between the streams.
SUMS_OF_GRADIENTS = {"aten::add", "aten::add_"}

Clock = dict["Stream", int]


def merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


def tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in lists, tuples and dicts. PyTorch's ``tree_leaves`` would take most of the time of a test."""
    tensors, values = [], [value]
    for member in values:  # it grows meanwhile
        if isinstance(member, torch.Tensor):
            tensors.append(member)
        elif isinstance(member, (tuple, list)):
            values.extend(member)
        elif isinstance(member, dict):
            values.extend(member.values())
    return tensors


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Event:
    """Stands for ``torch.cuda.Event``. It is never done when the host asks, which is as late as it may be."""

    def __init__(self, *_, **__):
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or Streams.active.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        merge((stream or Streams.active.current).clock, self.clock)

    def query(self) -> bool:
        Streams.active.asked["events"] += 1
        return False

    def synchronize(self) -> None:
        Streams.active.asked["synchronisation"] += 1
        merge(Streams.active.host, self.clock)

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, device: object = None, priority: int = 0, name: str = ""):
        gpu = Streams.active
        gpu.streams.append(self)
        self.name = name or f"stream {len(gpu.streams)}"
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        merge(self.clock, other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def tick(self) -> None:
        self.clock[self] = self.clock.get(self, 0) + 1

    def synchronize(self) -> None:
        Streams.active.asked["synchronisation"] += 1
        merge(Streams.active.host, self.clock)

    def __repr__(self) -> str:
        return self.name


class Use(NamedTuple):
    """One use of a part of a storage: its bytes, as a range, and its stream with that stream's clock."""

    begin: int
    end: int
    stream: Stream
    clock: Clock
    name: str

    def overlaps(self, other: Use) -> bool:
        return self.begin < other.end and other.begin < self.end

    def is_before(self, stream: Stream) -> bool:
        """Whether all that the stream does from here on is ordered after this use."""
        return stream.clock.get(self.stream, 0) >= self.clock[self.stream]


@dataclass
class Memory:
    """The uses of one storage that no later write has replaced."""

    key: int
    address: int
    alive: StorageWeakRef
    home: Stream
    origin: str
    writes: list[Use] = field(default_factory=list)
    reads: list[Use] = field(default_factory=list)
    recorded: set[Stream] = field(default_factory=set)

    def foreign_uses(self) -> list[Use]:
        """Return the uses that may still run when all recorded streams have reached the point where they are now."""
        allowed = {self.home, *self.recorded}
        uses = (use for use in (*self.writes, *self.reads) if use.stream not in allowed)
        return [use for use in uses if not any(use.is_before(stream) for stream in self.recorded)]


class Streams(TorchDispatchMode):
    """Takes the place of ``torch.cuda``'s streams within its context.

    Attributes:
        findings: number of times of every ``(kind, description, place in our code)``.
        asked: number of times that the host has asked for a value or a state of the device, by what it has asked for.
        late: number of freed storages that a stream was recorded for, by the operation that made them and the stream.
    """

    active: Streams

    def __init__(self) -> None:
        super().__init__()
        Streams.active = self
        self.findings: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
        self.asked: Counter[str] = Counter()
        self.late: Counter[tuple[str, str]] = Counter()
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.compute = self.current = Stream(name="compute")
        self.used_in_backward: set[Stream] = set()
        self.in_node = True  # outside of the engine, there is no sum of gradients between nodes
        self._known: dict[int, Memory] = {}
        self._at: dict[int, Memory] = {}
        self._shared: dict[int, Memory] = {}  # those of them that another stream than their home stream has used
        self._freed: dict[Stream, list[tuple[str, list[Use], tuple[str, ...]]]] = {}
        self._patches = contextlib.ExitStack()

    def kinds(self) -> set[str]:
        return {kind for kind, _, _ in self.findings}

    def __enter__(self):
        replaced = {
            "Stream": Stream,
            "Event": Event,
            "stream": self.on,
            "current_stream": lambda *_: self.current,
            "synchronize": lambda *_: [stream.synchronize() for stream in self.streams],
        }
        for name, value in replaced.items():
            self._patches.enter_context(mock.patch.object(torch.cuda, name, value))
        self._patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", self._record_stream))
        tolist = torch.Tensor.tolist

        def asked_tolist(tensor: torch.Tensor) -> list:
            self.asked["values"] += 1
            return tolist(tensor)

        self._patches.enter_context(mock.patch.object(torch.Tensor, "tolist", asked_tolist))
        resize = torch.UntypedStorage.resize_

        def noted_resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            if nbytes == 0 and storage._cdata in self._known:
                self._free(storage._cdata)
            return resize(storage, nbytes)

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", noted_resize))
        engine = BackwardEngine(self, torch.autograd.Variable._execution_engine)
        self._patches.enter_context(mock.patch.object(torch.autograd.Variable, "_execution_engine", engine))
        self._patches.enter_context(BackwardStreams())
        return super().__enter__()

    def __exit__(self, *failure) -> None:
        super().__exit__(*failure)
        self._patches.close()

    @contextlib.contextmanager
    def on(self, stream: Stream | None):
        outer, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = outer

    @staticmethod
    def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        memory = Streams.active._known.get(key_of(tensor))
        if memory is not None:
            memory.recorded.add(stream)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because PyTorch would import its compiler, which takes longer than most tests."""
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # otherwise BackwardStreams would see the sanitizer's own operations
            return self._note(function, args, kwargs or {})

    def _note(self, function: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
        """Run an operation and note the memory that it uses."""
        inputs = tensors((args, kwargs))
        before = {key_of(tensor) for tensor in inputs}
        result = function(*args, **kwargs)
        name = function._schema.name
        if name in BRINGS_A_VALUE:
            self.asked["values"] += 1
        written = {
            key_of(tensor)
            for argument, value in zip(function._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors(value)
        }
        stream = self.current
        if not self.in_node and name in SUMS_OF_GRADIENTS:
            for tensor in inputs:
                self.order_after(stream, tensor)
        self._launch(stream)
        made = [tensor for tensor in tensors(result) if key_of(tensor) not in before]
        for tensor in made:
            if self._memory_of(tensor) is None:
                self._add(tensor, stream, name)
        if name in TOUCHES_NOTHING or function.is_view:
            return result
        for tensor in inputs:
            self._use(tensor, stream, key_of(tensor) in written, name)
        for tensor in made:
            self._use(tensor, stream, True, name)
        return result

    def order_after(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Make a stream wait for all that has written to the tensor's storage, as autograd's engine does."""
        memory = self._known.get(key_of(tensor))
        for use in memory.writes if memory is not None else ():
            merge(stream.clock, use.clock)

    def communicate(self, stream: Stream, reads: list[torch.Tensor], writes: list[torch.Tensor], name: str) -> None:
        """Let a communication stream use tensors, after all that the current stream has done."""
        stream.wait_stream(self.current)
        self._launch(stream)
        for tensors, does_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._use(tensor, stream, does_write, name)

    def _launch(self, stream: Stream) -> None:
        self._note_freed()
        merge(stream.clock, self.host)
        stream.tick()
        # From here on, this stream may write to any memory of its own that has been freed.
        for origin, uses, where in self._freed.pop(stream, ()):
            for use in uses:
                if not use.is_before(stream):
                    description = f"{origin} of {stream}: {use.name} on {use.stream} may still run"
                    self.findings["free", description, where] += 1

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Return the memory of a tensor, also of an alias that has a storage of its own; ``None`` if it is new."""
        noted = self._known.get(key_of(tensor)), self._at.get(tensor.untyped_storage().data_ptr())
        return next((memory for memory in noted if memory is not None and not memory.alive.expired()), None)

    def _add(self, tensor: torch.Tensor, home: Stream, origin: str) -> Memory:
        storage = tensor.untyped_storage()
        memory = Memory(storage._cdata, storage.data_ptr(), StorageWeakRef(storage), home, origin)
        self._known[memory.key] = self._at[memory.address] = memory
        return memory

    def _use(self, tensor: torch.Tensor, stream: Stream, writes: bool, name: str) -> None:
        # Tensors that are not known were made before the sanitizer was switched on.
        memory = self._memory_of(tensor) or self._add(tensor, self.compute, "before")
        if tensor.numel() == 0:
            return
        if stream is not memory.home:
            self._shared[memory.key] = memory
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin, size = int(tensor.storage_offset()), tensor.element_size()
        use = Use(begin * size, (begin + last + 1) * size, stream, dict(stream.clock), name)
        for earlier in memory.writes:
            if earlier.overlaps(use) and not earlier.is_before(stream):
                self._race(f"{name} on {stream} after {earlier.name} on {earlier.stream}")
        if not writes:
            memory.reads.append(use)
            return
        for earlier in memory.reads:
            if earlier.overlaps(use) and not earlier.is_before(stream):
                self._race(f"{name} on {stream} overwrites the input of {earlier.name} on {earlier.stream}")
        for uses in (memory.writes, memory.reads):
            uses[:] = [tensor for tensor in uses if tensor.begin < use.begin or tensor.end > use.end]
        memory.writes.append(use)

    def _note_freed(self) -> None:
        for key in [key for key, memory in self._shared.items() if memory.alive.expired()]:
            self._free(key)

    def _free(self, key: int) -> None:
        memory = self._known.pop(key)
        self._shared.pop(key, None)
        if self._at.get(memory.address) is memory:
            del self._at[memory.address]
        for recorded in memory.recorded - {memory.home}:
            self.late[memory.origin, recorded.name] += 1
        if uses := memory.foreign_uses():
            self._freed.setdefault(memory.home, []).append((memory.origin, uses, _place()))

    def _race(self, description: str) -> None:
        self.findings["race", description, _place()] += 1


def _place() -> tuple[str, ...]:
    lines = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe()))
    ours = (f"{name.rsplit('/', 1)[-1]}:{line}" for name, line in lines if "megatron_pipemem" in name)
    return tuple(islice(ours, 3))[::-1]


class BackwardStreams(TorchFunctionMode):
    """Makes autograd run a node's backward on the stream of its forward, after the work that its gradients come from."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # Of a custom function, only what uses its output next is seen here.
        for tensor in tensors((args, kwargs, result)):
            if tensor.grad_fn is not None and "stream" not in tensor.grad_fn.metadata:
                _run_on(tensor.grad_fn, Streams.active.current)
        return result


def _run_on(node: torch.autograd.graph.Node, stream: Stream) -> None:
    gpu = Streams.active
    node.metadata["stream"] = stream

    def before(gradients) -> None:
        gpu.current, gpu.in_node = stream, True
        gpu.used_in_backward.add(stream)
        for gradient in tensors(gradients):
            gpu.order_after(stream, gradient)
            gradient.record_stream(stream)

    def after(inputs, outputs) -> None:
        gpu.in_node = False

    node.register_prehook(before)
    node.register_hook(after)


class BackwardEngine:
    """Calls autograd's engine, and returns to the caller's stream after all streams that the backward has used."""

    def __init__(self, gpu: Streams, engine):
        self._gpu, self._engine = gpu, engine

    def run_backward(self, *args, **kwargs):
        gpu = self._gpu
        caller, outer = gpu.current, gpu.in_node
        gpu.in_node = False
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            gpu.current, gpu.in_node = caller, outer
            for stream in gpu.used_in_backward:
                caller.wait_stream(stream)
            gpu.used_in_backward.clear()

    def __getattr__(self, name: str):
        return getattr(self._engine, name)


class Work:
    """Stands for ``dist.Work`` of NCCL: ``wait`` makes the current stream wait, and holds the tensors until then."""

    def __init__(self, stream: Stream, held: list[torch.Tensor]):
        self._event, self._held = stream.record_event(), held

    def wait(self) -> None:
        self._event.wait()
        self._held = []

    def is_completed(self) -> bool:
        Streams.active.asked["departures of messages"] += 1
        return False


class Group:
    """Stands for an NCCL process group: it has one stream, and starts after the stream that is current at a call."""

    def __init__(self, name: str, rank: int = 0, size: int = 2):
        self._stream, self._rank, self._size = Stream(name=name), rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def post(self, reads: list[torch.Tensor], writes: list[torch.Tensor], name: str) -> Work:
        Streams.active.communicate(self._stream, reads, writes, name)
        return Work(self._stream, [*reads, *writes])

    def send(self, sent: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._recorded(self.post(sent, [], "send"), sent)

    def recv(self, received: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._recorded(self.post([], received, "recv"), received)

    def _recorded(self, work: Work, tensors: list[torch.Tensor]) -> Work:
        """Record the stream of the group for a message, which the allocator ignores for memory that is not its own."""
        for tensor in tensors:
            if is_of_allocator(tensor):
                tensor.record_stream(self._stream)
        return work


def is_of_allocator(tensor: torch.Tensor) -> bool:
    """Return whether PyTorch's allocator frees the memory of a tensor. An alias by ``from_dlpack`` has another owner."""
    return tensor.untyped_storage().resizable()
