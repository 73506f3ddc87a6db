"""Tell users about schedules and computations: values in one line, pictures, and where a long computation stands.

Pictures are made in ``report``, which stands on ``schedule``. The front of the package knows both, and names the module that
draws (``draw_with``).
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
"""Letters of a name or a value in such a line."""
_LINE = 190
"""Letters of a line."""


def brief(value: object) -> str:
    """Return a value in a few letters: numbers by their count and range, names cut."""
    if isinstance(value, str):
        return shorten(value, _MOST, placeholder="...") if value.isprintable() else brief(repr(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    if len(text) <= _MOST:
        return text
    if isinstance(value, Mapping):
        return f"<{len(value)} entries>"
    if isinstance(value, Sequence) and value and all(isinstance(each, int | float) for each in value):
        return f"<{len(value)} of {min(value):.4g} to {max(value):.4g}>"
    return text if len(text) <= 2 * _MOST else f"<{type(value).__name__}>"


def changed_fields(instance: Any) -> str:
    """Return a dataclass by its fields that are not what they are by default."""
    told = [
        f"{field.name}={brief(getattr(instance, field.name))}"
        for field in fields(instance)
        if getattr(instance, field.name) != field.default
    ]
    return shorten(f"{type(instance).__name__}({', '.join(told)})", _LINE, placeholder=" ...)")


LARGEST = 1e30
"""Of seconds, bytes and caps, either sign: sums and products of larger ones would not be finite."""


def shortened(value: object) -> str:
    """Return a value for a message, however long it is."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length() * 30103 // 100000 + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_drawn_by = ""


def draw_with(module: str) -> None:
    """Take the full name of the module that draws; it is imported when something is shown."""
    global _drawn_by
    _drawn_by = module


def drawing() -> Any:
    """Return the module that draws."""
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


Listener = Callable[[str], None]

_SECONDS_BETWEEN = 0.1


class _Told:
    """Keep to whom is told, within what, and when last."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.around, self.last = listener, "", float("-inf")


_told: ContextVar[_Told | None] = ContextVar("told", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell ``listener``, within this block, ten times a second at most."""
    token = _told.set(_Told(listener))
    try:
        yield
    finally:
        _told.reset(token)


def has_listener() -> bool:
    return _told.get() is not None


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Put ``what`` before all that is told within this block."""
    told = _told.get()
    if told is None:
        yield
        return
    before, told.around = told.around, f"{told.around}{what}: "
    told.listener(what if not before else f"{before}{what}")
    try:
        yield
    finally:
        told.around = before


def tell(what: Callable[[], str]) -> None:
    """Say where things stand; ``what`` is called only if it is time to."""
    told = _told.get()
    if told is None or time.monotonic() - told.last < _SECONDS_BETWEEN:
        return
    told.last = time.monotonic()
    told.listener(told.around + what())


@contextmanager
def rare_collection() -> Iterator[None]:
    """Look for cycles rarely, within this block.

    Searches and plans make no cycles, and looking for them among their tuples takes a fifth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(200_000, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
