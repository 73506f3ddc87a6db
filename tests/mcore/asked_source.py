"""The source of a run's schedules, for settings as short as tests want to write them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pipemem.mcore.plugin import Settings, source_for
from megatron_pipemem.mcore.source import Source


def source_of(
    schedule: str,
    memory_cap: float | str | None = None,
    costs: str = "unit",
    options: Mapping[str, object] | None = None,
    **settings: object,
) -> Source:
    """As a run has it that is enabled with these settings."""
    source, _ = source_for(Settings(schedule, memory_cap, costs, options=options or {}, **settings))
    return source
