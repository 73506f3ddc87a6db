"""Copy the state that a step of Megatron's optimizers changes, and restore it bit for bit.

A step changes the optimizer's parameters, their state (Adam's moments) and the step counters. The parameters are fp32
masters, or the model's own if those are fp32. The counters may be in the parameter groups, next to the learning rate
and the weight decay of the training loop. The model's 16-bit parameters are not copied, because they follow from the
masters.

With the distributed optimizer, a rank copies its own share. The model's parameters of other shares are correct again
after the next all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from megatron_pipemem.schedule.memory_cap import format_bytes

MOMENTS = 2
"""Number of tensors in Adam's state of a parameter. Each has the size of the parameter."""

_WITH_PLAIN_STATE = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)


class Snapshot:
    """A copy of the state of an optimizer, or of a chain of optimizers, in device memory. The memory is kept between
    steps.

    Raise an UnsupportedError if the optimizer is of an unknown kind, or if the device has too little free memory.
    """

    def __init__(self, optimizer: MegatronOptimizer):
        self._parts = parts_of(optimizer)
        self._gathered = _gathered(self._parts)
        self._states: list[tuple[dict, torch.Tensor, dict | None]] = []
        self._groups: list[tuple[dict, dict]] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        needed, device = _most_bytes(self._parts), next((tensor.device for tensor in _tensors(self._parts)), None)
        if device is not None and device.type == "cuda" and needed > (left := _free_bytes(device)):
            raise UnsupportedError(
                "does-not-fit",
                f"a copy of the optimizer's state, to undo a step, takes {format_bytes(needed)} of device memory, and "
                f"{format_bytes(left)} are free; drop --pipemem-overlap-steps, or pass --clip-grad 0, which needs no copy",
            )

    @property
    def nbytes(self) -> int:
        """The bytes that the copies occupy."""
        return sum(copy.nbytes for copy in self._copies)

    def take(self) -> None:
        """Copy the present state. Later work on the current stream runs after the copies."""
        self._states = [
            (store, parameter, dict(store[parameter]) if parameter in store else None)
            for store, parameter in _parameters(self._parts)
        ]
        self._groups = hyperparameters(_groups(self._parts))
        self._tensors = list(_tensors(self._parts))
        if list(map(_dtype_and_device, self._tensors)) != list(map(_dtype_and_device, self._copies)):
            self._copies = []  # before the others, which may need their memory
            self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        _copy(self._copies, self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state of the last ``take``. All-gathers of parameters that are running end first."""
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
        _copy(self._tensors, self._copies)
        for part in self._parts:
            if isinstance(part, MixedPrecisionOptimizer):
                part._copy_main_params_to_model_params()

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Restore the state of ``take`` and run the block, which takes the optimizer step again.

        In the block, the learning rate and other settings are those of ``take``. After it, the parameter groups have
        the settings from before the block again, but the step counters of the block. With ``--overlap-param-gather``,
        all ranks then gather the new parameters.
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
        """Free the copies."""
        self._states, self._groups, self._tensors, self._copies = [], [], [], []


def parts_of(optimizer: MegatronOptimizer) -> tuple[MegatronOptimizer, ...]:
    """Return the optimizers of a chain that have parameters on this rank.

    Raises:
        UnsupportedError: an optimizer keeps more than its parameters and their state.
    """
    if type(optimizer) is ChainedOptimizer:
        return tuple(part for chained in optimizer.chained_optimizers for part in parts_of(chained))
    inner = getattr(optimizer, "optimizer", None)
    if type(optimizer) not in _WITH_PLAIN_STATE or hasattr(inner, "sub_optimizers"):
        name = type(optimizer).__name__ if type(optimizer) not in _WITH_PLAIN_STATE else type(inner).__name__
        raise UnsupportedError(
            "no-rollback",
            f"steps of the optimizer {name} cannot be undone, because it keeps more than parameters and their state; "
            "drop --pipemem-overlap-steps, or train with --optimizer adam or sgd on the device",
        )
    return () if optimizer.is_stub_optimizer else (optimizer,)


def _parameters(parts: Sequence[MegatronOptimizer]) -> Iterator[tuple[dict, torch.Tensor]]:
    """Yield ``(state, parameter)`` for every parameter. ``state`` is the optimizer's whole ``state``, by parameter."""
    for part in parts:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield part.optimizer.state, parameter


def _tensors(parts: Sequence[MegatronOptimizer]) -> Iterator[torch.Tensor]:
    """Yield every tensor that an optimizer step writes to and that exists now, always in the same order."""
    for state, parameter in _parameters(parts):
        yield parameter.detach()
        yield from (value for value in state.get(parameter, {}).values() if isinstance(value, torch.Tensor))
    for _, group in hyperparameters(_groups(parts)):
        yield from (value for value in group.values() if isinstance(value, torch.Tensor))


def _most_bytes(parts: Sequence[MegatronOptimizer]) -> int:
    """Return the bytes of a snapshot, at least those of the parameters and of Adam's two moments.

    Before the first optimizer step, the moments do not exist yet.
    """
    parameters = sum(parameter.nbytes for _, parameter in _parameters(parts))
    return max(sum(tensor.nbytes for tensor in _tensors(parts)), (1 + MOMENTS) * parameters)


def hyperparameters(groups: Iterable[dict]) -> list[tuple[dict, dict]]:
    """Return every parameter group with a copy of its settings, such as the learning rate."""
    return [(group, {name: value for name, value in group.items() if name != "params"}) for group in groups]


def _groups(parts: Sequence[MegatronOptimizer]) -> Iterator[dict]:
    return (group for part in parts for group in part.optimizer.param_groups)


def _gathered(parts: Sequence[MegatronOptimizer]) -> list[Any]:
    """Return the model chunks with ``--overlap-param-gather``, whose parameters are gathered during computing."""
    chunks = {
        id(chunk): chunk
        for part in parts
        if isinstance(part, DistributedOptimizer) and part.ddp_config.overlap_param_gather
        for chunk in part.model_chunks
    }
    return list(chunks.values())


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of device memory that new tensors can take, including free memory in PyTorch's allocator."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _dtype_and_device(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if sources:
        torch._foreach_copy_(list(destinations), list(sources))
