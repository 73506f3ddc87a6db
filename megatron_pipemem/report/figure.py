"""Draw timelines as PNG and SVG with matplotlib, which is imported only when a picture is drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pipemem.files import whole_file
from megatron_pipemem.report.axis import GAP, LEFT, RIGHT, Window, Windows, both_ends, cut_out, page, points_per_second
from megatron_pipemem.report.timeline import (
    IDLE,
    KIND_NAMES,
    TRANSFER_COLOURS,
    TRANSFER_NAMES,
    Box,
    Bubble,
    HostTransfer,
    boxes,
    bubbles,
    colour,
    common_end,
    headline,
    held_steps,
    host_transfers,
    ink,
    legend,
    memory_text,
)
from megatron_pipemem.schedule.core.action import MEMORY, VOCABULARY, Kind
from megatron_pipemem.schedule.core.simulator import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pipemem",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": "#3c4043",
    "xtick.color": "#3c4043",
    "ytick.color": "#3c4043",
}
_TEXT, _QUIET = "#202124", "#5f6368"
_HELD, _HELD_EDGE, _LIMIT = "#c9d3df", "#5b6f86", "#b3261e"
DPI = 150
_LABEL_POINTS = 4.6
"""The smallest letters that are drawn."""
_MOST_NUMBERS = 5000
"""More would take matplotlib longer than anybody waits."""


@dataclass(frozen=True)
class _Run:
    """A timeline with what its picture is made of."""

    timeline: Timeline

    @cached_property
    def rows(self) -> tuple[tuple[Box, ...], ...]:
        return boxes(self.timeline)

    @cached_property
    def bubbles(self) -> tuple[tuple[Bubble, ...], ...]:
        return bubbles(self.timeline, self.rows)

    @cached_property
    def shortest(self) -> float:
        return min((box.seconds for row in self.rows for box in row if box.seconds > 0), default=1.0)

    @property
    def end(self) -> float:
        return self.timeline.makespan or 1.0

    @cached_property
    def host_transfers(self) -> tuple[tuple[HostTransfer, ...], ...]:
        return host_transfers(self.timeline)

    @property
    def upper(self) -> float:
        """Where a device's memory begins in its row."""
        return _UPPER_BELOW_LANE if any(self.host_transfers) else _UPPER

    @property
    def in_units(self) -> bool:
        return self.timeline.costs.memory is None


def draw(timeline: Timeline) -> Figure:
    """One run: for every device its actions, and below them what it holds.

    A run of more actions than a page has room for is drawn at its start and its end, and the picture says so.
    """
    return _draw([_Run(timeline)])


def compare(timelines: Sequence[Timeline]) -> Figure:
    """Several runs under one another on one scale of time and one of memory.

    A run of more than twice the length of most is drawn at its start and its end, and the picture says so.
    """
    return _draw([_Run(timeline) for timeline in timelines])


def save(figure: Figure, path: Path) -> None:
    """Write PNG or SVG by the suffix of ``path``. The same run always gives the same bytes.

    Raises:
        OutputError: it cannot be written.
    """
    with style():
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        with whole_file(path) as beside:
            figure.savefig(beside, format=path.suffix[1:], dpi=DPI, metadata=metadata)


def style() -> AbstractContextManager[None]:
    """What all pictures look alike by; for ``with``."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _draw(runs: Sequence[_Run]) -> Figure:
    with style():
        shared = common_end([run.timeline for run in runs]) or 1.0
        width, windows = page([min(run.end, shared) for run in runs], min(run.shortest for run in runs))
        stretches = [windows if run.end <= shared else both_ends(run.end, windows) for run in runs]
        points = points_per_second(width, windows)
        heights = [_row_inches(len(run.rows), len(runs)) * len(run.rows) for run in runs]
        figure, panels = _panels(width, heights, stretches)
        left_out = set()
        for run, axes, stretch in zip(runs, panels, stretches, strict=True):
            tops = [max(r.timeline.peak, 1.0 if r.in_units else 0.0) for r in runs if r.in_units == run.in_units]
            left_out |= _draw_run(run, axes, stretch, points, 1.12 * max(tops) or 1.0)
            axes[0].set_title(
                _title(run, runs[0]), loc="left", fontsize=13 if len(runs) == 1 else 11, fontweight="bold", pad=7
            )
        for axes in panels[-1] if len(set(stretches)) == 1 else (axes for row in panels for axes in row):
            axes.tick_params(labelbottom=True)
        _label_time(figure, runs, width)
        _add_legend(figure, runs)
        cuts = cut_out(
            [(run.timeline.schedule.name, run.end, stretch) for run, stretch in zip(runs, stretches, strict=True)]
        )
        _add_footnotes(figure, runs, [*cuts, *sorted(left_out)])
        return figure


def _row_inches(devices: int, runs: int) -> float:
    """Of a device's actions and memory together."""
    return min(0.62, max(0.26, 7.0 / devices)) * (1 if runs == 1 else 0.85)


