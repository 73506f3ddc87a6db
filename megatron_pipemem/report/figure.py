"""Timelines as PNG and SVG. Needs matplotlib, which is imported only when a picture is drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pipemem.report.timeline import (
    KIND_NAMES,
    Box,
    boxes,
    colour,
    headline,
    held_steps,
    ink,
    legend,
    memory_text,
)
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.simulator import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": "#3c4043",
    "xtick.color": "#3c4043",
    "ytick.color": "#3c4043",
}
_IDLE = "#f1f3f4"
_DPI = 150
_NARROWEST, _WIDEST = 9.0, 24.0
_LABEL_POINTS = 4.6
_GAP = 0.06
"""Part of a row's height left free above and below its boxes."""


def draw(timeline: Timeline) -> Figure:
    """One run: a row per device, and below it what every device holds over time against 1F1B's peak."""
    with _style():
        rows = boxes(timeline)
        row_inches = _row_inches(len(rows))
        top, bottom = row_inches * len(rows), max(1.5, 0.3 * row_inches * len(rows))
        width = _figure_width([rows])
        figure, (run, memory) = _subplots(width, [top, bottom], space=0.35)
        _draw_rows(run, timeline, rows, width)
        _draw_held(memory, timeline, rows)
        memory.set_xlim(0, timeline.makespan or 1)
        run.tick_params(labelbottom=False)
        run.set_title(headline(timeline), loc="left", fontsize=13, fontweight="bold", pad=8)
        memory.set_xlabel(f"time (makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g})")
        _add_legend(figure, [timeline])
        return figure


def compare(timelines: Sequence[Timeline]) -> Figure:
    """Several runs under one another on one time axis, beside each row the peak memory of its device."""
    with _style():
        all_rows = [boxes(timeline) for timeline in timelines]
        width, longest = _figure_width(all_rows) + 1.4, max(timeline.makespan for timeline in timelines) or 1
        heights = [0.8 * _row_inches(len(rows)) * len(rows) for rows in all_rows]
        figure, axes = _subplots(width, heights, space=0.38, columns=(width - 2.6, 1.4))
        highest = max(timeline.peak for timeline in timelines) or 1
        for timeline, rows, (run, memory) in zip(timelines, all_rows, axes, strict=True):
            _draw_rows(run, timeline, rows, width - 1.4, longest)
            run.set_title(headline(timeline), loc="left", fontsize=11, fontweight="bold", pad=5)
            if timeline.makespan < longest:
                run.axvline(timeline.makespan, color="#3c4043", linewidth=0.8, linestyle=(0, (4, 3)))
            run.tick_params(labelbottom=False)
            _draw_peaks(memory, timeline, highest)
        in_units = all(timeline.costs.memory is None for timeline in timelines)
        peak_title = "peak (1F1B: 1)" if in_units else "peak"
        axes[0][1].set_title(peak_title, loc="left", fontsize=9, color="#3c4043", pad=5)
        axes[-1][0].tick_params(labelbottom=True)
        axes[-1][0].set_xlabel("time")
        _add_legend(figure, timelines)
        return figure


def save(figure: Figure, path: Path) -> None:
    """Write PNG or SVG by the suffix of ``path``. The same run always gives the same bytes."""
    with _style():
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=_DPI, metadata=metadata)


def _style() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": "pipemem"})


def _subplots(
    width: float, heights: Sequence[float], *, space: float, columns: tuple[float, float] | None = None
) -> tuple[Figure, list]:
    """Panels of the given heights in inches under one another, each split in two when ``columns`` says how wide."""
    from matplotlib.figure import Figure  # a Figure without pyplot draws with Agg and leaves no global state

    above, below, left, right = 0.45, 0.95, 0.8, 0.4
    height = sum(heights) + space * (len(heights) - 1) + above + below
    figure = Figure(figsize=(width, height), facecolor="white")
    grid = figure.add_gridspec(
        len(heights),
        2 if columns else 1,
        height_ratios=heights,
        width_ratios=columns,
        hspace=space / (sum(heights) / len(heights)),
        wspace=0.03,
        left=left / width,
        right=1 - right / width,
        top=1 - above / height,
        bottom=below / height,
    )
    if columns is None:
        return figure, [figure.add_subplot(grid[row, 0]) for row in range(len(heights))]
    return figure, [tuple(figure.add_subplot(grid[row, side]) for side in (0, 1)) for row in range(len(heights))]


def _row_inches(devices: int) -> float:
    return min(0.42, max(0.16, 5.0 / devices))


def _shortest(rows: tuple[tuple[Box, ...], ...]) -> float:
    return min((box.seconds for row in rows for box in row if box.seconds > 0), default=1.0)


def _figure_width(runs: Sequence[tuple[tuple[Box, ...], ...]]) -> float:
    """Wide enough for a two-digit label in the shortest box, within limits."""
    cells = max(max((row[-1].end for row in rows if row), default=1) / _shortest(rows) for rows in runs)
    return min(_WIDEST, max(_NARROWEST, cells * 8 / 72 + 1.2))


