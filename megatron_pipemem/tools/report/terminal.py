"""Print in the terminal: tables that fit any width, timelines, and the best schedule of each placement in a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.padding import PaddingDimensions
from rich.style import Style
from rich.table import Table
from rich.text import Text

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.tools.report.timeline import Box, DrawnRun, HostTransfer, common_end, ink

if TYPE_CHECKING:
    from megatron_pipemem.search.result import Candidate

_EMPTY = ("", "-")
_EDGES = 2
_PADDINGS: dict[int, PaddingDimensions] = {3: (0, 1), 2: (0, 1, 0, 0), 1: 0}
"""rich's padding of a cell, by the number of blank columns between two cells."""
_INDENT = 4


@dataclass
class FittingTable:
    """A table that rich prints within the console's width. Columns in which all rows are empty are left out.

    If the console is too narrow for a table, each row becomes a block of lines.
    """

    columns: Sequence[str]
    # columns that are left-aligned and may wrap; all others are right-aligned and do not wrap
    text: Collection[str] = ()
    title: str = ""
    caption: str = ""
    _rows: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row with one cell for each column. ``style`` is a style of rich, for example ``dim``.

        Raise a ValueError for another number of cells.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self._rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, width = [cells for cells, _ in self._rows], options.max_width
        kept = [i for i in range(len(self.columns)) if not rows or any(cells[i].strip() for cells in rows)]
        columns = [_Column(self.columns[i], self.columns[i] in self.text, [cells[i] for cells in rows]) for i in kept]
        if self.title:
            yield Text(self.title, style="italic")
        if (layout := _layout(columns, width)) is None:
            yield from self._blocks(columns, width)
        else:
            yield self._table(columns, *layout)
        if self.caption:
            yield Text(self.caption, style="dim italic")

    def _table(self, columns: Sequence[_Column], gap: int, widths: Sequence[int]) -> Table:
        table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=_PADDINGS[gap])
        for column, width in zip(columns, widths, strict=True):
            justify: JustifyMethod = "left" if column.is_text else "right"
            table.add_column(Text(column.heading), justify=justify, width=width, overflow="fold")
        for row, (_, style) in enumerate(self._rows):
            table.add_row(*(Text(column.cells[row]) for column in columns), style=style)
        return table

    def _blocks(self, columns: Sequence[_Column], width: int) -> RenderResult:
        first, *others = columns
        for row, (_, style) in enumerate(self._rows):
            yield Text(first.line(row), style=f"bold {style}", overflow="fold")
            parts = [column.line(row) for column in others if column.cells[row].strip() not in _EMPTY]
            for line in _filled(parts, width - _INDENT):
                for part in wrap(line, max(1, width - _INDENT), break_long_words=False, break_on_hyphens=False):
                    yield Text(" " * _INDENT + part, style=style, overflow="fold")


class _Column:
    def __init__(self, heading: str, is_text: bool, cells: Sequence[str]) -> None:
        self.heading, self.is_text, self.cells = heading, is_text, cells
        self.natural = max(_widest((self.heading, *cells), str.splitlines), 1)
        parts = _widest(cells, str.split if self.is_text else str.splitlines)
        self.least = max(_widest((self.heading,), str.split), parts, 1)

    def line(self, row: int) -> str:
        """Return the heading and a cell in one line, for a table that is printed as blocks."""
        return " ".join(f"{self.heading} {'; '.join(self.cells[row].splitlines())}".split())


def _widest(texts: Iterable[str], parts: Callable[[str], Sequence[str]]) -> int:
    return max((cell_len(part) for text in texts for part in parts(text)), default=0)


def _layout(columns: Sequence[_Column], width: int) -> tuple[int, list[int]] | None:
    """Return how many blanks separate two cells, and the width of each column of the table in characters.

    The result is ``None`` if some word would not fit. ``width`` is that of the console.
    """
    for gap in _PADDINGS:
        room = width - _EDGES - gap * (len(columns) - 1)
        enough = sum(column.natural for column in columns) if gap == max(_PADDINGS) else 0
        if max(enough, sum(column.least for column in columns)) <= room:
            return gap, _shared(columns, room)
    return None


