"""Short texts for values, ``show()`` for objects, and progress messages of long computations.

Pictures are made in ``report``, which imports ``schedule``. So ``schedule`` cannot import ``report``: the package's
``__init__`` passes the name of the module that draws to ``draw_with``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from importlib import import_module
from textwrap import shorten
from typing import Any

from megatron_pipemem.errors import UnsupportedError

_MOST = 40
"""The most characters of a name in ``brief``; other values may have twice as many."""
_LINE = 190
"""The most characters in a text of ``changed_fields``."""


def brief(value: object) -> str:
    """Return a value as a text of at most 80 characters: ``<64 of 1 to 2.5>`` for 64 numbers, a long name cut short."""
    if isinstance(value, str):
        return shorten(value, _MOST, placeholder="...") if value.isprintable() else brief(repr(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    if len(text) <= _MOST:
        return text
    if isinstance(value, Mapping):
        return f"<{len(value)} entries>"
    if isinstance(value, Sequence) and value and all(isinstance(number, int | float) for number in value):
        return f"<{len(value)} of {min(value):.4g} to {max(value):.4g}>"
    return text if len(text) <= 2 * _MOST else f"<{type(value).__name__}>"


def changed_fields(instance: Any) -> str:
    """Return the text of a dataclass instance: its class and the fields that differ from their defaults.

    It has at most 190 characters. Fields beyond that are replaced by "...".
    """
    progress = [
        f"{field.name}={brief(getattr(instance, field.name))}"
        for field in fields(instance)
        if getattr(instance, field.name) != field.default
    ]
    return shorten(f"{type(instance).__name__}({', '.join(progress)})", _LINE, placeholder=" ...)")


LARGEST = 1e30
"""The largest accepted seconds, bytes and caps, of either sign. Sums and products of larger ones could be infinite."""


def shortened(value: object) -> str:
    """Return the text of a value for an error message, cut at 80 characters; for a huge integer its number of digits."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length() * 30103 // 100000 + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_drawn_by = ""


def draw_with(module: str) -> None:
    """Set the full name of the module that draws pictures. The module is imported when an object is first shown."""
    global _drawn_by
    _drawn_by = module


def drawing() -> Any:
    """Import and return the module that draws pictures. Raise an UnsupportedError if ``draw_with`` was not called."""
    if not _drawn_by:
        raise UnsupportedError(
            "nothing-draws",
            "no module draws pictures yet; import the shown object from megatron_pipemem itself, not from its modules",
        )
    return import_module(_drawn_by)


class Shown:
    """A base class of objects that notebooks and terminals can show."""

    def show(self) -> None:
        """Show the object: a picture with zoom in a notebook, coloured letters in a terminal."""
        drawing().show(self)

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show in place of the object."""
        return drawing().to_html(self)


Listener = Callable[[str], None]

_SECONDS_BETWEEN = 0.1


class _Progress:
    """The listener of progress messages, the prefix of its messages, and the time of the last one."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.around, self.last = listener, "", float("-inf")


_progress: ContextVar[_Progress | None] = ContextVar("progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with progress messages within this block.

    These are all messages of ``doing``, and at most ten a second of ``tell``.
    """
    token = _progress.set(_Progress(listener))
    try:
        yield
    finally:
        _progress.reset(token)


def has_listener() -> bool:
    return _progress.get() is not None


@contextmanager
def doing(task: str) -> Iterator[None]:
    """Report that ``task`` begins, and put its text before every progress message within this block."""
    progress = _progress.get()
    if progress is None:
        yield
        return
    before, progress.around = progress.around, f"{progress.around}{task}: "
    progress.listener(task if not before else f"{before}{task}")
    try:
        yield
    finally:
        progress.around = before


def tell(status: Callable[[], str]) -> None:
    """Send ``status()`` to the listener, if there is one and the last call that sent is at least 0.1 seconds ago."""
    progress = _progress.get()
    if progress is None or time.monotonic() - progress.last < _SECONDS_BETWEEN:
        return
    progress.last = time.monotonic()
    progress.listener(progress.around + status())


@contextmanager
def rare_collection() -> Iterator[None]:
    """Let Python's garbage collector run rarely within this block.

    Searches and plans make no reference cycles, and the collector's search for them takes a fifth of their time.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(200_000, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
