"""Pipeline schedules with controllable memory for stock Megatron-Core.

Importing this package changes nothing in Megatron and needs neither torch nor Megatron. ``enable()`` attaches a
schedule to Megatron-Core, and ``disable()`` detaches it. The module of a public name is imported when the name is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _NAMES_BY_MODULE, for editors and type checkers
    from megatron_pipemem.errors import PipememError as PipememError
    from megatron_pipemem.errors import ScheduleError as ScheduleError
    from megatron_pipemem.errors import UnknownScheduleError as UnknownScheduleError
    from megatron_pipemem.errors import UnsupportedError as UnsupportedError
    from megatron_pipemem.errors import UpstreamError as UpstreamError
    from megatron_pipemem.mcore.plugin import build_model_chunks as build_model_chunks
    from megatron_pipemem.mcore.plugin import disable as disable
    from megatron_pipemem.mcore.plugin import enable as enable
    from megatron_pipemem.mcore.plugin import place_model_chunks as place_model_chunks
    from megatron_pipemem.mcore.plugin import settle as settle
    from megatron_pipemem.mcore.plugin import write_report as write_report
    from megatron_pipemem.schedule.action import Action as Action
    from megatron_pipemem.schedule.action import Kind as Kind
    from megatron_pipemem.schedule.action import KindSpec as KindSpec
    from megatron_pipemem.schedule.action import Need as Need
    from megatron_pipemem.schedule.action import register_kind as register_kind
    from megatron_pipemem.schedule.costs import Costs as Costs
    from megatron_pipemem.schedule.family import Family as Family
    from megatron_pipemem.schedule.family import Formula as Formula
    from megatron_pipemem.schedule.placement import Placement as Placement
    from megatron_pipemem.schedule.registry import build_schedule as build_schedule
    from megatron_pipemem.schedule.registry import register_schedule as register_schedule
    from megatron_pipemem.schedule.schedule import Schedule as Schedule
    from megatron_pipemem.schedule.simulator import Timeline as Timeline
    from megatron_pipemem.schedule.simulator import simulate as simulate
    from megatron_pipemem.schedule.validator import validate as validate
    from megatron_pipemem.search import SearchResult as SearchResult
    from megatron_pipemem.search import search_schedule as search_schedule

    __version__: str

_NAMES_BY_MODULE = {
    "errors": "PipememError ScheduleError UnknownScheduleError UnsupportedError UpstreamError",
    "mcore.plugin": "enable disable settle write_report build_model_chunks place_model_chunks",
    "schedule.action": "Action Kind KindSpec Need register_kind",
    "schedule.costs": "Costs",
    "schedule.placement": "Placement",
    "schedule.schedule": "Schedule",
    "schedule.simulator": "Timeline simulate",
    "schedule.validator": "validate",
    "schedule.family": "Family Formula",
    "schedule.registry": "build_schedule register_schedule",
    "search": "SearchResult search_schedule",
}
"""The public names of this package, by the module that defines them."""

_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
_NEEDS_MEGATRON = _NAMES_BY_MODULE["mcore.plugin"].split()

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEEDS_MEGATRON:
        from megatron_pipemem.mcore import INSTALL, is_installed

        if not is_installed():
            from megatron_pipemem.errors import UpstreamError

            raise UpstreamError("not-installed", f"megatron_pipemem.{name} needs Megatron: {INSTALL}")
    value = getattr(import_module(f"megatron_pipemem.{_MODULE_OF[name]}"), name)
    if _MODULE_OF[name].startswith("schedule."):
        from megatron_pipemem.schedule.display import draw_with
        from megatron_pipemem.tools_by_flag import BROWSER

        draw_with(BROWSER)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("megatron-pipemem")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"
