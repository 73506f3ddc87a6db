"""Read files that users name. Every error is raised as an error of this package, with the file and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from megatron_pipemem.errors import ConfigError, PipememError

MOST_BYTES = 1 << 28
"""The size of the largest file that is read, 256 MiB. A device such as ``/dev/zero`` would never end."""


def check_exists(path: str | Path, kind: str) -> None:
    """Raise a ConfigError if there is no file or folder with this path. The message calls it ``kind``."""
    if not Path(path).exists():
        raise ConfigError(
            "no-file", f"cannot read {kind} from {path}: there is no such file or folder; correct the path"
        )


def read_text(path: str | Path, kind: str, refusal: type[PipememError] = ConfigError) -> str:
    """Return the text of a file, or raise ``refusal`` if it is missing, unreadable, not UTF-8, or above ``MOST_BYTES``.

    Messages call the file ``kind``, for example ``costs`` or ``a schedule``.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise refusal(
                "too-large",
                f"cannot read {kind} from {path}: it is larger than {MOST_BYTES >> 20} MiB; give another file",
            )
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise refusal(
            "cannot-read", f"cannot read {kind} from {path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
        raise refusal(
            "cannot-read", f"cannot read {kind} from {path}: {why}; give the path of a file that can be read"
        ) from error


def read_json(path: str | Path, kind: str, refusal: type[PipememError] = ConfigError) -> Any:
    """Return the content of a JSON file, or raise ``refusal`` if it cannot be read or is not JSON.

    The message names the line and column of a syntax error. ``Infinity`` and ``NaN`` are refused too. ``kind`` is that
    of ``read_text``.
    """
    text = read_text(path, kind, refusal)
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_constant=_no_number)
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno} is not JSON, {error.msg[0].lower()}{error.msg[1:]}"
        raise refusal("not-json", f"cannot read {kind} from {path}: {why}; correct it there") from error
    except RecursionError as error:
        raise refusal(
            "not-json", f"cannot read {kind} from {path}: it is nested too deeply; remove brackets"
        ) from error
    except ValueError as error:  # an integer of thousands of digits, or Infinity or NaN
        why = str(error).partition(";")[0]
        raise refusal("not-json", f"cannot read {kind} from {path}: {why}; give a finite number") from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
