"""Keep what a step of Megatron's optimizers changes, and put it back to the bit.

A step changes the optimizer's parameters (fp32 masters, or the model's own where those are fp32), their state (Adam's moments)
and its counters, which may stand in the parameter groups beside what the training loop sets there: learning rate, weight decay.
The model's 16-bit parameters follow from the masters, so nothing is kept of them.

With the distributed optimizer a rank keeps its share. Other ranks' shares of the model's parameters are right again when the
step that follows has gathered them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
)

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.runtime.offload.channel import Channel, Copy, Direction
from megatron_pipemem.runtime.offload.cuda_channel import CudaChannel
from megatron_pipemem.runtime.offload.host_channel import HostChannel
from megatron_pipemem.runtime.offload.host_memory import available_memory
from megatron_pipemem.runtime.offload.host_pool import ALIGNMENT, HostPool
from megatron_pipemem.schedule.core.memory_cap import format_bytes
from megatron_pipemem.schedule.options import AUTO

DEVICE, HOST = "device", "host"
MOMENTS = 2
"""Tensors of Adam's state, each as large as the parameter."""

_KNOWN = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
_SPARE = 1 << 30
"""Bytes of the device that ``auto`` leaves to others."""
_SEGMENT, _RUN = 1 << 28, 1 << 24
"""Bytes of host memory to take at a time, and to copy at a time: short runs leave little of a segment unused."""


class SnapshotBytes(NamedTuple):
    """Hold the bytes that a snapshot takes."""

    device: int
    host: int


