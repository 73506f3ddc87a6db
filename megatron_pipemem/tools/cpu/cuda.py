"""A ``torch.cuda`` that needs no GPU and answers requests for CUDA tensors with CPU tensors.

There is one device per local rank. Streams and events are always complete, because CPU tensors are ready when the call
that makes them returns. Profilers and the recorder of allocations can be switched on, and see nothing of a device.
Functions that are not listed here (CUDA graphs, memory pools) keep PyTorch's own behaviour and report that CUDA is
missing.

Functions are replaced one by one. PyTorch's TorchFunctionMode would not work: it acts on one thread and is suspended
during a backward pass, so recomputation and custom gradients would still call CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors

CAPABILITY = (8, 0)  # the oldest generation with bfloat16; newer ones switch on kernels without a CPU form


class HostStream:
    """Replaces ``torch.cuda.Stream``. Its work is done as soon as the call that issues it returns."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: HostStream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Replaces ``torch.cuda.Event`` by a time of the host's clock. It is always complete."""

    def __init__(self, *_: Any, **__: Any):
        self._seconds = 0.0

    def record(self, stream: HostStream | None = None) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, stream: HostStream | None = None) -> None: ...

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return 1000.0 * (end_event._seconds - self._seconds)


class _Device:
    """The present device index and stream of ``torch.cuda``."""

    def __init__(self) -> None:
        self.index = 0
        self.default_stream = HostStream()
        self.stream = self.default_stream

    @property
    def count(self) -> int:
        """The number of ranks on this machine, ``LOCAL_WORLD_SIZE`` or 1.

        It is read at every use, because processes may be forked after `install`.
        """
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def set_index(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:  # torch.cuda ignores negative indices too
            self.index = index

    def set_stream(self, stream: HostStream | None) -> None:
        self.stream = stream or self.default_stream

    @contextlib.contextmanager
    def use_stream(self, stream: HostStream | None):
        previous = self.stream
        self.set_stream(stream or previous)
        try:
            yield
        finally:
            self.stream = previous


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def _nothing(*_: Any, **__: Any) -> None: ...


def _zero(*_: Any, **__: Any) -> int:
    return 0


class _GraphSafeGenerator:
    """The CPU's generator, with the states that only generators of CUDA have.

    A state is a generator of its own. It advances with the numbers that are drawn while it is set, as on a GPU.
    """

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._state = generator.clone_state()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def graphsafe_get_state(self) -> torch.Generator:
        self._state.set_state(self._generator.get_state())
        return self._state

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self._state.set_state(self._generator.get_state())
        self._state = state
        self._generator.set_state(state.get_state())


class _Generators(Sequence[torch.Generator]):
    """A sequence of random generators with one entry per device, each the CPU's generator."""

    def __init__(self, generator: _GraphSafeGenerator, device: _Device):
        self._generator = generator
        self._device = device

    def __len__(self) -> int:
        return self._device.count

    def __getitem__(self, index: Any) -> Any:
        return ((self._generator,) * len(self))[index]


def _install_surface() -> None:
    """Replace the functions and classes of ``torch.cuda`` and ``torch.accelerator`` that Megatron-Core calls."""
    device = _Device()
    generator = torch.default_generator  # CUDA's random state is the CPU's, because kernels here draw from it
    functions = {
        # devices
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda function, **_: function(),
        "device_count": lambda: device.count,
        "current_device": lambda: device.index,
        "set_device": device.set_index,
        "device": contextlib.nullcontext,
        "synchronize": _nothing,
        "ipc_collect": _nothing,
        "get_device_name": lambda *_: "CPU",
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": _properties,
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=_zero, cudaProfilerStop=_zero),
        "check_error": _nothing,
        # streams
        "Stream": HostStream,
        "Event": Event,
        "current_stream": lambda *_: device.stream,
        "default_stream": lambda *_: device.default_stream,
        "set_stream": device.set_stream,
        "stream": device.use_stream,
        "is_current_stream_capturing": lambda: False,
        # random numbers
        "default_generators": _Generators(_GraphSafeGenerator(generator), device),
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        # Lambdas, because TorchDynamo's table of torch functions refuses one object under two names.
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "initial_seed": lambda: generator.initial_seed(),
        # memory: PyTorch's CPU allocator has no statistics
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": lambda *_, **__: defaultdict(int),
        "mem_get_info": lambda *_: (_properties().total_memory,) * 2,
        **dict.fromkeys(
            (
                "memory_allocated",
                "max_memory_allocated",
                "memory_reserved",
                "max_memory_reserved",
                "device_memory_used",
            ),
            _zero,
        ),
    }
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, function in functions.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, function)
    nvtx: Any = torch.cuda.nvtx  # a module whose functions are replaced
    for name in ("range_push", "range_pop", "mark"):
        setattr(nvtx, name, _nothing)
    nvtx.range = contextlib.nullcontext
    profiler: Any = torch.autograd.profiler
    profiler.emit_nvtx = _ranges
    memory: Any = torch.cuda.memory
    memory._record_memory_history = _nothing
    memory._snapshot = lambda *_, **__: {"segments": [], "device_traces": []}
    bindings: Any = torch._C
    bindings._cuda_attach_out_of_memory_observer = _nothing

    # PyTorch's own code (data loaders, process groups) must know that there is no accelerator.
    torch.accelerator.is_available = lambda: False
    torch.accelerator.device_count = lambda: 0
    torch.accelerator.current_accelerator = lambda check_available=False: None

    # Eager, because torch.compile imports its compiler stack when it decorates, which takes seconds per rank.
    torch.compile = _eager


