"""Answer requests for CUDA tensors with CPU tensors.

Functions are replaced one by one. PyTorch's own means, a TorchFunctionMode, holds for one thread and is suspended while
the engine runs a backward pass, so that recomputation and custom gradients would still meet CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _is_cuda(device: Any) -> bool:
    """Return whether ``device`` names a CUDA device: an index, ``"cuda[:i]"`` or a `torch.device`."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``create`` that makes pageable CPU tensors for CUDA devices and for pinned memory."""

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
    """Megatron's optimizers sort parameters by the names ``torch.cuda.FloatTensor`` and the like."""

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


def install() -> None:
    """Redirect tensor factories, tensor methods and ``Module.cuda``, in all threads until the process ends."""
    factories = _device_constructors()  # cached by PyTorch, which keeps knowing the originals
    for name, function in list(vars(torch).items()):
        if name in _LIKE or (callable(function) and function in factories):
            setattr(torch, name, _on_cpu(function))
    tensors: Any = torch.Tensor  # classes that get other methods
    modules: Any = torch.nn.Module
    for name in _METHODS:
        setattr(tensors, name, _on_cpu(getattr(tensors, name)))
    tensors.to = _to(tensors.to)
    tensors.type = _type(tensors.type)
    tensors.cuda = tensors.pin_memory = modules.cuda = _itself
    tensors.record_stream = lambda tensor, stream: None
