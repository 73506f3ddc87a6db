"""Draw runs: in the terminal, as PNG, SVG and HTML, and as traces for Perfetto. All take the simulator's ``Timeline``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_pipemem.files import check_suffix, write_whole
from megatron_pipemem.report.picture import write_picture
from megatron_pipemem.report.terminal import TerminalTimeline
from megatron_pipemem.schedule.simulator import Timeline

SUFFIXES = (".png", ".svg", ".html", ".json")

__all__ = ["SUFFIXES", "TerminalTimeline", "save_comparison", "save_timeline"]


def save_timeline(timeline: Timeline, path: str | Path) -> Path:
    """Draw one run with its held memory; otherwise as ``save_comparison``."""
    return save_comparison([timeline], path)


def save_comparison(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Draw runs under one another on one time axis; the suffix of ``path`` chooses PNG, SVG, HTML or a Perfetto trace
    (``.json``).

    Folders are made as needed. Returns the path.

    Raises:
        UnsupportedError: the suffix is none of these, or matplotlib is missing.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    check_suffix(path, SUFFIXES, "a picture")
    if path.suffix == ".json":
        from megatron_pipemem.report.perfetto import to_json

        return write_whole(path, to_json(timelines))
    if path.suffix == ".html":
        from megatron_pipemem.report.html import page

        return write_whole(path, page(timelines))
    from megatron_pipemem.report import figure

    return write_picture(lambda: figure.draw(timelines), path, "a picture", ", or write .html instead")
