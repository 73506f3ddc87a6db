"""Memory caps as users write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron_pipemem.errors import UnsupportedError

_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([KMGT])i)?B", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryCap:
    """The most activations a rank may hold.

    Args:
        amount: bytes, as the activation ledger counts them, or activation units (1.0 is what 1F1B's first rank holds).
        in_bytes: which of the two.
    """

    amount: float
    in_bytes: bool


def parse_cap(value: float | str) -> MemoryCap:
    """Read ``0.6`` (activation units) or ``6GiB``, ``800MiB``, ``64KiB``, ``123456B`` (bytes of activations per rank).

    Raises:
        UnsupportedError: it is neither.
    """
    text = str(value).strip()
    match = _BYTES.fullmatch(text)
    try:
        amount = float(match[1]) * _FACTORS[(match[2] or "").upper()] if match else float(text)
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise UnsupportedError(
            f"memory cap {text!r} is no positive number of activation units (1.0 is what 1F1B's first rank holds) and no "
            "number of bytes per rank; write 0.6, 6GiB, 800MiB or 123456B"
        )
    return MemoryCap(amount, match is not None)


def loosened(limit: float) -> float:
    """A limit with what floats may be off by: peaks are sums of shares, and a cap of 2/3 means 4 of 6 stages."""
    return limit * (1 + 1e-9)


def format_bytes(count: float) -> str:
    """As ``parse_cap`` reads it, never less than ``count``."""
    for letter in "TGM":
        if count >= _FACTORS[letter]:
            return f"{math.ceil(count / _FACTORS[letter] * 100) / 100:.2f}{letter}iB"
    return f"{math.ceil(count)}B"
