"""Estimate what schedules take to be built, proved and simulated, from their size alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.registry import families

_ACTION_SECONDS, _ACTION_BYTES = 60e-6, 500
"""Of one core of 2024, to build, prove and simulate."""
_PAIR_SECONDS = 5e-6
"""Times the square of the number of devices: orders of devices are compared."""
_DEVICE_SECONDS = 1e-6
"""Times its cube: an order that is fitted to times and memory weighs all devices at every place in it."""
_BY_RULE = ("linear", "interleaved")
LARGE_SECONDS, LARGE_BYTES = 60, 2 << 30


@dataclass(frozen=True)
class ScheduleSize:
    """Hold the actions of a step on all devices, the seconds of a core, and the bytes of memory that they take."""

    actions: int
    seconds: float
    nbytes: float

    @property
    def is_large(self) -> bool:
        """Return whether the user should be asked first."""
        return self.seconds > LARGE_SECONDS or self.nbytes > LARGE_BYTES

    def __str__(self) -> str:
        return f"{self.actions:,} actions, about {_rounded(self.nbytes)} of memory and {_lasting(self.seconds)}"


def is_fitted(name: str) -> bool:
    """Return whether the order of a family, ``auto`` or a file is fitted to all devices' times and memory. Others follow a
    rule, or stand in a file.
    """
    return name == AUTO or any(each.name == name and each.placement not in _BY_RULE for each in families())


def estimated(devices: int, microbatches: int, chunks: int, fitted: bool = True) -> ScheduleSize:
    """Estimate the size within a factor of three or so; see ``is_fitted``. Searches keep to the time that they are given."""
    actions = 3 * devices * microbatches * chunks
    seconds = actions * _ACTION_SECONDS + (_DEVICE_SECONDS * devices**3 if fitted else _PAIR_SECONDS * devices**2)
    return ScheduleSize(actions, seconds, actions * _ACTION_BYTES)


def check_affordable(devices: int, microbatches: int, chunks: int, what: str, fitted: bool = True) -> None:
    """Refuse what takes long, or much memory, before it is begun. ``what`` begins the message: "--devices 9 and --microbatches
    9 make".

    Raises:
        UnsupportedError: it is too large; the message says how much it takes.
    """
    size = estimated(devices, microbatches, chunks, fitted)
    if size.is_large:
        raise UnsupportedError(
            "too-large",
            f"{what} {size}; take fewer (a tenth of the microbatches tells nearly as much), or go on with --yes",
        )


def _rounded(nbytes: float) -> str:
    for exponent, letter in ((4, "T"), (3, "G"), (2, "M")):
        if nbytes >= 1 << 10 * exponent:
            return f"{nbytes / (1 << 10 * exponent):,.3g} {letter}iB"
    return "1 MiB"


def _lasting(seconds: float) -> str:
    for length, name in ((365 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.3g} {name}"
    return f"{seconds:.0f} seconds"
