"""Attach schedules to stock Megatron-Core. Outside of ``cpu/`` and ``features/*/megatron``, only this package imports megatron.

- ``plugin``: ``enable()`` and ``disable()``, and the parts of a run; ``launch`` and ``flags`` enable it from a command line.
- ``symbols``: all functions of Megatron that are replaced or relied on; ``patching`` replaces them and puts them back.
- ``step``: the replacement of Megatron's forward-backward functions, and the extensions by which features add to a step.
- ``model``: where chunks are built, how they run as stages, and how their layers split backwards.
- ``report``: measurements of a run, compared with its plan. ``replanning`` plans anew with them.
- ``profiling``: time and memory of the stages of a model, each run alone (``lone_stage``).
- ``refusals``: models and settings that cannot run. ``agreement``: decisions that all ranks of a job share.
"""

from __future__ import annotations

import importlib.util

INSTALL = "Megatron-Core is not installed here; pip install 'megatron-pipemem[megatron]'"
"""Advice for names that need Megatron."""


def is_installed() -> bool:
    """Return whether there is a Megatron to attach to, and torch. Asking imports nothing of them."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("torch", "megatron.core"))
    except (ImportError, ValueError):  # ValueError: another object is in the place of the module
        return False