def _panels(
    width: float, heights: Sequence[float], stretches: Sequence[Windows]
) -> tuple[Figure, list[tuple[Axes, ...]]]:
    """Per run the axes of its windows, side by side."""
    from matplotlib.figure import Figure  # a Figure without pyplot draws with Agg and leaves no global state

    above, below, space = 0.5, 1.2 if width > 11 else 1.4, 0.5
    height = sum(heights) + space * (len(heights) - 1) + above + below
    figure = Figure(figsize=(width, height), facecolor="white")
    rows = figure.add_gridspec(
        len(heights),
        height_ratios=heights,
        hspace=space / (sum(heights) / len(heights)),
        left=LEFT / width,
        right=1 - RIGHT / width,
        top=1 - above / height,
        bottom=below / height,
    )
    panels = []
    for row, windows in zip(rows, stretches, strict=True):
        lengths = [end - start for start, end in windows]
        panels.append(
            tuple(map(figure.add_subplot, row.subgridspec(1, len(windows), width_ratios=lengths, wspace=GAP)))
        )
    return figure, panels


def _title(run: _Run, first: _Run) -> str:
    text = headline(run.timeline)
    if run is first or not first.timeline.makespan:
        return text
    change = run.timeline.makespan / first.timeline.makespan - 1
    if change >= 1:
        sooner = f"{change + 1:.1f} times as long as"
    else:
        sooner = (
            "as long as" if abs(change) < 5e-4 else f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'} than"
        )
    return f"{text}, {sooner} {first.timeline.schedule.name}"


# A device's row, in parts of its height: actions from _TOP to _MIDDLE, memory from _UPPER down to _FLOOR.
_TOP, _MIDDLE, _UPPER, _FLOOR = 0.05, 0.60, 0.64, 0.96
# Copies to and from the host lie between the two, where there are any.
_LANE_TOP, _LANE_FLOOR, _UPPER_BELOW_LANE = 0.615, 0.675, 0.70


def _draw_run(run: _Run, panels: Sequence[Axes], windows: Windows, points: float, top: float) -> set[str]:
    """Draw one run into the panels of its windows; what was left out."""
    left_out: set[str] = set()
    row_points = panels[0].get_position().height * panels[0].figure.get_figheight() * 72 / len(run.rows)
    size = _number_size(run, windows, points, row_points)
    if not size:
        left_out.add("microbatch numbers")
    for panel, (start, end) in zip(panels, windows, strict=True):
        panel.set_xlim(start, end)
        panel.set_ylim(len(run.rows), 0)
        seen = [
            [box for box in row if box.end >= start and box.start <= end and box.action.kind not in MEMORY]
            for row in run.rows
        ]
        _draw_boxes(panel, run, seen, points)
        if size:
            _draw_numbers(panel, run, seen, size)
        left_out |= _draw_waits(panel, run, (start, end), points, row_points)
        _draw_transfers(panel, run, (start, end))
        _draw_held(panel, run, (start, end), top)
        if run.end < end:
            panel.axvline(run.end, color=_TEXT, linewidth=0.9, linestyle=(0, (4, 3)))
        _frame(panel)
    _name_devices(panels, run, row_points)
    if len(panels) > 1:
        _break(panels)
    return left_out


def _draw_boxes(axes: Axes, run: _Run, rows: Sequence[Sequence[Box]], points: float) -> None:
    from matplotlib.collections import PolyCollection

    num_chunks = run.timeline.schedule.placement.num_chunks
    shapes: defaultdict[str, list] = defaultdict(list)
    for row in rows:
        for box in row:
            low, high = box.device + _TOP, box.device + _MIDDLE
            corners = [(box.start, low), (box.start, high), (box.end, high), (box.end, low)]
            shapes[colour(box.action.kind, box.chunk, num_chunks)].append(corners)
    whole = axes.get_xlim()
    ground = [
        [(whole[0], d + _TOP), (whole[0], d + _MIDDLE), (whole[1], d + _MIDDLE), (whole[1], d + _TOP)]
        for d in range(len(rows))
    ]
    axes.add_collection(PolyCollection(ground, facecolors=IDLE, linewidths=0))
    edge = 0.5 if run.shortest * points > 4 else 0.0
    for shade, corners in shapes.items():
        axes.add_collection(PolyCollection(corners, facecolors=shade, edgecolors="white", linewidths=edge))


