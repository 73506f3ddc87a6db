"""Get values from a separate Python process that imports Megatron.

The import takes seconds, and changes global state that cannot be restored.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megatron_pipemem.errors import UpstreamError

MARK = "ANSWER "
"""The prefix of lines with values. Everything else that the process prints is ignored."""


def answers(arguments: Sequence[str], seconds: float, subject: str) -> list[Any]:
    """Run Python in a new process, and return the JSON values that it prints on lines that begin with ``MARK``.

    ``arguments`` are those of Python, such as ``-m MODULE``. The process may take ``seconds``. ``subject`` begins the
    message of an UpstreamError, for example "Megatron's parser". The error's code is ``no-answer`` if the process took
    longer or did not start, and ``not-installed`` if it failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UpstreamError(
            "no-answer", f"{subject} did not answer within {seconds:g} s; try again on an idle machine"
        ) from error
    except OSError as error:
        raise UpstreamError(
            "no-answer", f"{subject} did not start: {error}; check that {sys.executable} runs"
        ) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise UpstreamError(
            "not-installed", f"{subject} failed ({reason}); install the missing part, or correct its cause"
        )
    texts = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [json.loads(line) for line in texts]
