"""Print results and errors of the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from textwrap import wrap

import typer
from rich.console import Console
from rich.text import Text

from megatron_pipemem.errors import CostsError

CANNOT_RUN = "is valid, but cannot run here, where losses are bit-identical to stock Megatron's"
"""Of a table that other programs run."""
INVALID, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit codes: a schedule that must not run; anything else that the user can mend; Ctrl-C."""

_WIDTH_OF_FILES = 130
_NAMES = 20
"""Columns of what ``print_facts`` names."""


def console() -> Console:
    """Return the console that a command answers on. A file or a pipe has no width, so tables are not cut there to a
    terminal's default.
    """
    out = Console(highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _WIDTH_OF_FILES
    return out


def print_facts(out: Console, told: Iterable[tuple[str, str]]) -> None:
    """Print one line per name with what is to be said of it. What is long goes on under its own beginning, but not in
    files.
    """
    fits = None if out.width == _WIDTH_OF_FILES else max(20, out.width - _NAMES - 1)
    for name, fact in told:
        lines = [fact] if fits is None else wrap(fact, fits, break_long_words=False, break_on_hyphens=False) or [""]
        for line in lines:
            out.print(f"{name:<{_NAMES}} {line}".rstrip(), soft_wrap=True, markup=False)
            name = ""


def print_json(result: object) -> None:
    """Raises:
    CostsError: there are numbers in it that JSON has not.
    """
    try:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))
    except ValueError:
        raise CostsError(
            "bad-number", "the result holds infinite numbers, which JSON has not; give costs nearer to 1"
        ) from None


def report_error(message: str) -> None:
    report_lines([f"error: {message}"], "red")


def report_note(message: str) -> None:
    report_lines([f"note: {message}"], "yellow")


def report_lines(lines: Sequence[str], style: str = "") -> None:
    out = Console(stderr=True, highlight=False)
    for line in lines:
        out.print(Text(line, style=style), soft_wrap=True)
