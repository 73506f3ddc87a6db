"""Complete names of schedules and files that are typed in the shell."""

from __future__ import annotations

from pathlib import Path

from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.registry import families

_SUFFIXES = (".csv", ".txt")


def complete_families(incomplete: str) -> list[tuple[str, str]]:
    """Return schedules of the table, with what they are good for."""
    return [(each.name, each.summary) for each in families() if each.name.startswith(incomplete)]


def complete_schedules(incomplete: str) -> list[tuple[str, str]]:
    """Return also ``auto``, schedule files, and the folders on the way to them."""
    found = complete_families(incomplete)
    if AUTO.startswith(incomplete):
        found.append((AUTO, "the fastest that a search finds"))
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") else typed.parent
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        told = f"{path}/" if path.is_dir() else str(path)
        if told.startswith(incomplete) and incomplete and (path.is_dir() or path.suffix in _SUFFIXES):
            found.append((told, "a folder" if path.is_dir() else "a schedule file"))
    return found
