"""Draw one run within its axes: for every device its actions, its host transfers, and below them what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megatron_pipemem.report.picture import figure_of
from megatron_pipemem.report.timeline import IDLE, Box, DrawnRun, colour, held_steps, ink
from megatron_pipemem.schedule.action import COPIES, MEMORY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT, QUIET = "#202124", "#5f6368"
HELD, HELD_EDGE, LIMIT = "#c9d3df", "#5b6f86", "#b3261e"
_LABEL_POINTS = 4.6
"""The smallest letters that are drawn."""
_MOST_NUMBERS = 5000
"""More would take matplotlib longer than anybody waits."""

# A device's row, in parts of its height: actions above, memory from _UPPER down to _FLOOR.
_ACTIONS, _UPPER, _FLOOR = (0.05, 0.60), 0.64, 0.96
_ACTION_HEIGHT = _ACTIONS[1] - _ACTIONS[0]
# Copies to and from the host lie between the two, where there are any.
_LANE, _UPPER_BELOW_LANE = (0.615, 0.675), 0.70


class PicturedRun(DrawnRun):
    """A timeline with what its picture is made of."""

    @cached_property
    def shortest(self) -> float:
        return min((box.seconds for row in self.rows for box in row if box.seconds > 0), default=1.0)

    @property
    def end(self) -> float:
        return self.timeline.makespan or 1.0

    @property
    def upper(self) -> float:
        """Return where a device's memory begins in its row."""
        return _UPPER_BELOW_LANE if any(self.host_transfers) else _UPPER

    def shade(self, box: Box) -> str:
        return self.colour(box.action.kind, box.chunk)

    @cached_property
    def boxes(self) -> list[list[Box]]:
        """The boxes of every row that are drawn."""
        return [[box for box in row if box.action.kind not in MEMORY] for row in self.rows]


def draw_run(run: PicturedRun, axes: Axes, end: float, points: float, top: float) -> set[str]:
    """Draw one run into its axes.

    Args:
        run: what is drawn.
        axes: of the run.
        end: of the time that the axes show, in seconds.
        points: per second.
        top: the most memory that the scale shows, in units or bytes.

    Returns:
        What was left out for want of room, in words.
    """
    left_out: set[str] = set()
    row_points = axes.get_position().height * figure_of(axes).get_figheight() * 72 / len(run.rows)
    axes.set_xlim(0.0, end)
    axes.set_ylim(len(run.rows), 0)
    _draw_boxes(axes, run, points)
    size = _number_size(run, points, row_points)
    if size:
        for box in (box for row in run.boxes for box in row):
            number = str(box.action.microbatch)
            _write(axes, box.device, (box.start, box.end), number, fontsize=size, color=ink(run.shade(box)))
    else:
        left_out.add("microbatch numbers")
    left_out |= _draw_waits(axes, run, points, row_points)
    _draw_transfers(axes, run)
    _draw_held(axes, run, top)
    if run.end < end:
        axes.axvline(run.end, color=TEXT, linewidth=0.9, linestyle=(0, (4, 3)))
    _frame(axes)
    _name_devices(axes, run, row_points)
    return left_out


def _bars(axes: Axes, spans: Iterable[tuple[int, float, float]], rows: tuple[float, float], **look: Any) -> None:
    """Draw bars of one look, each of a device from one time to another."""
    from matplotlib.collections import PolyCollection

    low, high = rows
    corners = [[(a, d + low), (a, d + high), (b, d + high), (b, d + low)] for d, a, b in spans]
    axes.add_collection(PolyCollection(corners, **{"linewidths": 0, **look}))


def _write(axes: Axes, device: int, times: tuple[float, float], text: str, **look: Any) -> None:
    """Write text into the middle of a bar of actions."""
    place = (sum(times) / 2, device + sum(_ACTIONS) / 2 + 0.01)
    axes.text(*place, text, ha="center", va="center_baseline", clip_on=True, **look)


def _draw_boxes(axes: Axes, run: PicturedRun, points: float) -> None:
    shapes: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for row in run.boxes:
        for box in row:
            shapes[run.shade(box)].append((box.device, box.start, box.end))
    _bars(axes, [(device, *axes.get_xlim()) for device in range(len(run.rows))], _ACTIONS, facecolors=IDLE)
    edge = 0.5 if run.shortest * points > 4 else 0.0
    for shade, spans in shapes.items():
        _bars(axes, spans, _ACTIONS, facecolors=shade, edgecolors="white", linewidths=edge)


