"""Write in one line what would otherwise print as pages, and bound how large what users give may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from textwrap import shorten
from typing import Any

_MOST = 40
"""Letters of a name or a value in such a line."""
_LINE = 190
"""Letters of a line."""


def brief(value: object) -> str:
    """Return a value in a few letters: numbers by their count and range, names cut."""
    if isinstance(value, str):
        return shorten(value, _MOST, placeholder="...") if value.isprintable() else brief(repr(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    if len(text) <= _MOST:
        return text
    if isinstance(value, Mapping):
        return f"<{len(value)} entries>"
    if isinstance(value, Sequence) and value and all(isinstance(each, int | float) for each in value):
        return f"<{len(value)} of {min(value):.4g} to {max(value):.4g}>"
    return text if len(text) <= 2 * _MOST else f"<{type(value).__name__}>"


def changed_fields(instance: Any) -> str:
    """Return a dataclass by its fields that are not what they are by default."""
    told = [
        f"{field.name}={brief(getattr(instance, field.name))}"
        for field in fields(instance)
        if getattr(instance, field.name) != field.default
    ]
    return shorten(f"{type(instance).__name__}({', '.join(told)})", _LINE, placeholder=" ...)")


LARGEST = 1e30
"""Of seconds, bytes and caps, either sign: sums and products of larger ones would not be finite."""


def shortened(value: object) -> str:
    """Return a value for a message, however long it is."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length() * 30103 // 100000 + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
