"""Process groups over gloo wherever NCCL is asked for, with one network thread per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


class _OneDeviceGloo(ProcessGroupGloo):
    """Gloo groups that share the device of the process's first one.

    A device has a thread that wakes up a hundred times per second, and PyTorch gives every group a device of its own. Megatron
    makes dozens of groups: with 60 of them, four idle ranks keep a quarter of a core busy.
    """

    _devices: list | None = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta):
        if _OneDeviceGloo._devices is None:
            super().__init__(store, rank, size, timeout)
            _OneDeviceGloo._devices = self.options._devices  # type: ignore[attr-defined]
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # stubs know it by another name
        options._devices, options._timeout = _OneDeviceGloo._devices, timeout
        super().__init__(store, rank, size, options)


def _over_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """``create`` with gloo for NCCL, without the keyword arguments that gloo does not know."""

    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
        if "backend" in known:
            known["backend"] = _gloo(known["backend"])
        return create(*map(_gloo, args), **known)

    return wrapper


def _gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend


def install() -> None:
    """Wrap ``init_process_group`` and ``new_group`` in both places that export them; share gloo's device."""
    distributed_c10d.ProcessGroupGloo = _OneDeviceGloo  # type: ignore[misc]
    for name in ("init_process_group", "new_group"):
        wrapped = _over_gloo(getattr(distributed_c10d, name))
        for module in (distributed_c10d, torch.distributed):
            setattr(module, name, wrapped)
