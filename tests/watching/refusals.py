"""Assert that something is refused, by the error's code and values and not by its sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_pipemem.errors import PipememError


@contextmanager
def refused(code: str, *values: object, kind: type[PipememError] = PipememError) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of this package.

    Args:
        code: of the error.
        values: stand in its message as they are here, not within a longer word or number: names, flags, numbers, actions.
        kind: class of the error.
    """
    with pytest.raises(kind) as raised:
        yield raised
    said = str(raised.value)
    assert raised.value.code == code, said
    _names(said, values)


def check_refusal(output: str, code: str, *values: object) -> None:
    """Assert that the output of a command or of ranks ends with an error that has this code and names these values."""
    assert code_in(output) == code, output
    _names(output, values)


def _names(said: str, values: tuple[object, ...]) -> None:
    for value in values:
        assert re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\.?\w)", said), f"{value} is not in: {said}"


def code_in(output: str) -> str | None:
    """Return the code that the last error in the output of a command or of ranks ends with."""
    return next(iter(re.findall(r" \[([a-z0-9-]+)\]$", output, re.MULTILINE)[::-1]), None)
