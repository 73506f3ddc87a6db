"""Let schedules, runs and results of searches show themselves, drawn by a module that this part does not import.

Pictures are made in ``report``, which stands on ``schedule``. The front of the package knows both, and names the module that
draws (``draw_with``).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_pipemem.errors import UnsupportedError

_drawn_by = ""


def draw_with(module: str) -> None:
    """Take the full name of the module that draws; it is imported when something is shown."""
    global _drawn_by
    _drawn_by = module


def drawing() -> Any:
    """Return the module that draws.

    Raises:
        UnsupportedError: none has been named.
    """
    if not _drawn_by:
        raise UnsupportedError(
            "nothing-draws", "nothing draws yet: take what you show from megatron_pipemem itself, not from its modules"
        )
    return import_module(_drawn_by)


class Shown:
    """What notebooks and terminals can show."""

    def show(self) -> None:
        """Show it: as a picture to zoom into in a notebook, in coloured letters in a terminal."""
        drawing().show(self)

    def _repr_html_(self) -> str:
        """Return what notebooks show in its place."""
        return drawing().to_html(self)
