"""Draw timelines as PNG and SVG. matplotlib is imported only when something is drawn."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_suffix, whole_file
from megatron_pipemem.schedule.action import COMPUTE, COPIES, MEMORY, VOCABULARY, Kind
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.tools.report.timeline import IDLE, Box, DrawnRun, colour, held_steps, ink, outline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = (".png", ".svg")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pipemem",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": "#3c4043",
    "xtick.color": "#3c4043",
    "ytick.color": "#3c4043",
}
_DPI = 150
_MARKER = 5.0
"""Half the side of a marker, in points. Names keep this distance from it."""
_CHARACTERS = 36
"""Longest line of names that share a point, in characters."""
_AROUND: dict[str, Any] = {"bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.3}}
_NAME_STYLES: dict[bool, dict[str, Any]] = {
    True: {"fontsize": 8.5, "color": "#202124", "fontweight": "bold", **_AROUND},
    False: {"fontsize": 7.0, "color": "#6f757b", **_AROUND},
}
type _Spot = tuple[float, float]
type _Box = tuple[float, float, float, float]
"""Left, bottom, right and top edge."""


def write_picture(draw: Callable[[], Figure], path: str | Path, kind: str, instead: str = "") -> Path:
    """Call ``draw``, write its figure as PNG or SVG by the suffix of ``path``, and return the path.

    The same figure always gives the same bytes. ``kind`` names the picture in errors. ``instead`` ends the message if
    matplotlib is not installed.
    """
    path = Path(path)
    check_suffix(path, IMAGES, kind)
    try:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            figure = draw()
            metadata = {"Description": _description(figure)} | ({"Date": None} if path.suffix == ".svg" else {})
            with whole_file(path) as beside:
                figure.savefig(beside, format=path.suffix[1:], dpi=_DPI, metadata=metadata)
                if path.suffix == ".png":
                    _reduce_colours(beside, metadata)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "not-installed", f"a {path.suffix} picture needs {error.name}: pip install {error.name}{instead}"
        ) from error
    return path


def _reduce_colours(path: Path, metadata: Mapping[str, str | None]) -> None:
    """Write a PNG file with 256 colours: that is a third of the bytes, and no difference is seen."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    for key, text in metadata.items():
        texts.add_text(key, text or "")
    with Image.open(path) as image:
        picture = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(path, format="png", optimize=True, pnginfo=texts)


def _description(figure: Figure) -> str:
    """Return the titles and captions of a figure, and a hash of its texts and shapes in the coordinates of their axes.

    So two files can be compared even if machines draw the same figure with different pixels.
    """
    from matplotlib.collections import Collection
    from matplotlib.text import Text
    from numpy import asarray

    digest = sha256()
    for artist in figure.findobj():
        if isinstance(artist, Text):
            digest.update(artist.get_text().encode())
        elif isinstance(artist, Collection):
            shapes = [path.vertices for path in artist.get_paths()]
            for numbers in (*shapes, artist.get_facecolor()):
                digest.update(repr(asarray(numbers, dtype=float).round(3).tolist()).encode())
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    captions = [text.get_text() for text in figure.texts]
    return "\n".join([*filter(None, (*titles, *captions)), f"contents {digest.hexdigest()[:16]}"])


def figure_of(axes: Axes) -> Figure:
    """Return the figure to which these axes belong."""
    from matplotlib.figure import Figure

    assert isinstance(axes.figure, Figure), "no figure is drawn within a figure"
    return axes.figure