def _shared(columns: Sequence[_Column], room: int) -> list[int]:
    """Return the width of each column in characters, ``room`` at most in all.

    Room beyond the least widths goes to the narrowest column, up to its natural width.
    """
    widths = [column.least for column in columns]
    spare = room - sum(widths)
    while spare > 0:
        wanting = [i for i, column in enumerate(columns) if widths[i] < column.natural]
        if not wanting:
            break
        widths[min(wanting, key=lambda i: widths[i])] += 1
        spare -= 1
    return widths


def _filled(parts: Iterable[str], width: int) -> list[str]:
    """Join the parts with commas into as few lines of this width as possible. A part that is wider has its own line."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(f"{lines[-1]}, {part}") <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


_LEAST = 1e-6
"""Parts of a column below this are rounding."""
_MAX_CELL = 4
"""The highest width in columns of the shortest action: enough for ``F12`` and a gap."""


@dataclass(frozen=True)
class TerminalTimeline:
    """A timeline that rich prints within the console's width.

    A letter gives the kind of an action: upper case for the first chunk, lower case for later ones. The number of its
    microbatch follows if there is room, then dashes until the action ends. Blanks are idle time. If the timeline is too
    long for the width, a column covers several actions. Blanks and letters then have the same shares of a row as idle
    time and each kind of action have of the time. A column of its own marks the start of each step but the first.
    """

    timeline: Timeline
    beside: Sequence[Timeline] = ()
    """Timelines to compare with, on one time axis. A timeline more than twice as long as the median gets its own axis.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline, drawn = self.timeline, DrawnRun(self.timeline)
        rows, lanes = drawn.rows, drawn.host_transfers
        shades = _standard_style if console.color_system in _STANDARD_SYSTEMS else partial(_style, drawn)
        runs = (timeline, *self.beside)
        margin = max(len(f"device {run.schedule.num_devices - 1} ") for run in runs)
        peaks = [f" {drawn.memory_text(peak)}" for peak in timeline.peaks]
        widest = max(len(f" {DrawnRun(run).memory_text(peak)}") for run in runs for peak in run.peaks)
        header = "peak"
        marks = timeline.steps - 1 if any(drawn.step_starts) else 0
        room = max(10, options.max_width - margin - max(len(header) + 1, widest) - 2 - marks)
        shared = [run for run in runs if run.makespan <= common_end(runs)]
        scale, squeezed = _columns_per_second(shared, room)
        common = scale
        if timeline not in shared:
            scale, squeezed = _columns_per_second([timeline], room)
        width = min(room, max(1, round(timeline.makespan * scale)))
        yield Text(drawn.headline, style="bold")
        yield Text(" " * (margin + width + marks + 2) + f" {header}", style="dim", no_wrap=True)
        lines = [_cells(drawn, row, scale, width, squeezed, shades, marks) for row in rows]
        for device, (cells_of_row, peak) in enumerate(zip(lines, peaks, strict=True)):
            line = Text(f"device {device}".ljust(margin) + "|", no_wrap=True, overflow="crop")
            line.append_text(cells_of_row)
            line.append("|" + peak)
            yield line
            if device < len(lanes) and lanes[device]:
                yield _lane(lanes[device], scale, width + marks, margin)
        axis = _axis(f"{timeline.makespan:.6g}", f" time ({drawn.time_unit}) ", width + marks)
        yield Text(" " * (margin + 1) + axis, style="dim", no_wrap=True, overflow="crop")
        has_numbers = any(character.isdigit() for line in lines for character in line.plain)
        yield from _legend(drawn, shades, has_numbers, marks > 0, options.max_width)
        if scale != common:
            yield Text(f"own time axis: one column here is {common / scale:.3g} columns of the others", style="dim")
        if squeezed:
            left_out = "squeezed: one letter shows several actions; widen the terminal or write a picture with --output"
            yield Text(left_out, style="dim")


