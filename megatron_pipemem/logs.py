"""The log of this package on a training rank."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from megatron_pipemem.errors import printable

logger = logging.getLogger(__name__.partition(".")[0])


class _Lines(logging.Formatter):
    """Starts every log line with ``pipemem:``, then the rank unless it is 0, and the level from warnings up."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK", "0")
        place = "" if rank == "0" else f"rank {rank}: "
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"pipemem: {place}{level}{printable(super().format(record))}"


def show_log() -> None:
    """Write this package's log to standard output: all messages on rank 0, and only warnings on other ranks.

    Only the logger of this package changes, and only if it has no handler yet. A program that calls ``enable()`` sets
    up its own logging and does not call this.
    """
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Lines())
    handler.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def is_first_rank() -> bool:
    """Return whether this process is world rank 0. Before there is a process group, the variable ``RANK`` tells it."""
    dist: Any = sys.modules.get("torch.distributed")  # without torch, there is no group
    return dist.get_rank() == 0 if dist is not None and dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def tell(logger: logging.Logger, message: str, *arguments: object, level: int = logging.INFO) -> None:
    """Log a message on world rank 0 only, because every rank calls this with the same message."""
    if is_first_rank():
        logger.log(level, message, *arguments)
