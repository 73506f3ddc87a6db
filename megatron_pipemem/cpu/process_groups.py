"""Process groups over gloo wherever NCCL is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d


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


def install() -> None:
    """Wrap ``init_process_group`` and ``new_group`` in both places that export them."""
    for name in ("init_process_group", "new_group"):
        wrapped = _over_gloo(getattr(distributed_c10d, name), "device_id", "pg_options")
        for module in (distributed_c10d, torch.distributed):
            setattr(module, name, wrapped)
