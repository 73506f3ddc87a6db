"""The only package, beside ``cpu/``, that imports megatron: it attaches schedules to stock Megatron-Core."""

from __future__ import annotations

import importlib.util


def is_installed() -> bool:
    """Whether there is a Megatron to attach to. Asking imports nothing of it."""
    return importlib.util.find_spec("megatron") is not None
