"""Say which values the keys of a configuration take: bounds of numbers, and conversion to the annotation of a field."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.action import Kind
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


def converted(value: Any, hint: Any) -> Any:
    """Convert a value to that type: lists become tuples, whole numbers floats, numbers text.

    Args:
        value: as YAML or JSON gives it.
        hint: ``Any``, ``bool``, ``int``, ``float``, ``str``, an enumeration, ``Literal``, ``tuple[T, ...]``, ``list[T]``,
            ``dict[K, T]``, or one of them with ``| None``. For a dataclass nothing but ``None`` fits: whoever knows its
            fields converts them.

    Raises:
        ValueError: it does not fit; the message says what would.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (hint,) = (each for each in arguments if each is not NoneType)
        return converted(value, hint)
    if origin is Literal and (text := "off" if value is False else str(value)) in arguments:  # YAML reads off as false
        return text
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        return origin(converted(each, arguments[0]) for each in value)
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            _within("has a key that", key, arguments[0]): _within(f"holds under {key!r} what", each, arguments[1])
            for key, each in value.items()
        }
    if _is_enumeration(hint) and value in set(hint):
        return hint(value)
    if hint is bool and isinstance(value, bool):
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int and number and value == value // 1:
        return int(value)
    if hint is float and number:
        return _as_float(value)
    if hint is str and (number or isinstance(value, str)):
        return str(value)
    raise ValueError(f"is {shortened(value)}; give {_wanted(hint, origin, arguments)}")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"is {shortened(value)}, which is too large") from error


def _within(words: str, value: Any, hint: Any) -> Any:
    try:
        return converted(value, hint)
    except ValueError as error:
        raise ValueError(f"{words} {error}") from error


def _is_enumeration(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, (Enum, Kind))


def _wanted(hint: Any, origin: Any, arguments: tuple) -> str:
    if origin is Literal:
        *most, last = map(str, arguments)
        return f"{', '.join(most)} or {last}" if most else last
    if origin in (tuple, list):
        return "a list of values"
    if origin is dict:
        return "a mapping of keys to values"
    if _is_enumeration(hint):
        return f"one of {', '.join(map(str, hint))}"
    return {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text, in quotes if YAML would read it otherwise",
    }.get(hint, "a name or a mapping")
