"""Bound how large what users give may be, and say how it is shown."""

from __future__ import annotations

LARGEST = 1e30
"""Of seconds, bytes and caps, either sign: sums and products of larger ones would not be finite."""


def shortened(value: object) -> str:
    """Return a value for a message, however long it is."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length() * 30103 // 100000 + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
