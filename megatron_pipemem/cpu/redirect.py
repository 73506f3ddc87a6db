"""Requests for CUDA tensors, answered with CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    """Whether ``device`` names a CUDA device: an index, ``"cuda[:i]"`` or a `torch.device`."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.to(*(_CPU if _is_cuda(value) else value for value in args), **kwargs)


def _cuda(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Megatron's optimizers sort parameters by names such as ``torch.cuda.FloatTensor``."""
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return tensor.type(dtype, *args, **kwargs)


_REPLACED = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _cuda,
    torch.Tensor.record_stream: lambda tensor, stream: None,
}


class CpuRedirect(TorchFunctionMode):
    """Sends every tensor to the CPU. A mode holds for its thread; CPU backward passes run in the calling thread."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return _REPLACED.get(func, func)(*args, **kwargs)


def install() -> None:
    """Redirect the calling thread's tensor requests, and ``Module.cuda`` everywhere, until the process ends."""
    CpuRedirect().__enter__()
    torch.nn.Module.cuda = lambda module, device=None: module