class _Store(Protocol):
    """Copies of some tensors."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copies."""

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy tensors, which must not change before ``finish``."""

    def finish(self) -> None:
        """Order all later computing after the copies."""

    def put_back(self) -> None:
        """Give the tensors the values that were copied."""

    def close(self) -> None:
        """Give everything up."""


class Snapshot:
    """Keeps one state of an optimizer. Its memory is kept from step to step.

    Args:
        parts: what ``parts_of`` finds in the optimizer.
        store: where the copies are.
    """

    def __init__(self, parts: Sequence[MegatronOptimizer], store: _Store):
        self._parts = tuple(parts)
        self._store = store
        self._gathered = _gathered(self._parts)
        self._states: list[tuple[dict, torch.Tensor, dict | None]] = []
        self._groups: list[tuple[dict, dict]] = []
        self._begun: list[int] | None = None

    @classmethod
    def of(cls, optimizer: MegatronOptimizer, where: str) -> Snapshot:
        """Return an empty snapshot of an optimizer.

        Args:
            optimizer: Megatron's, also a chain of them.
            where: ``device``, ``host``, or ``auto`` for the device where the memory that it has left now is enough.

        Raises:
            UnsupportedError: the optimizer keeps something that nobody here knows of, or there is no memory for the snapshot.
        """
        parts = parts_of(optimizer)
        needed = _most_bytes(parts)
        if where == AUTO:
            where = DEVICE if needed + _SPARE <= torch.cuda.mem_get_info()[0] else HOST
        if where == DEVICE:
            return cls(parts, _OnDevice())
        if needed > (there := available_memory()):
            raise UnsupportedError(
                "host-memory",
                f"the state to roll a step back to takes {format_bytes(needed)} of host memory, and {format_bytes(there)} are "
                "left; drop --pipemem-overlap-steps, or pass --clip-grad 0, which needs no rollback",
            )
        device = next((tensor.device for tensor in _tensors(parts)), torch.device("cpu"))
        return cls(parts, _OnHost(CudaChannel(device, timed=False) if device.type == "cuda" else HostChannel()))

    @property
    def where(self) -> str:
        """Where the copies are: ``device`` or ``host``."""
        return DEVICE if isinstance(self._store, _OnDevice) else HOST

    @property
    def bytes(self) -> SnapshotBytes:
        """Return the bytes that the copies take."""
        nbytes = self._store.nbytes
        return SnapshotBytes(nbytes, 0) if self.where == DEVICE else SnapshotBytes(0, nbytes)

    def mirror(self) -> None:
        """Begin to copy the state to the host as it is, while others compute; ``forget`` it before anything changes it but
        ``take``. On the device a copy takes no time worth hiding.
        """
        if self.where == HOST:
            self._begin()

    def forget(self) -> None:
        """Forget what ``mirror`` has begun, because the state will change."""
        self._store.finish()
        self._begun = None

    def take(self) -> None:
        """Keep the state as it is. Whatever changes it afterwards on the current stream waits for that."""
        if self._begun is None or self._begun != self._versions():
            self.forget()
            self._begin()
        self._groups = hyperparameters(_groups(self._parts))
        self.forget()

    def _begin(self) -> None:
        self._states = [
            (store, parameter, dict(store[parameter]) if parameter in store else None)
            for store, parameter in _parameters(self._parts)
        ]
        self._begun = self._versions()
        self._store.start(list(_tensors(self._parts)))

    def _versions(self) -> list[int]:
        """Return what tells whether anybody has written to the state by PyTorch's means."""
        return [tensor._version for tensor in _tensors(self._parts)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was at ``take``. Gathers of parameters that are under way end before."""
        for chunk in self._gathered:
            for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if buckets.param_gather_handle is not None:
                    buckets.start_param_sync(force_sync=True)  # only waits
        for store, parameter, kept in self._states:
            if kept is None:
                store.pop(parameter, None)
            else:
                store[parameter] = dict(kept)
        for group, kept in self._groups:
            for name in group.keys() - kept.keys() - {"params"}:
                del group[name]
            group.update(kept)
        self._store.put_back()
        for part in self._parts:
            if isinstance(part, MixedPrecisionOptimizer):
                part._copy_main_params_to_model_params()

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Enclose the step that is taken in the place of the one since ``take``.

        It begins with the state of ``take``, with the learning rate of then. Behind it the parameter groups have again what
        the training loop has set since then, beside what the step has counted there; and all ranks have its parameters.
        """
        now = hyperparameters(_groups(self._parts))
        self.restore()
        yield
        for (group, then), (_, since) in zip(self._groups, now, strict=True):
            counted = {name for name in group if name != "params" and group[name] is not then.get(name)}
            group.update({name: value for name, value in since.items() if name not in counted})
        for chunk in self._gathered:
            # At once, because the hooks of forwards that would do it are off while the model is evaluated.
            chunk.start_param_sync(force_sync=True)

    def close(self) -> None:
        """Give the copies up."""
        self._store.close()
        self._states, self._groups, self._begun = [], [], None


def parts_of(optimizer: MegatronOptimizer) -> tuple[MegatronOptimizer, ...]:
    """Return the optimizers of a chain that have parameters on this rank.

    Raises:
        UnsupportedError: one of them is of a kind that keeps more than its parameters and their state.
    """
    if type(optimizer) is ChainedOptimizer:
        return tuple(part for each in optimizer.chained_optimizers for part in parts_of(each))
    inner = getattr(optimizer, "optimizer", None)
    if type(optimizer) not in _KNOWN or hasattr(inner, "sub_optimizers"):
        name = type(optimizer).__name__ if type(optimizer) not in _KNOWN else type(inner).__name__
        raise UnsupportedError(
            "no-rollback",
            f"steps of {name} cannot be rolled back, because it keeps more than parameters and their state; drop "
            "--pipemem-overlap-steps, or train with --optimizer adam or sgd on the device",
        )
    return () if optimizer.is_stub_optimizer else (optimizer,)


def _parameters(parts: Sequence[MegatronOptimizer]) -> Iterator[tuple[dict, torch.Tensor]]:
    """Yield every parameter behind the dictionary that has its state, if any."""
    for part in parts:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield part.optimizer.state, parameter


def _tensors(parts: Sequence[MegatronOptimizer]) -> Iterator[torch.Tensor]:
    """Yield everything that a step writes to: always in the same order, as far as it is there already."""
    for state, parameter in _parameters(parts):
        yield parameter.detach()
        yield from (value for value in state.get(parameter, {}).values() if isinstance(value, torch.Tensor))
    for _, group in hyperparameters(_groups(parts)):
        yield from (value for value in group.values() if isinstance(value, torch.Tensor))


def _most_bytes(parts: Sequence[MegatronOptimizer]) -> int:
    """Return the bytes of a snapshot; before the first step, when there is no state, as of Adam."""
    parameters = sum(parameter.nbytes for _, parameter in _parameters(parts))
    return max(sum(tensor.nbytes for tensor in _tensors(parts)), (1 + MOMENTS) * parameters)


def hyperparameters(groups: Iterable[dict]) -> list[tuple[dict, dict]]:
    """Return every group of an optimizer's parameters with a copy of what it says of them."""
    return [(group, {name: value for name, value in group.items() if name != "params"}) for group in groups]


def _groups(parts: Sequence[MegatronOptimizer]) -> Iterator[dict]:
    return (group for part in parts for group in part.optimizer.param_groups)


def _gathered(parts: Sequence[MegatronOptimizer]) -> list[Any]:
    """Return the model chunks whose parameters are gathered while others compute."""
    chunks = {
        id(chunk): chunk
        for part in parts
        if isinstance(part, DistributedOptimizer) and part.ddp_config.overlap_param_gather
        for chunk in part.model_chunks
    }
    return list(chunks.values())


class _OnDevice:
    """Copies beside the originals."""

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor] = ()
        self._copies: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        if list(map(_kind, tensors)) != list(map(_kind, self._copies)):
            self._copies = []  # before the others, which may need their memory
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        self._tensors = tensors
        _copy(self._copies, tensors)

    def finish(self) -> None:
        pass

    def put_back(self) -> None:
        _copy(self._tensors, self._copies)

    def close(self) -> None:
        self._tensors, self._copies = (), []


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if sources:
        torch._foreach_copy_(list(destinations), list(sources))


class _OnHost:
    """Copies in host memory.

    Args:
        channel: the way there and back.
    """

    def __init__(self, channel: Channel[Any]):
        self._channel = channel
        self._places: list[torch.Tensor] = []
        self._copies: list[Copy] = []
        self._ticket: Any = None

    @property
    def nbytes(self) -> int:
        return sum(place.numel() for place in self._places)

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        self.finish()
        runs = [run for tensor in tensors for run in tensor.view(-1).view(torch.uint8).split(_RUN)]
        if [run.numel() for run in runs] != [place.numel() for place in self._places]:
            self._places = []  # before the others, which may need their memory
            self._places = self._allocate([run.numel() for run in runs])
        self._copies = list(map(Copy, self._places, runs))
        self._ticket = self._channel.start(Direction.OUT, self._copies, ())

    def finish(self) -> None:
        if self._ticket is not None:
            self._channel.join(self._ticket, lambda seconds: None)
            self._ticket = None

    def put_back(self) -> None:
        back = [Copy(copy.source, copy.destination) for copy in self._copies]
        self._ticket = self._channel.start(Direction.IN, back, ())
        self.finish()

    def close(self) -> None:
        self.finish()
        self._channel.close()
        self._places, self._copies = [], []

    def _allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        needed = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        segment = max(ALIGNMENT, min(needed, _SEGMENT))
        pool = HostPool(2 * needed + 2 * segment, self._channel.host_memory, segment)
        return [pool.take(size, "the state to roll back to").data for size in sizes]
