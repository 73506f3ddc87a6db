"""Check the numbers of a configuration against limits, and convert its values to the types of their fields.

pydantic would not make this shorter. It turns text and ``true`` into numbers, does not check dataclasses that a program
makes, and its messages lack the allowed values of a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.display import LARGEST, shortened
from megatron_pipemem.schedule.options import WHOLE, Limit

MOST_DEVICES = 10**6
MOST_LAYERS = 1_000
"""The most layers of a model. Cuts into stages are compared in tables with a row and a column for each layer."""


Count = Annotated[int, Limit(1, 10**9)]
CountOrZero = Annotated[int, Limit(0, 10**9)]
Layers = Annotated[int, Limit(1, MOST_LAYERS)]
LayersOrZero = Annotated[int, Limit(0, MOST_LAYERS)]
Devices = Annotated[int, Limit(1, MOST_DEVICES)]
Amount = Annotated[float, Limit(0, 1e12, above=True)]
AmountOrZero = Annotated[float, Limit(0, 1e12)]
Part = Annotated[float, Limit(0, 1.0, above=True)]


class Limited:
    """A dataclass that checks its numbers against the ``Limit`` in their annotations, however it is made."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        for key, limit in _limits(kind):
            if (value := getattr(self, key)) is not None:
                refuse_if(problem := limit.problem(value), "bad-number", key, str(problem))


@cache
def _limits(kind: type) -> list[tuple[str, Limit]]:
    hints = get_type_hints(kind, include_extras=True)
    parts = [
        (key, part)
        for key, hint in hints.items()
        for argument in (hint, *get_args(hint))
        for part in get_args(argument)
    ]
    return list(dict.fromkeys((key, part) for key, part in parts if isinstance(part, Limit)))


def refuse_if(wrong: object, code: str, key: str, message: str) -> None:
    """Raise a ConfigError about ``key``, with this code and message, if ``wrong`` is true."""
    if wrong:
        raise ConfigError(code, message, key=key)


def whole_number(value: Any, name: str) -> int | None:
    """Return the value of a flag as a whole number; ``None`` without a value. ``name`` has no dashes in front."""
    return None if value is None else int(WHOLE.read(f"--{name}", value))


def check_magnitudes(value: object, key: str = "") -> None:
    """Raise a ConfigError if a JSON value contains a number so large that sums would not stay finite.

    ``key`` is the dotted key of the value, for the message.
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
    """Return a value of YAML or JSON as the type of an annotation: a list as a tuple, a whole number as a float.

    The annotations are those of ``_WANTED``, ``Any``, enumerations, and ``tuple[T, ...]``, ``list[T]``, ``dict[K, T]``
    and ``Literal``, each also with ``| None``. Dataclasses are converted in ``loading``. For them, only ``None`` is
    allowed here.

    Raises:
        ValueError: the value does not fit. The message says which values do.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (hint,) = (member for member in arguments if member is not NoneType)
        return converted(value, hint)
    if origin is Literal and (text := "off" if value is False else str(value)) in arguments:  # YAML reads off as false
        return text
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        return origin(converted(member, arguments[0]) for member in value)
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            _named("one of its keys", key, arguments[0]): _named(f"its key {shortened(key)}", member, arguments[1])
            for key, member in value.items()
        }
    if _is_enumeration(hint) and value in set(hint):
        return hint(value)
    if hint is bool and isinstance(value, bool):
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int and number and value == value // 1:
        return int(value)
    if hint is float and number:
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"is {shortened(value)}, which is too large; give a smaller number") from error
    if hint is str and (number or isinstance(value, str)):
        return str(value)
    raise ValueError(f"is {shortened(value)}; give {_wanted(hint, origin, arguments)}")


def _named(name: str, value: Any, hint: Any) -> Any:
    """Convert a key or value of a mapping. An error begins with ``name``, which says what it is."""
    try:
        return converted(value, hint)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _is_enumeration(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, (Enum, Kind))


_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text, in quotes if YAML would read it otherwise",
    tuple: "a list of values",
    list: "a list of values",
    dict: "a mapping of keys to values",
}


def _wanted(hint: Any, origin: Any, arguments: tuple) -> str:
    if origin is Literal:
        *most, last = map(str, arguments)
        return f"{', '.join(most)} or {last}" if most else last
    if _is_enumeration(hint):
        return f"one of {', '.join(map(str, hint))}"
    return _WANTED.get(origin or hint, "a name or a mapping")
