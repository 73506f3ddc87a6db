"""Ranks in threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable


def outcomes(size: int, act: Callable[[int], object]) -> list:
    """Return what ``act(rank)`` has returned or raised on every rank."""
    found: list = [None] * size

    def on(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=on, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found
