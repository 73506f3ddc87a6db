"""Tell where a long computation stands, to whoever listens; where nobody does, telling costs next to nothing. And have the
garbage collector look rarely meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
