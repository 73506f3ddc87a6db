"""Run the garbage collector rarely while millions of small tuples are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
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
