"""Estimate the time and memory that it takes to build, prove and simulate a schedule, from its size alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.registry import families

_ACTION_SECONDS, _ACTION_BYTES = 60e-6, 500
"""Seconds and bytes of one action, to build, prove and simulate it on one core of 2024."""
_PAIR_SECONDS = 5e-6
"""Multiplied by the square of the number of devices, because the orders of every two devices are compared."""
_DEVICE_SECONDS = 1e-6
"""Multiplied by the cube of the number of devices: to fit an order, all devices are compared at every position."""
_BY_RULE = ("linear", "interleaved")
LARGE_SECONDS, LARGE_BYTES = 60, 2 << 30


@dataclass(frozen=True)
class ScheduleSize:
    """The number of actions of a step on all devices, and the cost of working with their schedule.

    ``seconds`` (on one core) and ``nbytes`` of memory are those to build, prove and simulate the schedule.
    """

    actions: int
    seconds: float
    nbytes: float

    @property
    def is_large(self) -> bool:
        """Return whether the computation takes over 60 seconds or 2 GiB, so that the user should be asked first."""
        return self.seconds > LARGE_SECONDS or self.nbytes > LARGE_BYTES

    def __str__(self) -> str:
        return f"{self.actions:,} actions, about {_rounded(self.nbytes)} of memory and {_lasting(self.seconds)}"


def is_fitted(name: str) -> bool:
    """Return whether computing an order is assumed to take time that grows with the cube of the number of devices.

    That holds for ``auto``, and for families that do not place stages round robin.
    """
    return name == AUTO or any(family.name == name and family.placement not in _BY_RULE for family in families())


def estimated(devices: int, microbatches: int, chunks: int, fitted: bool = True) -> ScheduleSize:
    """Estimate the actions, seconds and bytes of a schedule, within a factor of about three."""
    actions = 3 * devices * microbatches * chunks
    seconds = actions * _ACTION_SECONDS + (_DEVICE_SECONDS * devices**3 if fitted else _PAIR_SECONDS * devices**2)
    return ScheduleSize(actions, seconds, actions * _ACTION_BYTES)


def check_affordable(devices: int, microbatches: int, chunks: int, subject: str, fitted: bool = True) -> None:
    """Raise an UnsupportedError for a schedule that takes too much time or memory to compute."""
    size = estimated(devices, microbatches, chunks, fitted)
    if size.is_large:
        raise UnsupportedError(
            "too-large",
            f"{subject} {size}; take fewer devices, microbatches, chunks or slices (a tenth of the microbatches shows "
            "nearly the same), or continue with --yes",
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
