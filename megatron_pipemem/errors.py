"""Define every error that a user can cause. Each message says what is wrong, where, and what to change."""

from __future__ import annotations

from typing import Any


class PipememError(Exception):
    """Base class of all errors raised on purpose by this package.

    Args:
        code: the kind of mistake, one of ``CODES``. It stays the same when the message is reworded.
        message: what is wrong and how to mend it. Classes below put in front of it where the mistake is.
    """

    def __init__(self, code: str, message: str = ""):
        code, message = _coded(code, message)
        self.code = code
        super().__init__(message)

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args), self.__dict__


def _coded(code: str, message: str) -> tuple[str, str]:
    """Return code and message, of an error that is raised with a message alone too."""
    return (code, message) if message else ("", code)


def _restored(error: type[PipememError], args: tuple[Any, ...]) -> PipememError:
    """Return a copy of an error without its attributes, which pickle sets."""
    copy = error.__new__(error)
    copy.args = args
    return copy


def with_code(error: BaseException) -> str:
    """Return the message of an error as users see it: an error of this package ends with its code, ``... [deadlock]``."""
    return f"{error} [{error.code}]" if isinstance(error, PipememError) and error.code else str(error)


class ScheduleError(PipememError, ValueError):
    """A schedule that must not run: incomplete, badly ordered, deadlocking, or over its memory cap.

    Args:
        code: see ``PipememError``.
        message: what is wrong and how to mend it.
        at: the device whose order is at fault, the position in that order (or program), and the action there, as far as known.
        cycle: of a deadlock, the devices that wait for one another (``schedule.core.walk.Wait``): every one for the next,
            and the last for the first.
    """

    def __init__(self, code: str, message: str = "", *, at: tuple[Any, ...] = (), cycle: tuple[Any, ...] = ()):
        code, message = _coded(code, message)
        self.cycle = cycle
        self.device, self.position, action = (*at, None, None, None)[:3]
        self.action = None if action is None else str(action)
        known = {"device": self.device, "position": self.position, "action": self.action}
        place = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        super().__init__(code, f"{place}: {message}" if place else message)


class ScheduleFormatError(PipememError, ValueError):
    """Say that text cannot be read as a schedule.

    Args:
        code: see ``PipememError``.
        message: one sentence: what is wrong, and what to change.
        line: number of the line, from 1.
        column: number of the character within the line, or for CSV of the cell, from 1.
    """

    def __init__(self, code: str, message: str = "", *, line: int | None = None, column: int | None = None):
        code, message = _coded(code, message)
        self.line = line
        self.column = column
        place = f"line {line}" if line is not None else ""
        if column is not None:
            place += f", column {column}"
        super().__init__(code, f"{place}: {message}" if place else message)


class UnknownScheduleError(PipememError, KeyError):
    """No schedule of that name is registered."""


class CostsError(PipememError, ValueError):
    """Costs that do not fit the schedule or cannot be read."""


class UnsupportedError(PipememError, ValueError):
    """A combination that this package refuses, with the reason and the way out in one sentence."""


class MemoryCapError(UnsupportedError):
    """Say that nothing keeps a memory cap, whatever leaves the device or is recomputed.

    Args:
        code: see ``PipememError``.
        message: what is wrong and how to mend it.
        obstacles: why activations stay that would have to leave.
    """

    def __init__(self, code: str, message: str = "", obstacles: tuple[str, ...] = ()):
        self.obstacles = obstacles
        super().__init__(code, message)


class UpstreamError(PipememError, ImportError):
    """A symbol of Megatron-Core is missing or has another signature than the tested versions have."""


class VocabularyError(PipememError, ValueError):
    """A layer that is sharded over the vocabulary was given something that does not fit its shard."""


class OffloadError(PipememError, RuntimeError):
    """Activations could not be moved, or were used while they were away."""


class OutputError(PipememError, OSError):
    """A file that cannot be written."""


class ConfigError(PipememError, ValueError):
    """A configuration that cannot be read or makes no sense.

    Args:
        code: see ``PipememError``.
        message: what is wrong and what would be right.
        key: dotted path of the key at fault, if one is.
        file: where it is from, if from a file.
    """

    def __init__(self, code: str, message: str = "", *, key: str | None = None, file: object | None = None):
        code, message = _coded(code, message)
        self.message = message
        self.key = key
        self.file = None if file is None else str(file)
        place = ", ".join(part for part in (self.file, None if key is None else f"key {key}") if part)
        super().__init__(code, f"{place}: {message}" if place else message)