def _columns_per_second(timelines: Sequence[Timeline], room: int) -> tuple[float, bool]:
    """Return the console's columns per second, and whether the shortest action has less than one column.

    The longest of the timelines gets at most ``room`` columns.
    """
    seconds = [end - start for timeline in timelines for spans in timeline.spans for start, end in spans]
    shortest = min((length for length in seconds if length > 0), default=1.0)
    longest = max(timeline.makespan for timeline in timelines)
    if not longest:
        return 1.0, True
    cell = int(room * shortest / longest)
    return (min(cell, _MAX_CELL) / shortest, False) if cell else (room / longest, True)


_Shades = Callable[[Kind, int], Style]
"""Return the style of a kind of action and a chunk."""
_STANDARD_SYSTEMS = ("standard", "windows")
"""rich's names of terminals with 16 colours."""
_STANDARD_COLOURS = {
    Kind.F: ("blue", "bright_white"),
    Kind.I: ("yellow", "black"),
    Kind.W: ("green", "black"),
    Kind.B: ("red", "bright_white"),
}
"""Background and ink in such terminals. The nearest colours to those of the other pictures are the same for F and W."""
_OTHER_KINDS = ("cyan", "black")


def _style(drawn: DrawnRun, kind: Kind, chunk: int) -> Style:
    background = drawn.colour(kind, chunk)
    return Style(color=ink(background), bgcolor=background)


def _standard_style(kind: Kind, chunk: int) -> Style:
    background, letters = _STANDARD_COLOURS.get(kind, _OTHER_KINDS)
    return Style(color="black", bgcolor=f"bright_{background}") if chunk else Style(color=letters, bgcolor=background)


_GAP = "  "
_NEXT_STEP = "\N{BOX DRAWINGS LIGHT VERTICAL}"


def _cells(
    drawn: DrawnRun, row: tuple[Box, ...], scale: float, width: int, squeezed: bool, shades: _Shades, marks: int
) -> Text:
    """Return a device's line of ``width`` columns, and ``marks`` more before the first actions of the next steps."""
    text = Text()
    owners = _owners(row, scale, width, squeezed)
    paired = {id(box) for pair in drawn.pairs for box in pair}
    column, marked = 0, 0
    while column < width:
        box, first = owners[column], column
        if box is not None and marks and (step := drawn.step_of(box)) > marked:
            text.append(_NEXT_STEP * (step - marked))
            marked = step
        while column < width and owners[column] is box:
            column += 1
        if box is None:
            text.append(" " * (column - first))
            continue
        style = shades(box.action.kind, box.chunk) + Style(underline=id(box) in paired)
        text.append(_label(box, column - first, squeezed), style)
    text.append(" " * (marks - marked))
    return text


def _axis(end: str, unit: str, width: int) -> str:
    """Return the line below a timeline, from 0 to ``end``, with the unit between them if there is room."""
    room = width - 1 - len(end)
    return "0" + (unit.center(room) if len(unit) <= room else " " * room) + end


def _lane(lane: Sequence[HostTransfer], scale: float, width: int, margin: int) -> Text:
    """Return the line that shows a device's copies to the host (``>``) and back (``<``).

    ``scale`` is the number of columns per second. ``width`` is that of the timeline, and ``margin`` that before it.
    """
    signs = {Kind.OFFLOAD: ">", Kind.RELOAD: "<"}
    cells = [" "] * width
    for copy in lane:
        # At least one column, so that short copies are visible.
        for column in range(int(copy.start * scale), max(int(copy.start * scale) + 1, round(copy.end * scale))):
            if column < width:
                cells[column] = signs[copy.action.kind]
    return Text("copies".ljust(margin) + "|" + "".join(cells) + "|", style="dim", no_wrap=True, overflow="crop")