def _number_size(run: _Run, windows: Windows, points: float, row_points: float) -> float:
    """The size in points at which microbatch numbers fit the shortest box; 0 when they would be too small or too many."""
    seen = [
        box.action.microbatch or 0
        for row in run.rows
        for box in row
        if box.action.kind not in MEMORY and any(box.end >= start and box.start <= end for start, end in windows)
    ]
    digits = len(str(max(seen, default=0)))
    size = min(8.0, run.shortest * points / (0.62 * digits + 0.25), 0.8 * (_MIDDLE - _TOP) * row_points)
    return size if size >= _LABEL_POINTS and len(seen) <= _MOST_NUMBERS else 0.0


def _draw_numbers(axes: Axes, run: _Run, rows: Sequence[Sequence[Box]], size: float) -> None:
    num_chunks = run.timeline.schedule.placement.num_chunks
    for row in rows:
        for box in row:
            axes.text(
                (box.start + box.end) / 2,
                box.device + (_TOP + _MIDDLE) / 2 + 0.01,
                str(box.action.microbatch),
                fontsize=size,
                color=ink(colour(box.action.kind, box.chunk, num_chunks)),
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def _draw_waits(axes: Axes, run: _Run, window: Window, points: float, row_points: float) -> set[str]:
    """In every bubble what its device waits for, in as many words as fit."""
    left_out: set[str] = set()
    size = min(7.0, 0.62 * (_MIDDLE - _TOP) * row_points)
    for row in run.bubbles:
        for bubble in row:
            start, end = max(bubble.start, window[0]), min(bubble.end, window[1])
            if bubble.producer is None or start >= end:
                continue
            action, device = bubble.producer.action, bubble.producer.device
            forms = (f"waits for {action} of device {device}", f"waits for {action}", f"{action}")
            room = (end - start) * points - 3
            text = next((form for form in forms if 0.52 * size * len(form) < room), None)
            if text is None or size < _LABEL_POINTS:
                left_out.add("what narrow bubbles wait for")
                continue
            axes.text(
                (start + end) / 2, bubble.device + (_TOP + _MIDDLE) / 2 + 0.01, text,
                fontsize=size, color=_QUIET, style="italic", ha="center", va="center_baseline", clip_on=True,
            )  # fmt: skip
    return left_out


def _draw_transfers(axes: Axes, run: _Run, window: Window) -> None:
    from matplotlib.collections import PolyCollection

    for kind, shade in TRANSFER_COLOURS.items():
        shapes = [
            [(copy.start, low), (copy.start, high), (copy.end, high), (copy.end, low)]
            for device, lane in enumerate(run.host_transfers)
            for copy in lane
            if copy.action.kind is kind and copy.end >= window[0] and copy.start <= window[1]
            for low, high in [(device + _LANE_TOP, device + _LANE_FLOOR)]
        ]
        axes.add_collection(PolyCollection(shapes, facecolors=shade, linewidths=0))


def _draw_held(axes: Axes, run: _Run, window: Window, top: float) -> None:
    """Under every device what it holds over time; all devices on one scale from 0 to ``top``."""
    from matplotlib.collections import LineCollection, PolyCollection

    height = _FLOOR - run.upper
    areas, curves = [], []
    for device, row in enumerate(run.rows):
        floor = device + _FLOOR
        curve: list[tuple[float, float]] = []
        before = 0.0
        for time, held in held_steps(row):
            curve += [(time, floor - height * before / top), (time, floor - height * held / top)]
            before = held
        curve.append((run.end, floor - height * before / top))
        inside = _clip(curve, window)
        areas.append([(inside[0][0], floor), *inside, (inside[-1][0], floor)])
        curves.append(inside)
    axes.add_collection(PolyCollection(areas, facecolors=_HELD, linewidths=0))
    axes.add_collection(LineCollection(curves, colors=_HELD_EDGE, linewidths=0.7))
    if run.in_units:
        levels = [device + _FLOOR - height / top for device in range(len(run.rows))]
        axes.hlines(levels, *window, color=_LIMIT, linewidth=0.6, linestyle=(0, (4, 3)))


def _clip(curve: list[tuple[float, float]], window: Window) -> list[tuple[float, float]]:
    """The part of a step curve within ``window``."""
    start, end = window
    level = curve[0][1]
    inside = []
    for time, height in curve:
        if time <= start:
            level = height
        elif time <= end:
            inside.append((time, height))
    last = inside[-1][1] if inside else level
    return [(start, level), *inside, (min(end, max(start, curve[-1][0])), last)]


def _frame(axes: Axes) -> None:
    axes.set_yticks([])
    axes.tick_params(axis="x", length=2.5, labelbottom=False)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _name_devices(panels: Sequence[Axes], run: _Run, row_points: float) -> None:
    """Names on the left, peaks on the right."""
    size = min(9.0, 0.42 * row_points)
    for device, peak in enumerate(run.timeline.peaks):
        panels[0].annotate(
            f"device {device}", (0, device + (_TOP + _MIDDLE) / 2), xycoords=("axes fraction", "data"),
            xytext=(-5, 0), textcoords="offset points", ha="right", va="center", fontsize=size, color=_TEXT,
        )  # fmt: skip
        panels[-1].annotate(
            memory_text(peak, run.timeline), (1, device + (_UPPER + _FLOOR) / 2), xycoords=("axes fraction", "data"),
            xytext=(4, 0), textcoords="offset points", ha="left", va="center", fontsize=size, color=_HELD_EDGE,
        )  # fmt: skip
    panels[-1].annotate(
        "peak", (1, 0), xycoords=("axes fraction", "data"), xytext=(4, 3), textcoords="offset points",
        ha="left", va="bottom", fontsize=8, color=_HELD_EDGE,
    )  # fmt: skip


def _break(panels: Sequence[Axes]) -> None:
    """A torn edge between the windows."""
    teeth = round(panels[0].get_position().height * panels[0].figure.get_figheight() * 8)
    for panel, edge, inwards in zip(panels, (1, 0), (-0.003, 0.003), strict=True):
        zigzag = [edge + inwards * (tooth % 2) for tooth in range(teeth + 1)]
        panel.plot(
            zigzag, [tooth / teeth for tooth in range(teeth + 1)], transform=panel.transAxes, clip_on=False,
            color="white", linewidth=3,
        )  # fmt: skip


def _label_time(figure: Figure, runs: Sequence[_Run], width: float) -> None:
    timeline = runs[0].timeline
    text = (
        "time"
        if len(runs) > 1
        else f"time (makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g})"
    )
    middle = (LEFT + (width - LEFT - RIGHT) / 2) / width
    bottom = 0.86 if figure.get_figwidth() > 11 else 1.06
    figure.text(middle, bottom / figure.get_figheight(), text, ha="center", va="center", color="#3c4043")


def _add_legend(figure: Figure, runs: Sequence[_Run]) -> None:
    """One entry per kind, with a swatch of every chunk's shade."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shades: dict[Kind, list[str]] = {}
    for run in sorted(runs, key=lambda run: -run.timeline.schedule.placement.num_chunks):
        num_chunks = run.timeline.schedule.placement.num_chunks
        for kind in dict(legend(run.timeline)):
            chunks = range(1 if kind in VOCABULARY else num_chunks)
            shades.setdefault(kind, [colour(kind, chunk, num_chunks) for chunk in chunks])
    entries: dict[str, object] = {
        f"{kind} {name}": tuple(Patch(facecolor=shade) for shade in shades[kind])
        for kind, name in KIND_NAMES.items()
        if kind in shades
    }
    for kind, shade in TRANSFER_COLOURS.items():
        if any(run.timeline.schedule.offloads and any(run.host_transfers) for run in runs):
            entries[TRANSFER_NAMES[kind]] = (Patch(facecolor=shade),)
    entries["idle"] = (Patch(facecolor=IDLE, edgecolor="#dadce0"),)
    entries["held activations" if runs[0].in_units else "held memory"] = (
        Patch(facecolor=_HELD, edgecolor=_HELD_EDGE, linewidth=0.7),
    )
    if runs[0].in_units:
        entries["1F1B's peak (1)"] = Line2D([], [], color=_LIMIT, linewidth=0.9, linestyle=(0, (4, 3)))
    columns = len(entries) if figure.get_figwidth() > 11 else -(-len(entries) // 2)
    figure.legend(
        entries.values(), entries.keys(), loc="lower center", bbox_to_anchor=(0.5, 0.34 / figure.get_figheight()),
        ncols=columns, frameon=False, fontsize=8.5, handleheight=1.0, columnspacing=1.3, handletextpad=0.6,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def _add_footnotes(figure: Figure, runs: Sequence[_Run], left_out: list[str]) -> None:
    schedules = [run.timeline.schedule for run in runs]
    reading = "Numbers are microbatches" if all(s.pieces == 1 for s in schedules) else "Numbers are sequence pieces"
    if any(s.placement.num_chunks > s.placement.replicas for s in schedules):
        reading += "; paler: a device's later chunk"
    elif any(s.placement.replicas > 1 for s in schedules):
        reading += "; paler: the model's other replica"
    lines = [f"{reading}; in a bubble: the action whose result the device waits for."]
    if left_out:
        lines.append(f"Left out for want of room: {', '.join(left_out)}. The .html page has everything.")
    for line, text in enumerate(lines):
        place = (0.28 - 0.16 * line) / figure.get_figheight()
        figure.text(0.5, place, text, ha="center", va="center", fontsize=8, color=_QUIET)