def axes_for_points(size: tuple[float, float], title: str, x: str, y: str) -> Axes:
    """Make a new figure for points, and return its empty axes.

    ``size`` is the width and height in inches. ``x`` and ``y`` are the labels of the axes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


class Label(NamedTuple):
    """A name to write next to the point ``(x, y)``, in data coordinates."""

    x: float  # in data coordinates, as y
    y: float
    text: str  # empty for a point that only keeps names away
    # largest distance to the point, in points; the name is left out if no nearer place is free
    farthest: float = math.inf
    is_main: bool = True  # whether the name is written large


def add_labels(axes: Axes, labels: Sequence[Label]) -> int:
    """Write names next to their points without overlaps, and return how many points have no name.

    Points in the same place share a name. A name takes the first free place next to its point, or else the nearest free
    place, with a line to the point. A name without a place is left out. Earlier labels choose first. The axes must have
    their final limits.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(axes)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # a name must not move its axes
    renderer, points = FigureCanvasAgg(figure).get_renderer(), 72 / figure.dpi
    groups: dict[_Spot, list[Label]] = {}
    for label in labels:
        x, y = axes.transData.transform((label.x, label.y)) * points
        groups.setdefault((round(x), round(y)), []).append(label)
    left, bottom, right, top = (float(edge) * points for edge in axes.get_window_extent(renderer).extents)
    taken = [(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in groups]
    missing = 0
    for spot, group in groups.items():
        group = [label for label in group if label.text]
        if not group:
            continue
        text = textwrap.fill(", ".join(label.text for label in group), _CHARACTERS)
        name = axes.annotate(
            text, (group[0].x, group[0].y), xytext=(0, 0), textcoords="offset points", ha="left", va="bottom",
            annotation_clip=False, **_NAME_STYLES[group[0].is_main],
        )  # fmt: skip
        size = name.get_window_extent(renderer)
        reach = min(group[0].farthest, math.hypot(right - left, top - bottom))
        free = [
            box
            for box in _places_around(spot, size.width * points, size.height * points, reach)
            if left <= box[0] and bottom <= box[1] and box[2] <= right and box[3] <= top and not _overlaps(box, taken)
        ]
        box = next((candidate for candidate in free if _is_beside(candidate, spot, groups)), None)
        if box is None and free:
            box = free[0]
            x, y = (min(max(at, low), high) - at for at, low, high in zip(spot, box[:2], box[2:], strict=True))
            axes.annotate(
                "", name.xy, xytext=(x, y), textcoords="offset points", annotation_clip=False, zorder=1.5,
                arrowprops={"arrowstyle": "-", "color": "#80868b", "linewidth": 0.6, "shrinkA": 0, "shrinkB": _MARKER - 1},
            )  # fmt: skip
        if box is None:
            name.remove()
            missing += len(group)
        else:
            name.xyann = (box[0] - spot[0], box[1] - spot[1])
            taken.append(box)
    return missing


def _places_around(spot: _Spot, width: float, height: float, reach: float) -> Iterator[_Box]:
    """Yield boxes of this size at growing distances from a point. At each distance, those to the right come first.

    All lengths are in points. No box is farther away than ``reach``.
    """
    ring = _MARKER + 1
    while ring <= reach:
        for turn in sorted(range(-7, 9), key=abs):
            across, up = math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)
            x, y = spot[0] + across * (ring + width / 2), spot[1] + up * (ring + height / 2)
            yield x - width / 2, y - height / 2, x + width / 2, y + height / 2
        ring *= 1.2


def _overlaps(box: _Box, others: Iterable[_Box]) -> bool:
    left, bottom, right, top = box
    return any(left < x1 + 1 and x0 - 1 < right and bottom < y1 + 1 and y0 - 1 < top for x0, y0, x1, y1 in others)


def _is_beside(box: _Box, spot: _Spot, spots: Iterable[_Spot]) -> bool:
    """Return whether a name in this box needs no line: it is close to its point, and closer than to all others.

    ``spot`` is its point, and ``spots`` are all points.
    """

    def gap(x: float, y: float) -> float:
        return math.hypot(max(box[0] - x, x - box[2], 0), max(box[1] - y, y - box[3], 0))

    own = gap(*spot)
    return own < 2 * _MARKER and all(own < gap(*other) - 1.5 for other in spots if other != spot)


