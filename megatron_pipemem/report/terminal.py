"""Draw a timeline in the terminal: one line per device, coloured cells, readable without colour too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from megatron_pipemem.report.timeline import Box, DrawnRun, HostTransfer, common_end, ink
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.simulator import Timeline

_MAX_CELL = 4
"""Columns of the shortest action when there is room: ``F12`` and a gap."""


@dataclass(frozen=True)
class TerminalTimeline:
    """A rich renderable, as wide as the console at most.

    Without colour the letter tells the kind, upper case the first chunk and lower case the later ones; dashes continue
    an action and blanks are idle. A run too long for the width is squeezed: every column then shows only the letter of
    what fills most of it.

    Args:
        timeline: the run.
        beside: the runs it is compared with; all are drawn on one time axis, but for a run of more than twice the length
            of most, which has its own and says so.
    """

    timeline: Timeline
    beside: Sequence[Timeline] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline, drawn = self.timeline, DrawnRun(self.timeline)
        rows, lanes = drawn.rows, drawn.host_transfers
        runs = (timeline, *self.beside)
        margin = max(len(f"device {run.schedule.num_devices - 1} ") for run in runs)
        peaks = [f" {drawn.memory_text(peak)}" for peak in timeline.peaks]
        widest = max(len(f" {DrawnRun(run).memory_text(peak)}") for run in runs for peak in run.peaks)
        header = "peak"
        room = max(10, options.max_width - margin - max(len(header) + 1, widest) - 2)
        shared = [run for run in runs if run.makespan <= common_end(runs)]
        scale, squeezed = _columns_per_second(shared, room)
        common = scale
        if timeline not in shared:
            scale, squeezed = _columns_per_second([timeline], room)
        width = min(room, max(1, round(timeline.makespan * scale)))
        yield Text(drawn.headline, style="bold")
        yield Text(" " * (margin + width + 2) + f" {header}", style="dim", no_wrap=True)
        for device, (row, peak) in enumerate(zip(rows, peaks, strict=True)):
            line = Text(f"device {device}".ljust(margin) + "|", no_wrap=True, overflow="crop")
            line.append_text(_cells(drawn, row, scale, width, squeezed))
            line.append("|" + peak)
            yield line
            if device < len(lanes) and lanes[device]:
                yield _lane(lanes[device], scale, width, margin)
        end = f"{timeline.makespan:.6g}"
        yield Text(" " * (margin + 1) + "0" + end.rjust(width - 1), style="dim", no_wrap=True, overflow="crop")
        yield _legend(drawn)
        if scale != common:
            yield Text(f"own time axis: a column is as long as {common / scale:.3g} of the others", style="dim")
        if squeezed:
            left_out = (
                "squeezed: a letter stands for several actions; widen the terminal or write a picture with --output"
            )
            yield Text(left_out, style="dim")


def _columns_per_second(timelines: Sequence[Timeline], room: int) -> tuple[float, bool]:
    """Return whole columns per shortest action as long as one fits, otherwise the runs squeezed into ``room``, and
    which.
    """
    seconds = [end - start for timeline in timelines for spans in timeline.spans for start, end in spans]
    shortest = min((length for length in seconds if length > 0), default=1.0)
    longest = max(timeline.makespan for timeline in timelines)
    if not longest:
        return 1.0, True
    cell = int(room * shortest / longest)
    return (min(cell, _MAX_CELL) / shortest, False) if cell else (room / longest, True)


def _cells(drawn: DrawnRun, row: tuple[Box, ...], scale: float, width: int, squeezed: bool) -> Text:
    text = Text()
    owners = _owners(row, scale, width)
    column = 0
    while column < width:
        box, first = owners[column], column
        while column < width and owners[column] is box:
            column += 1
        if box is None:
            text.append(" " * (column - first))
            continue
        background = drawn.colour(box.action.kind, box.chunk)
        text.append(_label(box, column - first, squeezed), Style(color=ink(background), bgcolor=background))
    return text


def _lane(lane: Sequence[HostTransfer], scale: float, width: int, margin: int) -> Text:
    """Return copies to the host and back, under the actions of their device."""
    signs = {Kind.OFFLOAD: ">", Kind.RELOAD: "<"}
    cells = [" "] * width
    for copy in lane:
        # At least one column, or else short copies would be lost.
        for column in range(int(copy.start * scale), max(int(copy.start * scale) + 1, round(copy.end * scale))):
            if column < width:
                cells[column] = signs[copy.action.kind]
    return Text("copies".ljust(margin) + "|" + "".join(cells) + "|", style="dim", no_wrap=True, overflow="crop")


def _owners(row: tuple[Box, ...], scale: float, width: int) -> list[Box | None]:
    """Return, for every column, the box that fills most of it, ``None`` where that is idle time."""
    filled: list[list[tuple[float, Box]]] = [[] for _ in range(width)]
    for box in row:
        start, end = box.start * scale, box.end * scale
        for column in range(int(start), min(width, int(end) + 1)):
            if (part := min(end, column + 1) - max(start, column)) > 1e-6:
                filled[column].append((part, box))
    owners: list[Box | None] = []
    for parts in filled:
        idle = 1 - sum(part for part, _ in parts)
        largest = max(parts, default=None, key=lambda part: part[0])
        owners.append(largest[1] if largest and largest[0] >= idle - 1e-6 else None)
    return owners


def _label(box: Box, width: int, squeezed: bool) -> str:
    letter = box.action.kind.value if box.chunk == 0 else box.action.kind.value.lower()
    if squeezed:
        return letter[0] * width
    full = f"{letter}{box.action.microbatch}"
    return (full if len(full) <= width else letter[:width]).ljust(width, "-")


def _legend(drawn: DrawnRun) -> Text:
    entries = []
    for kind in dict(drawn.legend):
        shade = drawn.colour(kind, 0)
        entries.append(Text(f" {kind} {kind.spec.says} ", Style(color=ink(shade), bgcolor=shade)))
    if drawn.num_chunks > 1:
        entries.append(Text("lower case: later chunk", style="dim"))
    if any(drawn.timeline.transfers):
        entries.append(Text("> copy to the host, < copy back", style="dim"))
    return Text("  ").join(entries)
