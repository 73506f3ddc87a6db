"""Ask a process of its own that imports Megatron: the import takes seconds, and may set up what nothing undoes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megatron_pipemem.errors import UpstreamError

MARK = "ANSWER "
"""Stands before each answer. Everything else that the process prints is ignored."""


def answers(arguments: Sequence[str], seconds: float, asked: str) -> list[Any]:
    """Return the JSON values that Python prints after ``MARK``.

    Args:
        arguments: of Python, as in ``-m MODULE``.
        seconds: that the process may take.
        asked: subject of the sentence in an error, as in "Megatron's parser".

    Raises:
        UpstreamError: the process took longer (``no-answer``), or failed (``not-installed``).
    """
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UpstreamError("no-answer", f"{asked} did not answer within {seconds:g} s; ask for less") from error
    except OSError as error:
        raise UpstreamError("no-answer", f"{asked} did not start: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise UpstreamError("not-installed", f"{asked} failed ({reason})")
    found = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [json.loads(line) for line in found]
