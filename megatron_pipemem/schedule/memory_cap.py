"""Memory caps: parse them from text, and compare them with computed memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.display import LARGEST, shortened

_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = re.compile(r"([0-9.]+)\s*([KMGT])B?", re.IGNORECASE)
_BYTES = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([KMGT])i)?B", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryCap:
    """The most memory for activations that each pipeline rank may hold."""

    amount: float | tuple[float, ...]
    """One number for all ranks, or one per pipeline rank. The unit is the byte, as the activation ledger counts, or the
    activation unit (1.0 is the peak of 1F1B's first rank)."""
    in_bytes: bool

    def __str__(self) -> str:
        if self.in_bytes:
            return ", ".join(map(format_bytes, self.amounts))
        return f"{', '.join(f'{amount:.4g}' for amount in self.amounts)} activation units"

    @property
    def amounts(self) -> tuple[float, ...]:
        """Return the given amounts, in their unit: one for all ranks, or one per rank."""
        return self.amount if isinstance(self.amount, tuple) else (self.amount,)

    def of(self, num_devices: int) -> tuple[float, ...]:
        """Return the cap of every device. Raise an UnsupportedError if caps per rank have another number."""
        return per_device(self.amount, num_devices)


def per_device(limit: float | Sequence[float], num_devices: int, subject: str = "memory caps") -> tuple[float, ...]:
    """Return the limit of every device: the same number for all, or those of a sequence with one per device."""
    # Not only a Sequence, because arrays and tensors come too.
    limits = tuple(map(float, limit)) if isinstance(limit, Iterable) else (float(limit),) * num_devices
    if len(limits) != num_devices:
        raise UnsupportedError(
            "wrong-count", f"{len(limits)} {subject} for {num_devices} devices; give one number, or one per device"
        )
    if not all(0 <= of_device < math.inf for of_device in limits):
        raise UnsupportedError("bad-number", f"{subject} must be numbers of at least 0, not {shortened(limit)}")
    return limits


def parse_caps(value: float | str) -> MemoryCap:
    """Read one cap as ``parse_cap`` does, or one per pipeline rank: ``0.5,0.6,0.6,0.7`` or ``6GiB,8GiB``."""
    caps = [parse_cap(part) for part in str(value).split(",")]
    if len(caps) == 1:
        return caps[0]
    if len({cap.in_bytes for cap in caps}) > 1:
        raise UnsupportedError(
            "unit-mismatch",
            f"memory caps {shortened(value)}: give all of them in activation units or all of them in bytes",
        )
    return MemoryCap(tuple(amount for cap in caps for amount in cap.amounts), caps[0].in_bytes)


def parse_cap(value: float | str) -> MemoryCap:
    """Read ``0.6`` (activation units), or ``6GiB``, ``800MiB``, ``64KiB``, ``123456B`` (bytes per rank)."""
    text = str(value).strip()
    if (number := _bytes(text)) is not None:
        return MemoryCap(number, True)
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 < amount <= LARGEST:
        raise UnsupportedError(
            "bad-number",
            f"memory cap {shortened(text)} is neither a positive number of activation units (1.0 is the peak "
            "of 1F1B's first rank) nor "
            f"a number of bytes per rank; write 0.6, 6GiB, 800MiB or 123456B{_binary(text)}",
        )
    return MemoryCap(amount, False)


def parse_bytes(flag: str, value: str) -> float:
    """Read a number of bytes, such as ``60GiB``. ``flag`` begins the message of an UnsupportedError."""
    number = _bytes(value.strip())
    if number is None:
        raise UnsupportedError(
            "bad-number", f"{flag} {shortened(value)}: give a number of bytes, as in 60GiB or 800MiB{_binary(value)}"
        )
    return number


def _bytes(text: str) -> float | None:
    match = _BYTES.fullmatch(text)
    try:
        amount = float(match[1]) * _FACTORS[(match[2] or "").upper()] if match else 0.0
    except ValueError:
        return None
    return amount if 0 < amount <= LARGEST else None


def _binary(text: str) -> str:
    """Return a hint if the text has a decimal unit, as in ``6GB``, which often means ``6GiB``; else an empty text."""
    match = _DECIMAL.fullmatch(text.strip())
    return f"; if {text.strip()} means {match[1]}{match[2].upper()}iB, write that" if match else ""


def unreachable(cap: object, device: int, needed: MemoryCap, *further: str) -> str:
    """Return why no schedule keeps a cap if one microbatch alone exceeds it, and remedies, with the ``further`` ones."""
    # Of a cap in activation units, smaller microbatches take as large a share.
    smaller = ["use smaller microbatches"] * needed.in_bytes
    remedies = [f"raise the cap to at least {needed}", *smaller, "use more pipeline ranks", *further]
    return (
        f"no schedule keeps a memory cap of {cap}: pipeline rank {device} holds {needed} even if microbatches run one by "
        f"one; {', '.join(remedies[:-1])}, or {remedies[-1]}"
    )


def loosened(limit: float) -> float:
    """Return a limit raised by 1e-9 of it, the rounding error of floats.

    A peak is a sum of stages' shares: without this, 4 times 1/6 could exceed a cap of 2/3.
    """
    return limit * (1 + 1e-9)


def format_bytes(count: float) -> str:
    """Return a number of bytes as a text such as ``1.50GiB``, rounded up, which ``parse_cap`` can read."""
    for letter in "TGM":
        if count >= _FACTORS[letter]:
            return f"{math.ceil(count / _FACTORS[letter] * 100) / 100:.2f}{letter}iB"
    return f"{math.ceil(count)}B"
