"""The programs of a run, for settings as short as tests want to write them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pipemem.conflicts import check
from megatron_pipemem.features.offload import megatron as offload
from megatron_pipemem.mcore.plugin import programs_for
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.request import Request


def programs_of(
    schedule: str,
    memory_cap: float | str | None = None,
    costs: str = "unit",
    options: Mapping[str, object] | None = None,
    **settings: object,
) -> ProgramStore:
    """As a run has it that is enabled with these settings."""
    request = check(Request(schedule, memory_cap, costs=costs, options=options or {}, **settings))
    programs = programs_for(request)
    if request.may_offload:
        offload.extensions(request, programs, None)
    return programs
