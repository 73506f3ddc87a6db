"""Bound how small and how large numbers of a configuration may be."""

from __future__ import annotations

from functools import cache
from typing import Annotated, NamedTuple, get_args, get_type_hints

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.display import LARGEST, shortened

MOST_DEVICES = 10**6


class Limit(NamedTuple):
    """Bound a number: what nothing has would be computed with for ever, or sums of it would not stay finite.

    Args:
        least: that it may be.
        most: that it may be; a whole number where only such are meant.
        above: whether ``least`` itself is too small.
    """

    least: int
    most: float
    above: bool = False

    def check(self, value: float, key: str) -> None:
        """Raises ConfigError: the value of that key is outside."""
        enough = value > self.least if self.above else value >= self.least
        if enough and value <= self.most:
            return
        count, form = ("a whole number of ", ",") if isinstance(self.most, int) else ("", "g")
        limit = f"at most {self.most:{form}}" if enough else f"{'more than' if self.above else 'at least'} {self.least}"
        raise ConfigError("bad-number", f"is {shortened(value)}; give {count}{limit}", key=key)


Count = Annotated[int, Limit(1, 10**9)]
CountOrZero = Annotated[int, Limit(0, 10**9)]
Devices = Annotated[int, Limit(1, MOST_DEVICES)]
Amount = Annotated[float, Limit(0, 1e12, above=True)]
AmountOrZero = Annotated[float, Limit(0, 1e12)]
Part = Annotated[float, Limit(0, 1.0, above=True)]


class Limited:
    """A dataclass whose annotations bound its numbers, where they are not ``None``.

    Raises:
        ConfigError: one of them is outside; it names the key.
    """

    def __post_init__(self) -> None:
        kind: type = type(self)
        for key, limit in _limits(kind):
            if (value := getattr(self, key)) is not None:
                limit.check(value, key)


@cache
def _limits(kind: type) -> list[tuple[str, Limit]]:
    hints = get_type_hints(kind, include_extras=True)
    parts = [(key, part) for key, hint in hints.items() for each in (hint, *get_args(hint)) for part in get_args(each)]
    return list(dict.fromkeys((key, part) for key, part in parts if isinstance(part, Limit)))


def check_magnitudes(value: object, key: str = "") -> None:
    """Refuse numbers with which sums would not stay finite, anywhere in what a file says.

    Args:
        value: as JSON gives it.
        key: of the value, for the error.

    Raises:
        ConfigError: one of them is too large; it names the key.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            check_magnitudes(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_magnitudes(inner, key)
    elif isinstance(value, int | float) and abs(value) > LARGEST:
        raise ConfigError("bad-number", f"is {shortened(value)}; give a number of at most {LARGEST:g}", key=key)
