"""Show the package's log in a run that a command line has started."""

from __future__ import annotations

import logging
import os
import sys

PACKAGE = __name__.partition(".")[0]


class _Lines(logging.Formatter):
    """Begin every line with one short prefix; name the rank if it is not the first, and the level of a warning."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK", "0")
        place = "" if rank == "0" else f"rank {rank}: "
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"pipemem: {place}{level}{super().format(record)}"


def show_log() -> None:
    """Write the package's log to standard output: everything from rank 0, warnings from all ranks.

    Only our own logger is set up. A program that calls ``enable()`` itself decides about its log, and this is not called.
    """
    logger = logging.getLogger(PACKAGE)
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Lines())
    handler.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
