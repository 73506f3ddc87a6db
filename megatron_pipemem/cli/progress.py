"""Show on stderr what a long command is doing: in one changing line in a terminal, else in a plain line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from megatron_pipemem.schedule.display import Listener, doing, has_listener, listening

_PATIENCE_SECONDS = 1.0
_REFRESH_SECONDS = 0.1
_FIRST_LINE_SECONDS = 15.0
_MOST_SECONDS = 600.0
"""Between two plain lines: each comes after twice the time of the one before, but not more than that."""


@contextmanager
def showing(what: str) -> Iterator[Listener]:
    """Show the user, within this block, what is told by ``doing`` and ``tell``, and to the function that this gives;
    ``what`` until then. Nothing must be printed to stdout meanwhile. Within another ``showing``, its line goes on.
    """
    if has_listener():
        with doing(what):
            yield lambda told: None
        return
    line = _Line(what)
    thread = threading.Thread(target=line.show, name="progress", daemon=True)
    thread.start()
    try:
        with listening(line.tell):
            yield line.tell
    finally:
        line.done.set()
        thread.join()


class _Line:
    def __init__(self, what: str) -> None:
        self._text, self._started = what, time.monotonic()
        self._console = Console(stderr=True, highlight=False)
        self.done = threading.Event()

    def tell(self, what: str) -> None:
        self._text = what

    def show(self) -> None:
        if not self._console.is_terminal:
            self._show_now_and_then()
        elif not self.done.wait(_PATIENCE_SECONDS):
            self._show_in_place()

    def _show_in_place(self) -> None:
        with self._console.status(Text(self._told()), refresh_per_second=1 / _REFRESH_SECONDS) as status:
            while not self.done.wait(_REFRESH_SECONDS):
                status.update(Text(self._told()))

    def _show_now_and_then(self) -> None:
        wait = _FIRST_LINE_SECONDS
        while not self.done.wait(wait):
            self._console.print(Text(self._told()), soft_wrap=True)
            wait = min(2 * wait, _MOST_SECONDS)

    def _told(self) -> str:
        return f"{self._text} [{duration(time.monotonic() - self._started)}]"


def duration(seconds: float) -> str:
    """Write a duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
