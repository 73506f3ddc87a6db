"""Draw one run within its axes: for every device its actions, its host transfers, and below them what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_pipemem.report.axis import Window, Windows
from megatron_pipemem.report.timeline import (
    IDLE,
    TRANSFER_COLOURS,
    Box,
    Bubble,
    HostTransfer,
    boxes,
    bubbles,
    colour,
    held_steps,
    host_transfers,
    ink,
    memory_text,
)
from megatron_pipemem.schedule.core.action import MEMORY
from megatron_pipemem.schedule.core.simulator import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT, QUIET = "#202124", "#5f6368"
HELD, HELD_EDGE, LIMIT = "#c9d3df", "#5b6f86", "#b3261e"
_LABEL_POINTS = 4.6
"""The smallest letters that are drawn."""
_MOST_NUMBERS = 5000
"""More would take matplotlib longer than anybody waits."""

# A device's row, in parts of its height: actions from _TOP to _MIDDLE, memory from _UPPER down to _FLOOR.
_TOP, _MIDDLE, _UPPER, _FLOOR = 0.05, 0.60, 0.64, 0.96
# Copies to and from the host lie between the two, where there are any.
_LANE_TOP, _LANE_FLOOR, _UPPER_BELOW_LANE = 0.615, 0.675, 0.70


@dataclass(frozen=True)
class PicturedRun:
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
        """Return where a device's memory begins in its row."""
        return _UPPER_BELOW_LANE if any(self.host_transfers) else _UPPER

    @property
    def in_units(self) -> bool:
        return self.timeline.costs.memory is None


def draw_run(run: PicturedRun, panels: Sequence[Axes], windows: Windows, points: float, top: float) -> set[str]:
    """Draw one run into the panels of its windows.

    Args:
        run: what is drawn.
        panels: the axes of its windows, from left to right.
        windows: seconds from and to.
        points: per second.
        top: the most memory that the scale shows, in units or bytes.

    Returns:
        What was left out for want of room, in words.
    """
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
            panel.axvline(run.end, color=TEXT, linewidth=0.9, linestyle=(0, (4, 3)))
        _frame(panel)
    _name_devices(panels, run, row_points)
    if len(panels) > 1:
        _break(panels)
    return left_out


def _draw_boxes(axes: Axes, run: PicturedRun, rows: Sequence[Sequence[Box]], points: float) -> None:
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


def _number_size(run: PicturedRun, windows: Windows, points: float, row_points: float) -> float:
    """Return the size in points at which microbatch numbers fit the shortest box; 0 when they would be too small or too
    many.
    """
    seen = [
        box.action.microbatch or 0
        for row in run.rows
        for box in row
        if box.action.kind not in MEMORY and any(box.end >= start and box.start <= end for start, end in windows)
    ]
    digits = len(str(max(seen, default=0)))
    size = min(8.0, run.shortest * points / (0.62 * digits + 0.25), 0.8 * (_MIDDLE - _TOP) * row_points)
    return size if size >= _LABEL_POINTS and len(seen) <= _MOST_NUMBERS else 0.0


def _draw_numbers(axes: Axes, run: PicturedRun, rows: Sequence[Sequence[Box]], size: float) -> None:
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


def _draw_waits(axes: Axes, run: PicturedRun, window: Window, points: float, row_points: float) -> set[str]:
    """Write into every bubble what its device waits for, in as many words as fit."""
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
                fontsize=size, color=QUIET, style="italic", ha="center", va="center_baseline", clip_on=True,
            )  # fmt: skip
    return left_out


def _draw_transfers(axes: Axes, run: PicturedRun, window: Window) -> None:
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


def _draw_held(axes: Axes, run: PicturedRun, window: Window, top: float) -> None:
    """Draw under every device what it holds over time; all devices on one scale from 0 to ``top``."""
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
    axes.add_collection(PolyCollection(areas, facecolors=HELD, linewidths=0))
    axes.add_collection(LineCollection(curves, colors=HELD_EDGE, linewidths=0.7))
    if run.in_units:
        levels = [device + _FLOOR - height / top for device in range(len(run.rows))]
        axes.hlines(levels, *window, color=LIMIT, linewidth=0.6, linestyle=(0, (4, 3)))


def _clip(curve: list[tuple[float, float]], window: Window) -> list[tuple[float, float]]:
    """Return the part of a step curve within ``window``."""
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


def _name_devices(panels: Sequence[Axes], run: PicturedRun, row_points: float) -> None:
    """Write names on the left, peaks on the right."""
    size = min(9.0, 0.42 * row_points)
    for device, peak in enumerate(run.timeline.peaks):
        panels[0].annotate(
            f"device {device}", (0, device + (_TOP + _MIDDLE) / 2), xycoords=("axes fraction", "data"),
            xytext=(-5, 0), textcoords="offset points", ha="right", va="center", fontsize=size, color=TEXT,
        )  # fmt: skip
        panels[-1].annotate(
            memory_text(peak, run.timeline), (1, device + (_UPPER + _FLOOR) / 2), xycoords=("axes fraction", "data"),
            xytext=(4, 0), textcoords="offset points", ha="left", va="center", fontsize=size, color=HELD_EDGE,
        )  # fmt: skip
    panels[-1].annotate(
        "peak", (1, 0), xycoords=("axes fraction", "data"), xytext=(4, 3), textcoords="offset points",
        ha="left", va="bottom", fontsize=8, color=HELD_EDGE,
    )  # fmt: skip


def _break(panels: Sequence[Axes]) -> None:
    """Draw a torn edge between the windows."""
    teeth = round(panels[0].get_position().height * panels[0].figure.get_figheight() * 8)
    for panel, edge, inwards in zip(panels, (1, 0), (-0.003, 0.003), strict=True):
        zigzag = [edge + inwards * (tooth % 2) for tooth in range(teeth + 1)]
        panel.plot(
            zigzag, [tooth / teeth for tooth in range(teeth + 1)], transform=panel.transAxes, clip_on=False,
            color="white", linewidth=3,
        )  # fmt: skip
