"""Read files that users give, with one sentence for whatever is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from megatron_pipemem.errors import ConfigError, PipememError

MOST_BYTES = 1 << 28
"""Of a file that is read whole: no schedule, costs or settings are larger, and devices like ``/dev/zero`` never end."""


def check_exists(path: str | Path, what: str) -> None:
    """Refuse a path at which there is neither a file nor a folder.

    Args:
        path: that a user gave.
        what: the file is to be, for messages.

    Raises:
        ConfigError: there is nothing.
    """
    if not Path(path).exists():
        raise ConfigError(
            "no-file", f"cannot read {what} from {path}: there is no such file or folder; give the path of one"
        )


def read_text(path: str | Path, what: str, refusal: type[PipememError] = ConfigError) -> str:
    """Return the text of a file.

    Args:
        path: of the file.
        what: the file is to be, for messages: ``costs``, ``a schedule``.
        refusal: what is raised.

    Raises:
        PipememError: there is no such file, it cannot be read, is no text, or is larger than ``MOST_BYTES``.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise refusal(
                "too-large",
                f"cannot read {what} from {path}: it is larger than {MOST_BYTES >> 20} MiB; give another file",
            )
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise refusal(
            "cannot-read", f"cannot read {what} from {path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
        raise refusal(
            "cannot-read", f"cannot read {what} from {path}: {why}; give the path of a file that can be read"
        ) from error


def read_json(path: str | Path, what: str, refusal: type[PipememError] = ConfigError) -> Any:
    """Return what a JSON file holds; ``Infinity`` and ``NaN`` are no JSON.

    Args:
        path: of the file.
        what: what the file is, for the error's sentence.
        refusal: class of the error that is raised.

    Raises:
        PipememError: as ``read_text``, or the text is no JSON; the message says where.
    """
    text = read_text(path, what, refusal)
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_constant=_no_number)
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno} is no JSON, {error.msg[0].lower()}{error.msg[1:]}"
        raise refusal("not-json", f"cannot read {what} from {path}: {why}; mend it there") from error
    except RecursionError as error:
        raise refusal(
            "not-json", f"cannot read {what} from {path}: it is nested too deeply; take brackets away"
        ) from error
    except ValueError as error:  # an integer of thousands of digits, or no number
        why = str(error).partition(";")[0]
        raise refusal("not-json", f"cannot read {what} from {path}: {why}; give a finite number") from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
