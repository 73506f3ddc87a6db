"""Bound how small and how large numbers of a configuration may be."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.core.brief import LARGEST, shortened

MOST_COUNT = 10**9
MOST_DEVICES = 10**6
_MOST_AMOUNT = 1e12


def check_counts(config: object, keys: Iterable[str], least: int = 1, most: int = MOST_COUNT) -> None:
    """Refuse whole numbers that nothing has: they would be computed with for ever.

    Args:
        config: a dataclass.
        keys: of its whole numbers.
        least: that they may be.
        most: that they may be.

    Raises:
        ConfigError: one of them is outside; it names the key.
    """
    for key in keys:
        value = getattr(config, key)
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most:,}"
            raise ConfigError(f"is {shortened(value)}; give a whole number of {limit}", key=key)


def check_amounts(config: object, keys: Iterable[str], zero: bool = False) -> None:
    """Refuse amounts that are not positive, or with which sums would not stay finite.

    Args:
        config: a dataclass.
        keys: of its amounts.
        zero: whether they may be 0.

    Raises:
        ConfigError: one of them is outside; it names the key.
    """
    for key in keys:
        value = getattr(config, key)
        if not (value >= 0 if zero else value > 0):
            raise ConfigError(f"is {value}; give {'at least' if zero else 'more than'} 0", key=key)
        if value > _MOST_AMOUNT:
            raise ConfigError(f"is {shortened(value)}; give at most {_MOST_AMOUNT:g}", key=key)


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
        raise ConfigError(f"is {shortened(value)}; give a number of at most {LARGEST:g}", key=key)
