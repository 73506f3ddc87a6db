"""The only package, beside ``cpu/``, that imports megatron: it attaches schedules to stock Megatron-Core."""

from __future__ import annotations

import importlib.util

INSTALL = "Megatron-Core is not installed here; pip install 'megatron-pipemem[megatron]'"
"""What to tell who asks for what needs it."""


def is_installed() -> bool:
    """Whether there is a Megatron to attach to, and torch. Asking imports nothing of them."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("torch", "megatron.core"))
    except (ImportError, ValueError):  # ValueError: somebody has put another thing in the place of the module
        return False