TEXT, QUIET = "#202124", "#5f6368"
HELD, HELD_EDGE, LIMIT = "#c9d3df", "#5b6f86", "#b3261e"
_LABEL_POINTS = 4.6
"""Smallest size of letters that are drawn, in points."""
_MOST_NUMBERS = 5000
"""The highest number of actions that are drawn with a number. For more, matplotlib would take very long."""

# A row, in parts of its height: actions above, memory from _UPPER down to _FLOOR.
_ACTIONS, _UPPER, _FLOOR = (0.03, 0.45), 0.49, 0.97
_ACTION_HEIGHT = _ACTIONS[1] - _ACTIONS[0]
# Copies to and from the host are drawn between the two, if there are any.
_LANE, _UPPER_BELOW_LANE = (0.46, 0.51), 0.53
_STEP_LINE = 1.6
_CAP_LINE, _CAP_DOTS = 1.0, (0, (1, 1.5))


class PicturedRun(DrawnRun):
    """A timeline with the sizes and boxes that its matplotlib picture needs."""

    @cached_property
    def shortest(self) -> float:
        return min((box.seconds for row in self.rows for box in row if box.seconds > 0), default=1.0)

    @property
    def end(self) -> float:
        return self.timeline.makespan or 1.0

    @property
    def upper(self) -> float:
        """The upper edge of the memory curve in a device's row, as a part of the row's height."""
        return _UPPER_BELOW_LANE if any(self.host_transfers) else _UPPER

    def shade(self, box: Box) -> str:
        return self.colour(box.action.kind, box.chunk)

    def edge(self, box: Box) -> str:
        """Return the colour of the box's edge: later chunks, which are paler, have the full colour of their kind.

        So colour-blind people can tell a pale box from one of another kind.
        """
        return outline(box.action.kind, box.chunk) or "white"

    @cached_property
    def boxes(self) -> list[list[Box]]:
        """The boxes of each row, without actions on memory, which are not drawn."""
        return [[box for box in row if box.action.kind not in MEMORY] for row in self.rows]


def draw_run(
    run: PicturedRun, axes: Axes, end: float, points: float, top: float, caps: Sequence[float] = ()
) -> set[str]:
    """Draw one timeline into its axes, and return what was left out for lack of room.

    ``points`` is the width of a second in points, ``end`` the end of the time axis, and ``top`` that of the memory
    axis. ``caps`` has the memory cap of each device, in the unit of the memory axis; nothing without a cap.
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
    _draw_held(axes, run, top, caps)
    for device, starts in enumerate(run.step_starts):
        if starts:
            axes.vlines(starts, device, device + _FLOOR, color=TEXT, linewidth=_STEP_LINE)
    if run.end < end:
        axes.axvline(run.end, color=TEXT, linewidth=0.9, linestyle=(0, (4, 3)))
    _frame(axes)
    _name_devices(axes, run, row_points)
    return left_out


def _bars(axes: Axes, spans: Iterable[tuple[int, float, float]], rows: tuple[float, float], **look: Any) -> None:
    """Draw bars that look alike. Each span is ``(device, start, end)``.

    ``rows`` has the upper and the lower edge of the bars in a device's row, as parts of the row's height from the top.
    """
    from matplotlib.collections import PolyCollection

    low, high = rows
    corners = [[(a, d + low), (a, d + high), (b, d + high), (b, d + low)] for d, a, b in spans]
    axes.add_collection(PolyCollection(corners, **{"linewidths": 0, **look}))


def _write(axes: Axes, device: int, times: tuple[float, float], text: str, **look: Any) -> None:
    """Write text in the middle of a bar. ``times`` is the bar's start and end."""
    place = (sum(times) / 2, device + sum(_ACTIONS) / 2 + 0.01)
    axes.text(*place, text, ha="center", va="center_baseline", clip_on=True, **look)


def _draw_boxes(axes: Axes, run: PicturedRun, points: float) -> None:
    shapes: defaultdict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for row in run.boxes:
        for box in row:
            shapes[run.shade(box), run.edge(box)].append((box.device, box.start, box.end))
    _bars(axes, [(device, *axes.get_xlim()) for device in range(len(run.rows))], _ACTIONS, facecolors=IDLE)
    width = 0.5 if run.shortest * points > 4 else 0.0
    for (shade, edge), spans in sorted(shapes.items(), key=lambda shape: shape[0][1] != "white"):
        _bars(axes, spans, _ACTIONS, facecolors=shade, edgecolors=edge, linewidths=width)
    pairs = [(first.device, first.start, second.end) for first, second in run.pairs]
    _bars(axes, pairs, _ACTIONS, facecolors="none", edgecolors=TEXT, linewidths=1.2)


def _number_size(run: PicturedRun, points: float, row_points: float) -> float:
    """Return the font size in points of numbers that fit the shortest box, or 0 if there should be no numbers.

    ``points`` is the width of a second in points, and ``row_points`` the height of a row in points. There are none if
    they would be too small or too many.
    """
    boxes = [box for row in run.boxes for box in row]
    digits = len(str(max((box.action.microbatch or 0 for box in boxes), default=0)))
    size = min(8.0, run.shortest * points / (0.62 * digits + 0.25), 0.8 * _ACTION_HEIGHT * row_points)
    return size if size >= _LABEL_POINTS and len(boxes) <= _MOST_NUMBERS else 0.0


def _draw_waits(axes: Axes, run: PicturedRun, points: float, row_points: float) -> set[str]:
    """Write, in each bubble, the action that the device waits for, in the longest form that fits.

    ``points`` is the width of a second in points, and ``row_points`` the height of a row in points. Return
    the footnote's name for the texts of bubbles that are too narrow; empty if there are none.
    """
    left_out: set[str] = set()
    size = min(7.0, 0.62 * _ACTION_HEIGHT * row_points)
    for row in run.bubbles:
        for bubble in row:
            if bubble.producer is None:
                continue
            action, device = bubble.producer.action, bubble.producer.device
            forms = (f"waits for {action} of device {device}", f"waits for {action}")
            room = (bubble.end - bubble.start) * points - 3
            text = next((form for form in forms if 0.52 * size * len(form) < room), None)
            if text is None or size < _LABEL_POINTS:
                left_out.add("waits of narrow bubbles")
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


def _draw_held(axes: Axes, run: PicturedRun, top: float, caps: Sequence[float]) -> None:
    """Draw the memory of each device over time, on a scale from 0 to ``top``.

    A dashed line shows 1F1B's peak if the memory is in activation units, and a dotted line the cap of a device.
    """
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
    if caps:
        levels_of_caps = [device + _FLOOR - height * cap / top for device, cap in enumerate(caps)]
        axes.hlines(levels_of_caps, *axes.get_xlim(), color=TEXT, linewidth=_CAP_LINE, linestyle=_CAP_DOTS)


def _frame(axes: Axes) -> None:
    axes.set_yticks([])
    axes.tick_params(axis="x", length=2.5, labelbottom=False)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _name_devices(axes: Axes, run: PicturedRun, row_points: float) -> None:
    """Write the name of each device on the left, and its peak on the right."""
    size = min(9.0, 0.42 * row_points)
    left: dict[str, Any] = {"xytext": (-5, 0), "ha": "right", "va": "center", "fontsize": size, "color": TEXT}
    right: dict[str, Any] = {"xytext": (4, 0), "ha": "left", "va": "center", "fontsize": size, "color": HELD_EDGE}
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    for device, peak in enumerate(run.timeline.peaks):
        axes.annotate(f"device {device}", (0, device + sum(_ACTIONS) / 2), **place, **left)
        axes.annotate(run.memory_text(peak), (1, device + (_UPPER + _FLOOR) / 2), **place, **right)
    axes.annotate("peak", (1, 0), **place, **right | {"xytext": (4, 3), "va": "bottom", "fontsize": 8})


_LEFT, _RIGHT = 0.8, 0.75
"""Inches left and right of the time axis, for the devices' names and their peaks."""
_NARROWEST, _WIDEST = 9.0, 24.0
_COMFORTABLE = 7.5
"""The width in points that the shortest action gets if ``_WIDEST`` allows it: enough for a label of two digits."""


def draw(timelines: Sequence[Timeline], cap: MemoryCap | None = None) -> Figure:
    """Return a new figure with the actions of each device, and its memory below.

    Several timelines share one time scale, and one memory scale if their memory has the same unit. Each timeline is
    drawn whole. If some labels do not fit, the picture says which were left out. ``cap`` is the memory cap that the
    schedules keep. It is drawn where the memory has its unit.
    """
    runs = [PicturedRun(timeline) for timeline in timelines]
    caps = [() if cap is None or cap.in_bytes == run.in_units else cap.of(len(run.rows)) for run in runs]
    longest, shortest = max(run.end for run in runs), min(run.shortest for run in runs)
    width = min(_WIDEST, max(_NARROWEST, longest / shortest * _COMFORTABLE / 72 + _LEFT + _RIGHT))
    points = (width - _LEFT - _RIGHT) * 72 / longest
    heights = [_row_inches(len(run.rows), len(runs)) * len(run.rows) for run in runs]
    figure, panels = _panels(width, heights)
    left_out = set()
    for run, axes, of_run in zip(runs, panels, caps, strict=True):
        top = max(run.memory_scale(runs), 1.02 * max(of_run, default=0.0))
        left_out |= draw_run(run, axes, longest, points, top, of_run)
        axes.set_title(
            _title(run, runs[0]), loc="left", fontsize=13 if len(runs) == 1 else 11, fontweight="bold", pad=7
        )
    panels[-1].tick_params(labelbottom=True)
    _label_time(figure, runs, width)
    _add_legend(figure, runs, str(cap) if any(caps) else "")
    _add_footnotes(figure, runs, sorted(left_out))
    return figure


def _row_inches(devices: int, num_runs: int) -> float:
    """Return the height in inches of a device's row: its actions and its memory.

    ``devices`` is the number of rows of the timeline, and ``num_runs`` the number of timelines in the picture.
    """
    return min(0.85, max(0.36, 9.0 / devices)) * (1 if num_runs == 1 else 0.85)


