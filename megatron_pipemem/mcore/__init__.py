"""Attach schedules to stock Megatron-Core. Only this package, ``tools`` and ``features/*/megatron`` import megatron.

- ``plugin``: ``enable()`` and ``disable()``, and the parts of a run. ``launch`` enables it from a command line.
- ``symbols``: the functions of Megatron that are replaced or used, and how they are replaced and restored.
- ``step``: the replacement of Megatron's forward-backward functions, and the extensions by which features add to a
  step.
- ``model``: builds chunks on the devices of a placement, runs them as stages, and splits the backward of their layers.
- ``report``: measurements of a run, compared with its plan. ``replanning`` plans again with them.
- ``refusals``: models and settings that cannot run. ``agreement``: decisions that all ranks of a job share.
"""

from __future__ import annotations

import importlib.util

INSTALL = "Megatron-Core is not installed here; pip install 'megatron-pipemem[megatron]'"
"""Advice for names that need Megatron."""

_cpu_ranks = False


def is_installed() -> bool:
    """Return whether torch and Megatron-Core can be imported, without importing either."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("torch", "megatron.core"))
    except (ImportError, ValueError):  # ValueError: another object is in the place of the module
        return False


def mark_cpu_ranks() -> None:
    """Note that this process is a CPU rank: the CPU lane has replaced what Megatron asks of ``torch.cuda``."""
    global _cpu_ranks
    _cpu_ranks = True


def on_cpu_ranks() -> bool:
    """Return whether this process is a CPU rank (``mark_cpu_ranks``)."""
    return _cpu_ranks