def _number_size(run: PicturedRun, points: float, row_points: float) -> float:
    """Return the size in points at which microbatch numbers fit the shortest box; 0 when they would be too small or too
    many.
    """
    boxes = [box for row in run.boxes for box in row]
    digits = len(str(max((box.action.microbatch or 0 for box in boxes), default=0)))
    size = min(8.0, run.shortest * points / (0.62 * digits + 0.25), 0.8 * _ACTION_HEIGHT * row_points)
    return size if size >= _LABEL_POINTS and len(boxes) <= _MOST_NUMBERS else 0.0


def _draw_waits(axes: Axes, run: PicturedRun, points: float, row_points: float) -> set[str]:
    """Write into every bubble what its device waits for, in as many words as fit."""
    left_out: set[str] = set()
    size = min(7.0, 0.62 * _ACTION_HEIGHT * row_points)
    for row in run.bubbles:
        for bubble in row:
            if bubble.producer is None:
                continue
            action, device = bubble.producer.action, bubble.producer.device
            forms = (f"waits for {action} of device {device}", f"waits for {action}", f"{action}")
            room = (bubble.end - bubble.start) * points - 3
            text = next((form for form in forms if 0.52 * size * len(form) < room), None)
            if text is None or size < _LABEL_POINTS:
                left_out.add("what narrow bubbles wait for")
                continue
            _write(axes, bubble.device, (bubble.start, bubble.end), text, fontsize=size, color=QUIET, style="italic")
    return left_out


def _draw_transfers(axes: Axes, run: PicturedRun) -> None:
    for kind in COPIES:
        spans = [
            (copy.device, copy.start, copy.end)
            for lane in run.host_transfers
            for copy in lane
            if copy.action.kind is kind
        ]
        _bars(axes, spans, _LANE, facecolors=colour(kind))


def _draw_held(axes: Axes, run: PicturedRun, top: float) -> None:
    """Draw under every device what it holds over time; all devices on one scale from 0 to ``top``."""
    from matplotlib.collections import LineCollection, PolyCollection

    height, curves, areas = _FLOOR - run.upper, [], []
    for device, row in enumerate(run.rows):
        floor = device + _FLOOR
        steps = [*held_steps(row), (run.end, 0.0)]
        levels = [floor - height * held / top for _, held in steps]
        curve = [(time, level) for (time, _), both in zip(steps[1:], pairwise(levels), strict=True) for level in both]
        curves.append([(0.0, levels[0]), *curve[:-1]])
        areas.append([(0.0, floor), *curves[-1], (run.end, floor)])
    axes.add_collection(PolyCollection(areas, facecolors=HELD, linewidths=0))
    axes.add_collection(LineCollection(curves, colors=HELD_EDGE, linewidths=0.7))
    if run.in_units:
        limits = [device + _FLOOR - height / top for device in range(len(run.rows))]
        axes.hlines(limits, *axes.get_xlim(), color=LIMIT, linewidth=0.6, linestyle=(0, (4, 3)))


def _frame(axes: Axes) -> None:
    axes.set_yticks([])
    axes.tick_params(axis="x", length=2.5, labelbottom=False)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _name_devices(axes: Axes, run: PicturedRun, row_points: float) -> None:
    """Write names on the left, peaks on the right."""
    size = min(9.0, 0.42 * row_points)
    left: dict[str, Any] = {"xytext": (-5, 0), "ha": "right", "va": "center", "fontsize": size, "color": TEXT}
    right: dict[str, Any] = {"xytext": (4, 0), "ha": "left", "va": "center", "fontsize": size, "color": HELD_EDGE}
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    for device, peak in enumerate(run.timeline.peaks):
        axes.annotate(f"device {device}", (0, device + sum(_ACTIONS) / 2), **place, **left)
        axes.annotate(run.memory_text(peak), (1, device + (_UPPER + _FLOOR) / 2), **place, **right)
    axes.annotate("peak", (1, 0), **place, **right | {"xytext": (4, 3), "va": "bottom", "fontsize": 8})