def _draw_rows(
    axes: Axes, timeline: Timeline, rows: tuple[tuple[Box, ...], ...], width: float, end: float | None = None
) -> None:
    from matplotlib.collections import PolyCollection

    num_chunks = timeline.schedule.placement.num_chunks
    end = end or timeline.makespan or 1
    shapes: defaultdict[str, list] = defaultdict(list)
    for row in rows:
        for box in row:
            low, high = box.device + _GAP, box.device + 1 - _GAP
            corners = [(box.start, low), (box.start, high), (box.end, high), (box.end, low)]
            shapes[colour(box.action.kind, box.chunk, num_chunks)].append(corners)
    points = (width - 1.2) * 72 / end
    edge = 0.5 if _shortest(rows) * points > 4 else 0.0
    for shade, corners in shapes.items():
        axes.add_collection(PolyCollection(corners, facecolors=shade, edgecolors="white", linewidths=edge))
    _draw_labels(axes, rows, points, num_chunks)
    axes.set_xlim(0, end)
    axes.set_ylim(len(rows), 0)
    axes.set_facecolor(_IDLE)
    step = 1 if len(rows) <= 16 else 4
    axes.set_yticks([device + 0.5 for device in range(0, len(rows), step)])
    axes.set_yticklabels([f"device {device}" for device in range(0, len(rows), step)])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_labels(axes: Axes, rows: tuple[tuple[Box, ...], ...], points: float, num_chunks: int) -> None:
    """Microbatch numbers, when they fit in the shortest box. ``points`` is the width of one second."""
    digits = len(str(max((box.action.microbatch or 0 for row in rows for box in row), default=0)))
    size = min(8.0, _shortest(rows) * points / (0.62 * digits + 0.25))
    if size < _LABEL_POINTS:
        return
    for row in rows:
        for box in row:
            axes.text(
                (box.start + box.end) / 2,
                box.device + 0.52,
                str(box.action.microbatch),
                fontsize=size,
                color=ink(colour(box.action.kind, box.chunk, num_chunks)),
                ha="center",
                va="center_baseline",
            )


def _draw_held(axes: Axes, timeline: Timeline, rows: tuple[tuple[Box, ...], ...]) -> None:
    """Step curves of what every device holds, the first device darkest."""
    from matplotlib import colormaps
    from matplotlib.ticker import MultipleLocator

    shades = colormaps["viridis"]
    for device, row in reversed(list(enumerate(rows))):
        steps = held_steps(row)
        times, held = [*(time for time, _ in steps), timeline.makespan], [*(h for _, h in steps), steps[-1][1]]
        axes.step(
            times,
            held,
            where="post",
            linewidth=1.3 if len(rows) <= 16 else 0.7,
            color=shades(0.9 * device / max(1, len(rows) - 1)),
            label=f"device {device}" if device in (0, len(rows) - 1) else None,
        )
    in_units = timeline.costs.memory is None
    highest = timeline.peak or 1
    if in_units:
        axes.axhline(1, color="#c43c4e", linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            "1F1B's peak", (1, 1), xycoords=("axes fraction", "data"), xytext=(-3, 2), textcoords="offset points",
            ha="right", va="bottom", color="#c43c4e", fontsize=8,
        )  # fmt: skip
        highest = max(highest, 1.0)
    axes.set_ylim(0, highest * 1.18)
    if in_units:
        axes.set_ylabel("held activations")
    else:
        axes.yaxis.set_major_locator(MultipleLocator(2 ** max(0, round(log2(highest / 4)))))
        axes.yaxis.set_major_formatter(lambda held, _: memory_text(held, timeline))
    axes.grid(axis="y", color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", frameon=False, fontsize=8, ncols=2, borderaxespad=0.1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_peaks(axes: Axes, timeline: Timeline, highest: float) -> None:
    """A bar per device, level with the device's row."""
    devices = [device + 0.5 for device in range(len(timeline.peaks))]
    axes.barh(devices, timeline.peaks, height=1 - 4 * _GAP, color="#5f6368")
    if len(devices) <= 16:
        for device, peak in zip(devices, timeline.peaks, strict=True):
            axes.annotate(
                memory_text(peak, timeline), (peak, device), xytext=(3, 0), textcoords="offset points",
                va="center", fontsize=7, color="#3c4043",
            )  # fmt: skip
    axes.set_xlim(0, highest * 1.35)
    axes.set_ylim(len(devices), 0)
    axes.axis("off")


def _add_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    """One entry per kind, with a swatch of every chunk's shade."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    shades: dict[Kind, list[str]] = {}
    for timeline in sorted(timelines, key=lambda timeline: -timeline.schedule.placement.num_chunks):
        num_chunks = timeline.schedule.placement.num_chunks
        for kind in dict(legend(timeline)):
            shades.setdefault(kind, [colour(kind, chunk, num_chunks) for chunk in range(num_chunks)])
    entries = {
        f"{kind} {name}": tuple(Patch(facecolor=shade) for shade in shades[kind])
        for kind, name in KIND_NAMES.items()
        if kind in shades
    }
    entries["idle"] = (Patch(facecolor=_IDLE, edgecolor="#dadce0"),)
    if any(len(of_kind) > 1 for of_kind in shades.values()):
        entries["paler: later chunk"] = (Patch(facecolor="none"),)
    figure.legend(
        entries.values(), entries.keys(), loc="lower center", ncols=len(entries),
        frameon=False, fontsize=9, handleheight=1.0, columnspacing=1.6,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip
