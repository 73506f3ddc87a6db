"""The source of a run's schedules, for settings as short as tests want to write them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pipemem.conflicts import check
from megatron_pipemem.mcore.plugin import source_for
from megatron_pipemem.mcore.source import Source
from megatron_pipemem.request import Request


def source_of(
    schedule: str,
    memory_cap: float | str | None = None,
    costs: str = "unit",
    options: Mapping[str, object] | None = None,
    **settings: object,
) -> Source:
    """As a run has it that is enabled with these settings."""
    request = Request(schedule, memory_cap, costs=costs, options=options or {}, **settings)
    source, _ = source_for(check(request))
    return source
