"""CUDA graphs on the CPU: capture records PyTorch's operators, and replay runs them again on the same memory.

A capture takes memory from its pool, and memory that is given back to the pool is used by later captures, as on a GPU. So a
replay overwrites the tensors of earlier graphs, and a wrong order of replays gives wrong values. Before a replay, the memory of
its results is filled with NaN. The memory is restored at the end of a capture, because a GPU computes nothing while it
captures. Reading a value on the host raises, as on a GPU.

A replay draws random numbers from the states of the generator that were set at the capture, and advances them. A capture
leaves them as they were. Drawing from a state that is neither the first one nor registered raises, as on a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_ON_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default}
_handles = itertools.count(1)


class Pool:
    """Memory that captures share. Free blocks are kept by size, and the one freed last is taken first."""

    def __init__(self) -> None:
        self.free: dict[int, list[np.ndarray]] = defaultdict(list)
        self.reused = 0
        """Blocks that a second tensor has taken."""
        self.blocks: dict[int, np.ndarray] = {}
        """All blocks, by address."""

    def tensor_like(self, tensor: torch.Tensor, taken: dict[int, np.ndarray | int]) -> torch.Tensor:
        """Return a tensor of the same format in this pool. When its storage ends, its block is free again.

        Note in ``taken`` what its block held before; 255, which is no number, for a new block.
        """
        size = max(tensor.untyped_storage().nbytes(), 1)
        free = self.free[size]
        self.reused += bool(free)
        block = free.pop() if free else np.zeros(size, dtype=np.uint8)
        address = block.ctypes.data
        taken.setdefault(address, block.copy() if address in self.blocks else 255)
        self.blocks[address] = block
        owner = np.frombuffer(block, dtype=np.uint8)
        weakref.finalize(owner, free.append, block).atexit = False
        return _formatted(torch.from_numpy(owner), tensor)

    def in_use(self) -> set[int]:
        """Return the addresses of blocks that hold a tensor."""
        return self.blocks.keys() - {block.ctypes.data for blocks in self.free.values() for block in blocks}

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.blocks


def _formatted(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not like.untyped_storage().nbytes():
        return torch.empty_like(like)
    return memory.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def _weak_reference(address: int, shape: tuple[int, ...], typestr: str) -> torch.Tensor:
    """Return a tensor at an address, which keeps no memory alive."""
    form = np.dtype(typestr)
    size = int(np.prod(shape)) * form.itemsize
    memory = (ctypes.c_byte * size).from_address(address) if size else b""
    return torch.from_numpy(np.frombuffer(memory, dtype=form).reshape(shape))


def _alias(tensor: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Return a tensor on the same memory that keeps no block of the pool in use."""
    if not pool.owns(tensor):
        return tensor.detach()
    storage = tensor.untyped_storage()
    memory = torch.frombuffer((ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    return _formatted(memory, tensor)


def discard(storage: torch.UntypedStorage, size: int) -> None:
    """Replaces ``UntypedStorage.resize_``. Memory of a pool, which has no other size, loses its values from here on."""
    if any(storage.data_ptr() in pool.blocks for pool in CUDAGraph.pools.values()):
        assert size == 0, "no tensor of a graph becomes larger"
        _bytes_of(storage).fill_(255)
    else:
        _RESIZE(storage, size)


def restore(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Replaces Megatron's function that gives a discarded tensor the memory of ``source``. Here it gets the values."""
    storage, values = tensor.untyped_storage(), source.untyped_storage()
    if not storage.nbytes():
        storage.resize_(values.nbytes())
    _bytes_of(storage).copy_(_bytes_of(values))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the memory of a storage as a tensor that autograd does not know."""
    return torch.frombuffer((ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)


_RESIZE = torch.UntypedStorage.resize_


def _generator_state() -> torch.Generator:
    """Return the state that random numbers advance."""
    generators = torch.cuda.default_generators  # none in a process without a CUDA in its place
    return generators[0].graphsafe_get_state() if generators else torch.default_generator


@contextmanager
def _drawing_from(state: torch.Generator) -> Iterator[None]:
    before = _generator_state()
    if state is before:
        yield
        return
    torch.cuda.default_generators[0].graphsafe_set_state(state)
    yield
    torch.cuda.default_generators[0].graphsafe_set_state(before)


class _Capture(TorchDispatchMode):
    def __init__(self, pool: Pool, registered: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.pool = pool
        self.generators = {state: state.get_state() for state in (_generator_state(), *registered)}
        self.calls: list[Callable[[], None]] = []
        self.results: list[torch.Tensor] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_use = pool.in_use()
        self._taken: dict[int, np.ndarray | int] = {}
        """values of blocks before this capture took them, by address"""

    def undo(self) -> None:
        """Give all memory the values that it had before; new blocks have those of no number."""
        for address, values in self._taken.items():
            self.pool.blocks[address][:] = values
        self._taken.clear()
        # Last, because the capture may have written into a block of an earlier graph before it gave the block back and took it.
        for tensor, before in self.before.values():
            tensor.copy_(before)
        self.before.clear()
        for state, values in self.generators.items():
            with _drawing_from(state):
                torch.set_rng_state(values)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in _ON_HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {operator}")
        state = _generator_state() if torch.Tag.nondeterministic_seeded in operator.tags else None
        if state is not None and state not in self.generators:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        arguments = (args, kwargs or {})
        given: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, given.append, arguments)
        if communicates := operator.namespace == "c10d":  # its schemas do not say what is written
            tree_map_only(torch.Tensor, self._keep_tensor, arguments)
        elif operator._schema.is_mutable:
            self._keep(operator, arguments)
        aliases = tree_map_only(torch.Tensor, lambda tensor: _alias(tensor, self.pool), arguments)
        result = _finished(operator(*args, **(kwargs or {})))
        storages = {tensor.untyped_storage().data_ptr() for tensor in given}
        new: list[tuple[int, torch.Tensor]] = []

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() in storages:
                return tensor
            mine = self.pool.tensor_like(tensor, self._taken).copy_(tensor)
            new.append((len(new), _alias(mine, self.pool)))
            return mine

        result = tree_map_only(torch.Tensor, placed, result)
        if (new or communicates or operator._schema.is_mutable) and operator not in _EMPTY:
            again = partial(_again, operator, aliases, [alias for _, alias in new], storages)
            self.calls.append(again if state is None else partial(_within, state, again))
        # Memory of an earlier graph that this one gives back, and takes again, has values that it reads before.
        self.results += [alias for _, alias in new if alias.untyped_storage().data_ptr() not in self._in_use]
        return result

    def _keep(self, operator: Any, arguments: tuple) -> None:
        """Remember the values of tensors that the operator is about to write."""
        args, kwargs = arguments
        for position, described in enumerate(operator._schema.arguments):
            if described.alias_info is None or not described.alias_info.is_write:
                continue
            value = kwargs.get(described.name, args[position] if position < len(args) else None)
            tree_map_only(torch.Tensor, self._keep_tensor, value)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.before.keys() | self._taken.keys():
            whole = _alias(torch.empty(0, dtype=torch.uint8).set_(storage), self.pool)
            self.before[storage.data_ptr()] = whole, whole.clone()


def _again(operator: Any, aliases: tuple, results: list[torch.Tensor], known: set[int]) -> None:
    args, kwargs = aliases
    made: list[torch.Tensor] = []
    returned = _finished(operator(*args, **kwargs))
    tree_map_only(torch.Tensor, made.append, returned)
    fresh = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in known]
    for kept, tensor in zip(results, fresh, strict=True):
        kept.copy_(tensor)


def _within(state: torch.Generator, call: Callable[[], None]) -> None:
    with _drawing_from(state):
        call()


def _finished(result: Any) -> Any:
    """Wait for the messages among the results of an operator, and return works that have ended in their place.

    On a GPU, messages wait for each other on streams. Here the host waits at once, which needs their order to be that of one
    hardware queue. Some waits of gloo run operators, such as a copy of what arrived, which a capture must not record.
    """

    def finish(work: torch.ScriptObject) -> torch.ScriptObject:
        Work.unbox(work).wait()
        ended: torch.futures.Future = torch.futures.Future()
        ended.set_result(None)
        return _create_work_from_future(ended).boxed()

    return tree_map_only(torch.ScriptObject, finish, result)


class CUDAGraph:
    """Replaces ``torch.cuda.CUDAGraph``."""

    pools: dict[Any, Pool] = {}
    counts: Counter[str] = Counter()
    """Captures and replays of all graphs of the process."""
    is_capturing = False

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: _Capture | None = None
        self._registered: list[torch.Generator] = []

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        self._capture = _Capture(self.pools.setdefault(pool or next(_handles), Pool()), self._registered)
        self._capture.__enter__()
        CUDAGraph.is_capturing = True

    def capture_end(self) -> None:
        CUDAGraph.is_capturing = False
        self._capture.__exit__(None, None, None)
        self._capture.undo()
        self.counts["captures"] += 1

    def replay(self) -> None:
        with torch.no_grad():
            for tensor in self._capture.results:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
            for call in self._capture.calls:
                call()
        self.counts["replays"] += 1

    def reset(self) -> None:
        self._capture = None

    def register_generator_state(self, state: torch.Generator) -> None:
        """Let captures draw from a state."""
        self._registered.append(state)


def _as_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces ``torch.as_tensor``: on a GPU, it takes the memory of whatever has a CUDA array interface."""
    interface = None if isinstance(data, torch.Tensor) else getattr(data, "__cuda_array_interface__", None)
    if interface is None:
        return _AS_TENSOR(data, *args, **kwargs)
    return _weak_reference(interface["data"][0], interface["shape"], interface["typestr"])


_AS_TENSOR = torch.as_tensor


def install() -> None:
    """Replace CUDA graphs in PyTorch. Call it before Transformer Engine is imported."""
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = CUDAGraph
    torch.as_tensor = _as_tensor
    torch.UntypedStorage.resize_ = discard
    torch._C._host_emptyCache = lambda: None
    torch._C._graph_pool_handle = torch.cuda.graph_pool_handle = lambda: (next(_handles), 0)
