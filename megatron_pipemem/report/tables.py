"""Print tables that fit any width: text wraps between words, and numbers are never cut.

Where wrapping is not enough, every row becomes lines of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.padding import PaddingDimensions
from rich.table import Table
from rich.text import Text

_EMPTY = ("", "-")
_EDGES = 2
_PADDINGS: dict[int, PaddingDimensions] = {3: (0, 1), 2: (0, 1, 0, 0), 1: 0}
"""What rich is to pad cells with, by the columns of the terminal between two cells."""
_INDENT = 4


@dataclass
class FittingTable:
    """A rich renderable. Columns that are empty in every row are left out.

    Args:
        columns: headings, in order.
        text: those of text, which is aligned left, and wrapped between words where room is short. All others are aligned
            right and never wrapped.
        title: a line above.
        caption: lines below.
    """

    columns: Sequence[str]
    text: Collection[str] = ()
    title: str = ""
    caption: str = ""
    _rows: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row with one cell per column; ``style`` is rich's."""
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
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=_PADDINGS[gap])
        for column, width in zip(columns, widths, strict=True):
            justify: JustifyMethod = "left" if column.is_text else "right"
            table.add_column(Text(column.heading), justify=justify, width=width, overflow="fold")
        for row, (_, style) in enumerate(self._rows):
            table.add_row(*(Text(column.cells[row]) for column in columns), style=style)
        return table

    def _blocks(self, columns: Sequence[_Column], width: int) -> RenderResult:
        first, *others = columns
        for row, (_, style) in enumerate(self._rows):
            yield Text(first.told(row), style=f"bold {style}", overflow="fold")
            told = [each.told(row) for each in others if each.cells[row].strip() not in _EMPTY]
            for line in _filled(told, width - _INDENT):
                for part in wrap(line, max(1, width - _INDENT), break_long_words=False, break_on_hyphens=False):
                    yield Text(" " * _INDENT + part, style=style, overflow="fold")


class _Column:
    def __init__(self, heading: str, is_text: bool, cells: Sequence[str]) -> None:
        self.heading, self.is_text, self.cells = heading, is_text, cells
        self.natural = max(_widest((self.heading, *cells), str.splitlines), 1)
        parts = _widest(cells, str.split if self.is_text else str.splitlines)
        self.least = max(_widest((self.heading,), str.split), parts, 1)

    def told(self, row: int) -> str:
        """Return a cell with its heading, in one line."""
        return " ".join(f"{self.heading} {'; '.join(self.cells[row].splitlines())}".split())


def _widest(texts: Iterable[str], parts: Callable[[str], Sequence[str]]) -> int:
    return max((cell_len(part) for text in texts for part in parts(text)), default=0)


def _layout(columns: Sequence[_Column], width: int) -> tuple[int, list[int]] | None:
    """Return the columns between cells, and those of every cell; ``None`` where whole words do not fit."""
    for gap in _PADDINGS:
        room = width - _EDGES - gap * (len(columns) - 1)
        enough = sum(column.natural for column in columns) if gap == max(_PADDINGS) else 0
        if max(enough, sum(column.least for column in columns)) <= room:
            return gap, _shared(columns, room)
    return None


def _shared(columns: Sequence[_Column], room: int) -> list[int]:
    """Return what every column gets: its least, and of the rest as much as the others as long as it has a use for it."""
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
    """Return the parts in as few lines as whole parts allow; only one that is wider than a line will be wrapped."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(f"{lines[-1]}, {part}") <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines
