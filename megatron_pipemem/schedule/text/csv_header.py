"""Read and write the first line of a CSV file: what a table of actions cannot say about a schedule.

``# replicas=2 devices=0-1-1-0`` (the device of every stage, for stages that run nothing), ``idle=2`` (devices that run
nothing, and have no line), ``# slices=4``, ``# vocabulary=1`` (barriers), or
``# update_every=4 versions_kept=2 update_delay=1``. Schedules that need none of it have no such line, so that other readers of
the format take their files too.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from megatron_pipemem.errors import ScheduleFormatError
from megatron_pipemem.schedule.action import MOST_DIGITS, shown

_FROM_ZERO = ("devices", "idle", "update_delay")
_SEVERAL = ("devices", "idle")
_FORMER_NAMES = {"pieces": "slices"}
"""Of files that earlier versions wrote."""


class Header(NamedTuple):
    """Hold what the line says, or what holds without one. The fields are the words of the line.

    Args:
        replicas: of the model.
        devices: of every stage; empty where the table shows them.
        idle: devices that have no line of their own.
        slices: sequence slices of a microbatch.
        vocabulary: barriers of vocabulary parallelism.
        update_every: of ``WeightUpdates``, as the two that follow.
        versions_kept: of them.
        update_delay: of them.
    """

    replicas: int = 1
    devices: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    slices: int = 1
    vocabulary: int = 0
    update_every: int | None = None
    versions_kept: int | None = None
    update_delay: int | None = None


def split_lines(text: str) -> list[str]:
    """Return the lines of a file, which end as files' lines do. ``str.splitlines`` knows of a dozen ends more."""
    return _LINE_END.split(text)


def write_header(header: Header) -> str:
    """Return the line with its end, or nothing if all of it is as it is without one."""
    said = ((name, value) for name, value in header._asdict().items() if value != Header._field_defaults[name])
    words = [f"{name}={'-'.join(map(str, value)) if name in _SEVERAL else value}" for name, value in said]
    return f"# {' '.join(words)}\n" if words else ""


def read_header(text: str) -> tuple[Header, str]:
    """Return the header, and the text with its line blank.

    Raises:
        ScheduleFormatError: a line that starts with ``#`` is no header; there is a second one; settings of weight updates
            lack one another; or the devices make no placement of so many replicas.
    """
    lines = split_lines(text)
    marked = [number for number, line in enumerate(lines) if line.lstrip(_BLANK).startswith("#")]
    if not marked:
        return Header(), text
    first = marked[0]
    if len(marked) > 1:
        raise ScheduleFormatError(
            "bad-header", "the file has a line that starts with # already; join the two", line=marked[1] + 1
        )
    header = Header(**_parse(lines[first].strip(_BLANK + "\r,").removeprefix("#"), first + 1))
    lines[first] = ""
    replicas, devices, idle, *_ = header
    if devices and (len(devices) % replicas or set(devices) != set(range(max(devices) + 1))):
        raise ScheduleFormatError(
            "bad-header",
            "devices names the device of every stage, as in devices=0-1-1-0: all devices from 0 up, and as many stages "
            f"for each of {replicas} replicas",
            line=first + 1,
        )
    if list(idle) != sorted(set(idle)) or (idle and (not devices or idle[-1] > max(devices))):
        raise ScheduleFormatError(
            "bad-header",
            "idle names devices without actions, in order, as in devices=0-1-2 idle=0-2; devices must be there too",
            line=first + 1,
        )
    missing = [name for name in ("update_every", "versions_kept") if getattr(header, name) is None]
    if missing and header[-3:] != (None, None, None):
        raise ScheduleFormatError("bad-header", f"weight updates need {missing[0]} too; add it", line=first + 1)
    return header, "\n".join(lines)


def _parse(line: str, number: int) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for word in line.split():
        name, _, value = word.partition("=")
        name = _FORMER_NAMES.get(name, name)
        numbers = value.split("-")
        if (
            name not in Header._fields
            or (len(numbers) > 1 and name not in _SEVERAL)
            or not all(_NUMBER.fullmatch(each) and int(each) >= (name not in _FROM_ZERO) for each in numbers)
        ):
            raise ScheduleFormatError(
                "bad-header",
                f"{shown(word)} is no setting; write name=number, as in replicas=2, with {MOST_DIGITS} digits at most (names: "
                f"{', '.join(Header._fields)})",
                line=number,
            )
        settings[name] = tuple(map(int, numbers)) if name in _SEVERAL else int(value)
    return settings


_LINE_END = re.compile(r"\r\n|\r|\n")
_NUMBER = re.compile(rf"[0-9]{{1,{MOST_DIGITS}}}")
# Spreadsheets put the first at the start of a file.
_BLANK = "\ufeff \t"
