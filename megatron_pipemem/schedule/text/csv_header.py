"""Read and write the first line of a CSV file: what a table of actions cannot say about a schedule.

``# replicas=2 devices=0-1-1-0`` (the device of every stage, for stages that run nothing), ``idle=2`` (devices that run
nothing, and have no line), ``# pieces=4``, ``# vocabulary=1`` (barriers), or
``# update_every=4 versions_kept=2 update_delay=1``. Schedules that need none of it have no such line, so that other readers of
the format take their files too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_pipemem.errors import ScheduleFormatError
from megatron_pipemem.schedule.core.action import MOST_DIGITS, shown

_LEAST = {
    "replicas": 1,
    "pieces": 1,
    "update_every": 1,
    "update_delay": 0,
    "versions_kept": 1,
    "devices": 0,
    "idle": 0,
    "vocabulary": 1,
}
_SEVERAL = ("devices", "idle")


class Header(NamedTuple):
    """Hold what the line says, or what holds without one.

    Args:
        replicas: of the model.
        pieces: sequence pieces of a microbatch.
        updates: the fields of ``WeightUpdates``.
        devices: of every stage; empty where the table shows them.
        vocabulary: barriers of vocabulary parallelism.
        idle: devices that have no line of their own.
    """

    replicas: int = 1
    pieces: int = 1
    updates: tuple[int, int, int | None] | None = None
    devices: tuple[int, ...] = ()
    vocabulary_barriers: int = 0
    idle: tuple[int, ...] = ()


def split_lines(text: str) -> list[str]:
    """Return the lines of a file, which end as files' lines do. ``str.splitlines`` knows of a dozen ends more."""
    return _LINE_END.split(text)


def write_header(header: Header) -> str:
    """Return the line with its end, or nothing if all of it is as it is without one."""
    every, kept, delay = header.updates or (None, None, None)
    settings = {
        "replicas": header.replicas if header.replicas > 1 else None,
        "devices": "-".join(map(str, header.devices)) or None,
        "idle": "-".join(map(str, header.idle)) or None,
        "pieces": header.pieces if header.pieces > 1 else None,
        "vocabulary": header.vocabulary_barriers or None,
        "update_every": every,
        "versions_kept": kept,
        "update_delay": delay,
    }
    words = [f"{name}={value}" for name, value in settings.items() if value is not None]
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
        raise ScheduleFormatError("the file has a line that starts with # already; join the two", line=marked[1] + 1)
    settings = _parse(lines[first].strip(_BLANK + "\r,").removeprefix("#"), first + 1)
    lines[first] = ""
    replicas, devices = settings.get("replicas", (1,))[0], settings.pop("devices", ())
    if devices and (len(devices) % replicas or set(devices) != set(range(max(devices) + 1))):
        raise ScheduleFormatError(
            "devices names the device of every stage, as in devices=0-1-1-0: all devices from 0 up, and as many stages "
            f"for each of {replicas} replicas",
            line=first + 1,
        )
    idle = settings.get("idle", ())
    if list(idle) != sorted(set(idle)) or (idle and (not devices or idle[-1] > max(devices))):
        raise ScheduleFormatError(
            "idle names devices without actions, in order, as in devices=0-1-2 idle=0-2; devices must be there too",
            line=first + 1,
        )
    updates = None
    if "update_every" in settings or "versions_kept" in settings or "update_delay" in settings:
        try:
            delay = settings.get("update_delay", (None,))[0]
            updates = (settings["update_every"][0], settings["versions_kept"][0], delay)
        except KeyError as missing:
            raise ScheduleFormatError(f"weight updates need {missing.args[0]} too; add it", line=first + 1) from None
    pieces, barriers = settings.get("pieces", (1,))[0], settings.get("vocabulary", (0,))[0]
    return Header(replicas, pieces, updates, devices, barriers, idle), "\n".join(lines)


def _parse(line: str, number: int) -> dict[str, tuple[int, ...]]:
    settings = {}
    for word in line.split():
        name, _, value = word.partition("=")
        numbers = value.split("-")
        if (
            name not in _LEAST
            or (len(numbers) > 1 and name not in _SEVERAL)
            or not all(_NUMBER.fullmatch(each) and int(each) >= _LEAST[name] for each in numbers)
        ):
            raise ScheduleFormatError(
                f"{shown(word)} is no setting; write name=number, as in replicas=2, with {MOST_DIGITS} digits at most (names: "
                f"{', '.join(_LEAST)})",
                line=number,
            )
        settings[name] = tuple(map(int, numbers))
    return settings


_LINE_END = re.compile(r"\r\n|\r|\n")
_NUMBER = re.compile(rf"[0-9]{{1,{MOST_DIGITS}}}")
# Spreadsheets put the first at the start of a file.
_BLANK = "\ufeff \t"
