"""Check the numbers of costs, whoever gives them: a program or a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.brief import LARGEST, shortened

Several = float | Sequence[float]


def number(what: str, value: object, wanted: str = "a number") -> float:
    """Return a number of any library as a float.

    Args:
        what: its name, for the error's sentence.
        value: the number.
        wanted: what else would do, for the error's sentence.

    Raises:
        CostsError: it is no number, or larger than ``LARGEST``.
    """
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError):
        found = math.nan
    if not abs(found) <= LARGEST:
        give = f"numbers of at most {LARGEST:g}" if abs(found) > LARGEST else wanted
        raise CostsError("bad-type", f"{what} is {shortened(value)}; give {give}")
    return found


def numbers(what: str, value: object) -> Several:
    """Return a number as ``number`` does, or a tuple of several."""
    if (several := listed_objects(value)) is not None:
        return tuple(number(what, each) for each in several)
    return number(what, value, "a number, or a list of one per stage")


def listed_objects(value: object) -> list[Any] | None:
    """Return what a sequence of any library holds (arrays and tensors are no ``Sequence``); ``None`` if it holds nothing or
    is something else.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Sized) or not isinstance(value, Iterable):
        return None
    return list(value) or None


def price(what: str, value: object, kind: Kind | None = None, *, several: bool = True) -> Several:
    """Return seconds.

    Args:
        what: name of the price, for the error's sentence.
        value: one number or several.
        kind: of the action that takes them, if one does.
        several: whether there may be more than one.

    Raises:
        CostsError: one is no number of at least 0.
    """
    seconds = numbers(what, value) if several else number(what, value)
    if (least := min(listed(seconds))) < 0:
        raise CostsError("bad-number", f"cost of {kind or what} is negative: {least}")
    return seconds


def shared(values: Sequence[float], slices: int) -> tuple[float, ...]:
    """Return one value per stage and slice, stage by stage, where every slice has an equal share of its stage's."""
    return tuple(values) if slices == 1 else tuple(value / slices for value in values for _ in range(slices))


def listed(value: Several) -> Sequence[float]:
    """Return one number as a list of one."""
    return value if isinstance(value, Sequence) else (value,)
