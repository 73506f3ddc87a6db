"""Tell how much host memory is left to a process, within the limits of its container or batch job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

# By controller in /proc/self/cgroup, which is empty for version 2: the folder of its groups, and the names of a group's limit,
# of what it uses, and of the part of that which is cached files and given up on demand.
_LIMITS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the least of what the machine has available and what the limits of all control groups around this process
    leave.

    Args:
        groups: lists them, as proc(5) and cgroups(7) say.
        mounted: where their files are, in version 1 or 2.
    """
    return max(0, min([psutil.virtual_memory().available, *_left_by_limits(groups, mounted)]))


def _left_by_limits(groups: Path, mounted: Path) -> Iterator[int]:
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & set(_LIMITS):
            folder, *names = _LIMITS[controller]
            group = mounted / folder
            # In a container the path may be one outside of it, which is not there; the limit is then at the root.
            for part in ("", *(part for part in path.split("/") if part)):
                group /= part
                if (left := _left_in(group, *names)) is not None:
                    yield left


def _left_in(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Return what a group may still take; ``None`` where it has no limit."""
    try:
        most = (group / limit).read_text(encoding="utf-8").strip()
        used = int((group / usage).read_text(encoding="utf-8"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except OSError:
        return None
    return None if most == "max" else int(most) - used + int(statistics.get(cached, 0))