def _panels(width: float, heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Return a new figure, and the empty axes of each timeline in it, from top to bottom.

    ``width`` is that of the figure, and ``heights`` are those of the axes, in inches.
    """
    from matplotlib.figure import Figure  # without pyplot, a Figure draws with Agg and leaves no global state

    above, below, space = 0.5, 1.2 if width > 11 else 1.4, 0.5
    height = sum(heights) + space * (len(heights) - 1) + above + below
    figure = Figure(figsize=(width, height), facecolor="white")
    rows = figure.add_gridspec(
        len(heights),
        height_ratios=heights,
        hspace=space / (sum(heights) / len(heights)),
        left=_LEFT / width,
        right=1 - _RIGHT / width,
        top=1 - above / height,
        bottom=below / height,
    )
    return figure, [figure.add_subplot(rows[index]) for index in range(len(heights))]


def _title(run: PicturedRun, first: PicturedRun) -> str:
    text = run.headline
    if run is first or not first.timeline.makespan:
        return text
    change = run.timeline.makespan / first.timeline.makespan - 1
    if change >= 1:
        sooner = f"{change + 1:.1f} times as long as"
    elif abs(change) < 5e-4:
        sooner = "as long as"
    else:
        sooner = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'} than"
    return f"{text}, {sooner} {first.timeline.schedule.name}"


def _label_time(figure: Figure, runs: Sequence[PicturedRun], width: float) -> None:
    timeline, units = runs[0].timeline, {run.time_unit: None for run in runs}
    makespan = f"; makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g}"
    text = f"time ({' or '.join(units)}{'' if len(runs) > 1 else makespan})"
    middle = (_LEFT + (width - _LEFT - _RIGHT) / 2) / width
    bottom = 0.86 if figure.get_figwidth() > 11 else 1.06
    figure.text(middle, bottom / figure.get_figheight(), text, ha="center", va="center", color="#3c4043")


def _add_legend(figure: Figure, runs: Sequence[PicturedRun], cap: str) -> None:
    """Add a legend with one entry for each kind of action. It shows a colour for each chunk.

    ``cap`` is the memory cap as text; empty if none is drawn.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shades: dict[Kind, list[str]] = {}
    for run in sorted(runs, key=lambda run: -run.num_chunks):
        for kind in dict(run.legend):
            chunks = range(1 if kind in VOCABULARY else run.num_chunks)
            shades.setdefault(kind, [run.colour(kind, chunk) for chunk in chunks])
    entries: dict[str, Any] = {
        f"{kind} {kind.spec.says}": tuple(Patch(facecolor=shade) for shade in shades[kind])
        for kind in COMPUTE
        if kind in shades
    }
    for kind in COPIES:
        if any(run.timeline.schedule.offloads and any(run.host_transfers) for run in runs):
            entries[kind.spec.says] = (Patch(facecolor=colour(kind)),)
    if any(run.pairs for run in runs):
        entries["pair"] = (Patch(facecolor="none", edgecolor=TEXT, linewidth=1.2),)
    if any(map(any, (run.step_starts for run in runs))):
        entries["next step"] = Line2D([], [], color=TEXT, linewidth=_STEP_LINE)
    entries["idle"] = (Patch(facecolor=IDLE, edgecolor="#dadce0"),)
    entries["held activations" if runs[0].in_units else "held memory"] = (
        Patch(facecolor=HELD, edgecolor=HELD_EDGE, linewidth=0.7),
    )
    if runs[0].in_units:
        entries["1F1B's peak (1)"] = Line2D([], [], color=LIMIT, linewidth=0.9, linestyle=(0, (4, 3)))
    if cap:
        entries[f"cap: {cap}"] = Line2D([], [], color=TEXT, linewidth=_CAP_LINE, linestyle=_CAP_DOTS)
    columns = len(entries) if figure.get_figwidth() > 11 else -(-len(entries) // 2)
    figure.legend(
        list(entries.values()), list(entries), loc="lower center", bbox_to_anchor=(0.5, 0.34 / figure.get_figheight()),
        ncols=columns, frameon=False, fontsize=8.5, handleheight=1.0, columnspacing=1.3, handletextpad=0.6,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def _add_footnotes(figure: Figure, runs: Sequence[PicturedRun], left_out: list[str]) -> None:
    schedules = [run.timeline.schedule for run in runs]
    unit = "microbatch" if all(schedule.units.are_whole for schedule in schedules) else "sequence slice"
    reading = f"Numbers are {unit}{'es' if unit == 'microbatch' else 's'}"
    if any(s.placement.num_chunks > s.placement.replicas for s in schedules):
        reading += "; paler, with an edge: a device's later chunk"
    elif any(s.placement.replicas > 1 for s in schedules):
        reading += "; paler, with an edge: the model's other replica"
    if any(text.get_text().startswith("waits for ") for axes in figure.axes for text in axes.texts):
        reading += f"; waits for 1B0: for the backward of stage 1, {unit} 0"
    lines = [f"{reading}."]
    if left_out:
        lines.append(f"Left out for lack of room: {', '.join(left_out)}. The .html page has everything.")
    for line, text in enumerate(lines):
        place = (0.28 - 0.16 * line) / figure.get_figheight()
        figure.text(0.5, place, text, ha="center", va="center", fontsize=8, color=QUIET)