def _owners(row: tuple[Box, ...], scale: float, width: int, squeezed: bool) -> list[Box | None]:
    """Return the box that each column shows, or ``None`` if the column is blank.

    A column is blank if more than half of it is idle. Otherwise it shows the kind and chunk with the largest part. If
    the timeline is ``squeezed``, what a column could not show adds to the next one, so that the shares of blanks and
    letters in a row are those of the time. ``scale`` is the number of columns per second, and ``width`` that of
    columns.
    """
    filled: list[list[tuple[float, Box]]] = [[] for _ in range(width)]
    for box in row:
        start, end = box.start * scale, box.end * scale
        for column in range(int(start), min(width, int(end) + 1)):
            if (part := min(end, column + 1) - max(start, column)) > _LEAST:
                filled[column].append((part, box))
    owners: list[Box | None] = []
    idle, work = 0.0, defaultdict[tuple[Kind, int], float](float)  # parts of columns that are not shown yet
    for parts in filled:
        idle += 1 - sum(part for part, _ in parts)
        for part, box in parts:
            work[box.action.kind, box.chunk] += part
        if not parts or idle > 0.5 + _LEAST:
            idle -= 1
            owners.append(None)
        else:
            shown = max(((box.action.kind, box.chunk) for _, box in parts), key=work.__getitem__)
            work[shown] -= 1
            boxes = [pair for pair in parts if (pair[1].action.kind, pair[1].chunk) == shown]
            owners.append(max(boxes, key=lambda pair: pair[0])[1])
        if not squeezed:
            idle = 0.0
            work.clear()
    return owners


def _label(box: Box, width: int, squeezed: bool) -> str:
    letter = box.action.kind.value if box.chunk == 0 else box.action.kind.value.lower()
    if squeezed:
        return letter[0] * width
    full = f"{letter}{box.action.microbatch}"
    return (full if len(full) <= width else letter[:width]).ljust(width, "-")


def _legend(drawn: DrawnRun, shades: _Shades, has_numbers: bool, marks_steps: bool, width: int) -> list[Text]:
    """Return the lines of the legend, of at most ``width`` columns; an entry stays whole if it fits into a line."""
    entries = [Text(f" {kind} {kind.spec.says} ", shades(kind, 0)) for kind in dict(drawn.legend)]
    if drawn.num_chunks > 1:
        entries.append(Text("lower case: later chunk", style="dim"))
    if has_numbers:
        parts = drawn.timeline.schedule.units.parts
        of = "microbatch" if parts == 1 else f"slice, from 0 to {parts - 1} in microbatch 0 and counted on"
        entries.append(Text(f"number: {of}, with dashes to the end of the pass", style="dim"))
    if drawn.in_units:
        entries.append(Text(f"peak: {drawn.memory_unit}", style="dim"))
    if marks_steps:
        entries.append(Text(f"{_NEXT_STEP} next step", style="dim"))
    if drawn.pairs:
        entries.append(Text("underlined: a pair", style="dim"))
    if any(drawn.timeline.transfers):
        entries.append(Text(f"> copy to the host, < copy back{drawn.copy_text}", style="dim"))
    lines: list[list[Text]] = [[]]
    for entry in entries:
        if lines[-1] and sum(len(part) + len(_GAP) for part in lines[-1]) + len(entry) > width:
            lines.append([])
        lines[-1].append(entry)
    return [Text(_GAP).join(line) for line in lines]


HEADINGS = ("placement", "chunks", "makespan", "bound", "peak", "found by")


def placements_table(
    candidates: Iterable[Candidate], memory_text: Callable[[float], str], seconds: str = HEADINGS[2]
) -> FittingTable:
    """Return a table of the best schedule of each placement. ``seconds`` is the heading of the makespan column."""
    table = FittingTable((*HEADINGS[:2], seconds, *HEADINGS[3:-1]), text=("placement",))
    for candidate in candidates:
        table.add_row(*cells(candidate, memory_text)[:-1])
    return table


def cells(candidate: Candidate, memory_text: Callable[[float], str]) -> tuple[str, ...]:
    """Return the cells of a placement's row, one for each of ``HEADINGS``."""
    placement = candidate.schedule.placement
    makespan, bound, peak = (
        f"{candidate.makespan:.6g}",
        f"{candidate.lower_bound:.6g}",
        memory_text(max(candidate.peaks)),
    )
    parts = candidate.schedule.units.parts
    name = placement.name if parts == 1 else f"{placement.name}, {parts} slices"
    return name, str(placement.num_chunks), makespan, bound, peak, candidate.found_by
