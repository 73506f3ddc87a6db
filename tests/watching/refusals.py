"""Assertions about errors, by their code and values and not by their sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_pipemem.errors import PipememError


@contextmanager
def refused(code: str, *values: object, kind: type[PipememError] = PipememError) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of this package with this code, whose message holds the values as whole words or numbers."""
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
    """Return the code of the last error in the output of a command or of ranks."""
    return next(iter(re.findall(r" \[([a-z0-9-]+)\]$", output, re.MULTILINE)[::-1]), None)
