"""Process groups over gloo wherever NCCL is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d


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
    """Wrap ``init_process_group`` and ``new_group`` in both places that export them."""
    for name in ("init_process_group", "new_group"):
        wrapped = _over_gloo(getattr(distributed_c10d, name))
        for module in (distributed_c10d, torch.distributed):
            setattr(module, name, wrapped)
