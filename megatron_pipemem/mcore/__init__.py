"""Attach schedules to stock Megatron-Core. Beside ``cpu/`` this is the only package that imports megatron.

- ``plugin``: ``enable()`` and ``disable()``, and what a run consists of; ``launch`` and ``flags`` do it from a command line.
- ``symbols``: everything of Megatron that is replaced or relied on; ``patching`` replaces it and puts it back.
- ``step``: the replacement of Megatron's forward-backward functions, and the extensions by which features add to a step.
- ``model``: chunks and where they are built, how they run as stages, and how their layers split backwards.
- ``vocabulary``, ``asynchronous``: what these features add to models and steps.
- ``report``: what a run did, against what was predicted. ``replanning``: plans anew with what it shows.
- ``profiling``: what the stages of a model take and hold, run alone (``lone_stage``).
- ``refusals``: what cannot run. ``agreement``: what all ranks of a job do together.
"""

from __future__ import annotations

import importlib.util

INSTALL = "Megatron-Core is not installed here; pip install 'megatron-pipemem[megatron]'"
"""What to tell who asks for what needs it."""


def is_installed() -> bool:
    """Return whether there is a Megatron to attach to, and torch. Asking imports nothing of them."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("torch", "megatron.core"))
    except (ImportError, ValueError):  # ValueError: somebody has put another thing in the place of the module
        return False
