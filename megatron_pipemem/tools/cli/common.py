"""Functions that all commands use to print results, errors and notes, and to show progress on stderr."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from megatron_pipemem.errors import CostsError
from megatron_pipemem.tools.console import Console

if TYPE_CHECKING:
    from megatron_pipemem.schedule.display import Listener

ASYNCHRONOUS = "trains differently from Megatron"
CANNOT_RUN = "is valid, but cannot run here, where losses are bit-identical to stock Megatron's"
"""The end of the sentence about a valid schedule file that Megatron cannot run."""

_WIDTH_OF_FILES = 130
_NAME_COLUMNS = 20
"""Width in columns of the names that ``print_facts`` prints."""


_PLACEMENTS = {
    "linear": "one stage per device",
    "interleaved": "stages go down the devices once per chunk",
    "v": "stages go down the devices and up again",
    "wave": "stages go down and up the devices several times",
    "bidirectional": "two copies of the model, in opposite directions",
}
"""What the names of placements mean."""
_OPENED_BY = {".html": "open it in a browser", ".json": "open it at https://ui.perfetto.dev"}
"""What to do with a written picture, by its suffix."""

type Shown = list[tuple[str, str]] | Path | RenderableType
"""A part of an answer for people: names with texts (``print_facts``), a path, a table or picture of rich, or text.

Text is a ``str``, which is wrapped on a terminal, or a ``rich.text.Text`` to copy, whose lines stay whole.
"""


def print_answer(answer: object, shown: Iterable[Shown], as_json: bool) -> None:
    """Print the answer of a command: as JSON (``print_json``), or as the parts ``shown`` for people.

    ``shown`` may be a generator. It is not used for JSON.
    """
    if as_json:
        print_json(answer)
        return
    out = console()
    for part in shown:
        if isinstance(part, list):
            print_facts(out, part)
        elif isinstance(part, Path):
            print_path(part)
        elif isinstance(part, str):
            _print_wrapped(out, part)
        elif isinstance(part, Text):
            out.print(part, soft_wrap=True)
        else:
            out.print(part)


def print_file(path: Path, write: Callable[[], object], as_json: bool) -> None:
    """Draw a picture into a file, and print its path for people. ``write`` draws it."""
    with showing(f"drawing {path}"):
        write()
    if not as_json:
        print_path(path)


def print_path(path: Path) -> None:
    """Print the path of a written picture, and on stderr how to open it."""
    print_lines(path)
    if (how := _OPENED_BY.get(path.suffix)) is not None:
        report_note(how)


def num_chunks(count: int) -> str:
    return f"{count} chunk{'s' if count > 1 else ''}"


def placement_text(name: str) -> str:
    """Return the meaning of a placement's name, to be printed after it; nothing for a placement of the user's own."""
    return f": {_PLACEMENTS[name]}" if name in _PLACEMENTS else ""


def console() -> Console:
    """Return the console for a command's result. If the output is a file or a pipe, it is 130 columns wide."""
    out = Console()
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _WIDTH_OF_FILES
    return out


def print_facts(out: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Print each name with its text in a line. On a terminal, a long text is wrapped in its own column."""
    for name, fact in facts:
        for line in _wrapped(out, fact, _NAME_COLUMNS + 1):
            out.print(f"{name:<{_NAME_COLUMNS}} {line}".rstrip(), soft_wrap=True, markup=False)
            name = ""


def _wrapped(out: Console, text: str, indent: int = 0) -> list[str]:
    """Return the lines of a text beside ``indent`` columns. In a file or a pipe it is one line."""
    if out.width == _WIDTH_OF_FILES:
        return [text]
    return wrap(text, max(20, out.width - indent), break_long_words=False, break_on_hyphens=False) or [""]


def _print_wrapped(out: Console, text: str) -> None:
    """Print each line of a text, wrapped on a terminal under its own indentation."""
    for line in text.split("\n"):
        words = line.lstrip()
        indent = len(line) - len(words)
        for part in _wrapped(out, words, indent):
            out.print(" " * indent + part, soft_wrap=True, markup=False)


def print_lines(*lines: object) -> None:
    """Print lines of text, or paths, as they are and without wrapping."""
    for line in lines:
        console().print(str(line), soft_wrap=True, markup=False)


def print_json(result: object) -> None:
    """Print a result as JSON. Dataclasses in it are objects with their fields, and paths are texts.

    Raise a ``CostsError`` if it has infinite numbers.
    """
    try:
        typer.echo(json.dumps(result, indent=2, allow_nan=False, default=_plain))
    except ValueError:
        raise CostsError(
            "bad-number", "the result holds infinite numbers, which JSON cannot hold; give costs nearer to 1"
        ) from None


def _plain(value: Any) -> object:
    if isinstance(value, Path):
        return str(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


def report_note(message: str) -> None:
    report_lines([f"note: {message}"], "yellow")


def report_lines(lines: Sequence[str], style: str = "") -> None:
    out = Console(stderr=True)
    for line in lines:
        out.print(Text(line, style=style), soft_wrap=True)


_PATIENCE_SECONDS = 1.0
_REFRESH_SECONDS = 0.1
_FIRST_LINE_SECONDS = 15.0
_MOST_SECONDS = 600.0
"""Longest wait between two plain lines of progress. Each wait is twice the wait before, up to this one."""


@contextmanager
def showing(text: str) -> Iterator[Listener]:
    """Show progress on stderr while the block runs: first ``text``, then each message of ``doing`` and ``tell``.

    The block may also pass messages to the function that it gets. It must not print to stdout. If another ``showing``
    is active, its line shows ``text``, and the function does nothing.
    A terminal shows the line after a second. A file gets plain lines, at longer and longer intervals.
    """
    # The command that lists all commands does not import schedules.
    from megatron_pipemem.schedule.display import doing, has_listener, listening

    if has_listener():
        with doing(text):
            yield lambda message: None
        return
    line = _Line(text)
    thread = threading.Thread(target=line.show, name="progress", daemon=True)
    thread.start()
    try:
        with listening(line.tell):
            yield line.tell
    finally:
        line.done.set()
        thread.join()


class _Line:
    def __init__(self, text: str) -> None:
        self._text, self._started = text, time.monotonic()
        self._console = Console(stderr=True)
        self.done = threading.Event()

    def tell(self, text: str) -> None:
        self._text = text

    def show(self) -> None:
        if not self._console.is_terminal:
            self._show_now_and_then()
        elif not self.done.wait(_PATIENCE_SECONDS):
            self._show_in_place()

    def _show_in_place(self) -> None:
        with self._console.status(Text(self._line()), refresh_per_second=1 / _REFRESH_SECONDS) as status:
            while not self.done.wait(_REFRESH_SECONDS):
                status.update(Text(self._line()))

    def _show_now_and_then(self) -> None:
        wait = _FIRST_LINE_SECONDS
        while not self.done.wait(wait):
            self._console.print(Text(self._line()), soft_wrap=True)
            wait = min(2 * wait, _MOST_SECONDS)

    def _line(self) -> str:
        return f"{self._text} [{duration(time.monotonic() - self._started)}]"


def duration(seconds: float) -> str:
    """Return a duration as text: ``45 s``, ``5 min`` or ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