def _ranges(enabled: bool = True, record_shapes: bool = False) -> contextlib.AbstractContextManager:
    """Replace ``emit_nvtx`` by a profile that is dropped, so that code still sees that a profiler runs."""
    return torch.autograd.profiler.profile(enabled, record_shapes=record_shapes)


def _eager(model: Any = None, **_: Any) -> Any:
    """Replace ``torch.compile``, as a function or decorator, by returning the model uncompiled."""
    return model if model is not None else lambda function: function


_CPU = torch.device("cpu")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _is_cuda(device: Any) -> bool:
    """Return whether ``device`` names a CUDA device: an index, ``"cuda[:i]"`` or a `torch.device` of CUDA."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that makes tensors, so that it makes pageable CPU tensors instead of CUDA or pinned ones."""

    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return create(*args, **kwargs)

    return wrapper


def _to(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(to)
    def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(tensor, *(_CPU if _is_cuda(argument) else argument for argument in args), **kwargs)

    return _on_cpu(wrapper)


def _type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` to return names like ``torch.cuda.FloatTensor``, and to accept them for a conversion.

    Megatron's optimizers sort parameters by these names.
    """

    @functools.wraps(type_of)
    def wrapper(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_of(tensor).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return type_of(tensor, dtype, *args, **kwargs)

    return wrapper


def _itself(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


def _install_redirections() -> None:
    """Make tensor factories, tensor methods and ``Module.cuda`` use the CPU, in all threads until the process ends."""
    factories = _device_constructors()  # cached by PyTorch, which keeps the originals
    for name, function in list(vars(torch).items()):
        if name in _LIKE or (callable(function) and function in factories):
            setattr(torch, name, _on_cpu(function))
    tensors: Any = torch.Tensor  # classes whose methods are replaced
    modules: Any = torch.nn.Module
    for name in _METHODS:
        setattr(tensors, name, _on_cpu(getattr(tensors, name)))
    tensors.to = _to(tensors.to)
    tensors.type = _type(tensors.type)
    tensors.cuda = tensors.pin_memory = modules.cuda = _itself
    tensors.record_stream = lambda tensor, stream: None


def install() -> None:
    """Replace ``torch.cuda``, and make CUDA tensors CPU tensors, in all threads until the process ends."""
    _install_surface()
    _install_redirections()
