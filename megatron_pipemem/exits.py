"""How a command ends if a user makes a mistake: one line on stderr, and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_pipemem.errors import PipememError, ScheduleError, printable, with_code

INVALID, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit codes: an invalid schedule; another error that the user can correct; Ctrl-C."""
_OF_PATHS = {
    errno.ENAMETOOLONG: "no-file",
    errno.EACCES: "cannot-read",
    errno.EPERM: "cannot-read",
    errno.ENOSPC: "cannot-write",
}
"""Codes by the numbers of errors that the operating system raises for a path or output of the user."""


def print_error(text: str) -> None:
    """Print an error on stderr, in bold red on a terminal."""
    text = printable(text)
    is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    sys.stderr.write(f"\x1b[1;31m{text}\x1b[0m\n" if is_coloured else f"{text}\n")


def report_error(message: str) -> None:
    """Print the message of a user's error on stderr."""
    print_error(f"error: {message}")


@contextmanager
def exits_for_errors(command: Callable[[], str]) -> Iterator[None]:
    """Run a command in the block. Report a user's error or an interrupt in one line on stderr, without a traceback.

    The process then exits with ``INVALID``, ``UNUSABLE`` or ``INTERRUPTED``. All other errors are raised. ``command``
    returns the command's name for the message.
    """
    try:
        yield
    except PipememError as error:
        report_error(with_code(error))
        sys.exit(INVALID if isinstance(error, ScheduleError) else UNUSABLE)
    except OSError as error:
        if error.errno not in _OF_PATHS:
            raise
        path = "the output" if error.filename is None else str(error.filename)[:80]
        report_error(f"{path}: {error.strerror}; give another path [{_OF_PATHS[error.errno]}]")
        sys.exit(UNUSABLE)
    except KeyboardInterrupt:
        report_error(f"{command()} was interrupted and wrote nothing")
        sys.exit(INTERRUPTED)
