"""Convert a value from a file to what the annotation of a dataclass's field wants."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.display import shortened


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
