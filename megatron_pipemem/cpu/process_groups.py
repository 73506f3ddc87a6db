"""Process groups over gloo wherever NCCL is asked for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.distributed.constants import default_pg_timeout


def _over_gloo(create: Callable[..., Any], *cuda_only: str) -> Callable[..., Any]:
    """``create`` with gloo for NCCL, without the keyword arguments ``cuda_only`` that gloo does not know."""

    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_gloo(argument) for argument in args)
        if "backend" in kwargs:
            kwargs["backend"] = _gloo(kwargs["backend"])
        for name in cuda_only:
            kwargs.pop(name, None)
        return create(*args, **kwargs)

    return wrapper


def _gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend


@functools.cache
def _devices() -> list[ProcessGroupGloo.Device]:
    """Open what carries gloo's messages: one device per interface of ``GLOO_SOCKET_IFNAME``, or the default one."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return [
        ProcessGroupGloo.create_device(interface=name) if name else ProcessGroupGloo.create_default_device()
        for name in interfaces
    ]


def _share_devices() -> None:
    """Make all gloo groups of this process use the same devices.

    Torch opens a device for every group, and each device has a thread that polls its sockets. NCCL has nothing like it, and
    ranks that share few cores spend their time in changing between these threads.
    """
    create = ProcessGroupGloo.__init__

    @functools.wraps(create)
    def wrapper(group: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: Any = default_pg_timeout) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = _devices(), timeout
        create(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = wrapper


def install() -> None:
    """Wrap ``init_process_group`` and ``new_group`` in both places that export them, and gloo's own groups."""
    _share_devices()
    for name in ("init_process_group", "new_group"):
        wrapped = _over_gloo(getattr(distributed_c10d, name), "device_id", "pg_options")
        for module in (distributed_c10d, torch.distributed):
            setattr(module, name, wrapped)
