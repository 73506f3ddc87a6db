"""Draw timelines into files. The modules of this package also draw in the terminal and in notebooks.

Files are PNG, SVG, HTML or Perfetto traces. A timeline is a simulated or a measured run (``Timeline``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_pipemem.files import check_suffix, write_whole
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.tools.report.figure import IMAGES, draw, write_picture

SUFFIXES = (*IMAGES, ".html", ".json")

__all__ = ["SUFFIXES", "save_comparison", "save_timeline"]


def save_timeline(timeline: Timeline, path: str | Path) -> Path:
    """Draw one timeline and its memory into a file, as ``save_comparison`` does."""
    return save_comparison([timeline], path)


def save_comparison(timelines: Sequence[Timeline], path: str | Path, cap: MemoryCap | None = None) -> Path:
    """Draw timelines below each other on one time axis into a file, and return its path.

    The suffix of ``path`` chooses PNG, SVG, HTML or a Perfetto trace (``.json``). Missing folders are made. Pictures have a
    line at ``cap``, the memory cap that the schedules keep. In HTML it must be one number of activation units.
    """
    path = Path(path)
    check_suffix(path, SUFFIXES, "a picture")
    if path.suffix in IMAGES:
        return write_picture(lambda: draw(timelines, cap), path, "a picture", ", or write .html instead")
    from megatron_pipemem.tools.report.browser import to_json
    from megatron_pipemem.tools.report.page import page

    if path.suffix == ".json":
        return write_whole(path, to_json(timelines))
    has_one = cap is not None and not cap.in_bytes and len(cap.amounts) == 1
    return write_whole(path, page(timelines, cap.amounts[0] if cap is not None and has_one else 1.0))
