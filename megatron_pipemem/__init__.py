"""Pipeline schedules with controllable memory for stock Megatron-Core.

Importing this package changes nothing anywhere and needs neither torch nor Megatron; ``enable()`` attaches a schedule to
Megatron-Core, ``disable()`` takes it off again.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megatron_pipemem.errors import PipememError, ScheduleError, UnknownScheduleError, UnsupportedError, UpstreamError
from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate
from megatron_pipemem.schedule.core.validator import validate
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.registry import build_schedule, register_schedule
from megatron_pipemem.schedule.search import SearchResult, search_schedule

try:
    __version__ = version("megatron-pipemem")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

_NEEDS_MEGATRON = ("enable", "disable", "write_report", "build_model_chunks", "place_model_chunks")

__all__ = [
    "Action",
    "Costs",
    "Family",
    "Formula",
    "Kind",
    "PipememError",
    "Placement",
    "Schedule",
    "ScheduleError",
    "SearchResult",
    "Timeline",
    "UnknownScheduleError",
    "UnsupportedError",
    "UpstreamError",
    "build_schedule",
    "register_schedule",
    "search_schedule",
    "simulate",
    "validate",
    *_NEEDS_MEGATRON,
]


def __getattr__(name: str):
    if name in _NEEDS_MEGATRON:
        from megatron_pipemem.mcore import INSTALL, is_installed

        if not is_installed():
            raise UpstreamError(f"megatron_pipemem.{name} needs Megatron: {INSTALL}")
        from megatron_pipemem.mcore import plugin

        return getattr(plugin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
