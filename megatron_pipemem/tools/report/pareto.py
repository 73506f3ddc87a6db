"""Draw the bubble of schedules against their peak memory, in the terminal or as PNG and SVG.

Schedules that no other dominates are marked.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.tools.report.figure import Label, add_labels, axes_for_points, figure_of
from megatron_pipemem.tools.report.terminal import FittingTable
from megatron_pipemem.tools.report.timeline import UNITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#2662a8", "#c43c4e", "#3aa38f", "#8a5fb0", "#9a6a00", "#5f6368")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_SEARCH = "#d97706"
_BUBBLE = "bubble: idle share of the step, busiest device"
_NOTE = 140
"""Characters in a line below the picture."""
_FARTHEST = 60
"""Largest distance in points between a dominated point and its name."""


@dataclass(frozen=True)
class Point:
    """A schedule in the picture, with its peak memory and bubble."""

    name: str  # the schedule's name, with the options that distinguish it from others of its family
    placement: str
    peak: float  # the highest peak of all devices, as a share of 1F1B's peak
    bubble_rate: float
    """The idle share of the makespan on the busiest device, from 0 to 1. If schedules distribute the work differently,
    the least work of a busiest device counts for all. So the faster schedule has the lower bubble.
    """
    dominated: bool = False  # whether another point is at least as good in both peak and bubble, and better in one
    cap: float | None = None  # the memory cap of the search that found the schedule; None for a family's schedule
    family: str = ""  # the name without chunks; a line joins the points of a family
    chunks: int = 1
    is_stock: bool = False  # whether Megatron runs such a schedule by itself


def table(points: Sequence[Point], in_bytes: bool = False) -> FittingTable:
    """Return a table of the points, sorted by peak. Dominated points are dim, and if there are any, the others have a mark.

    With ``in_bytes`` the caption says that peaks are shares of 1F1B's bytes, otherwise activation units.
    """
    marks = ("front",) if any(point.dominated for point in points) else ()
    columns = (*marks, "schedule", "chunks", "placement", "peak", "bubble")
    caption = f"bubble: idle share of the busiest device; peak: in {_unit(in_bytes)}"
    if marks:
        caption = f"front: * if no other schedule has both a lower peak and a smaller bubble; {caption}"
    rows = FittingTable(columns, text=(*marks, "schedule", "placement"), caption=caption)
    for point in sorted(points, key=_by_peak):
        rows.add_row(
            *["" if point.dominated else "*" for _ in marks],
            (point.family or point.name) if point.cap is None else f"{point.family}, searched",
            str(point.chunks),
            point.placement,
            f"{point.peak:.4g}",
            f"{point.bubble_rate:.2%}",
            style="dim" if point.dominated else "",
        )
    return rows


def _unit(in_bytes: bool) -> str:
    return "shares of 1F1B's bytes, for the same model" if in_bytes else UNITS


def draw(
    points: Sequence[Point], bound: Sequence[tuple[float, float]] = (), title: str = "", in_bytes: bool = False
) -> Figure:
    """Return a figure with bubble on the vertical and peak on the horizontal axis; lower is better for both.

    A staircase joins the points that are not dominated. Dominated points are hollow, and searched schedules are stars
    with their caps. A thin line joins the schedules of a family with other numbers of chunks.
    ``bound`` has pairs ``(memory, bubble rate)``, sorted by memory. No schedule within that memory has a smaller
    bubble. With ``in_bytes`` the peak axis is labelled as shares of 1F1B's bytes, otherwise as activation units. Raise an
    UnsupportedError if there are no points.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    if not points:
        raise UnsupportedError("nothing-to-draw", "there is no schedule to draw; give at least one point")
    axes = axes_for_points((10, 5.6), title, f"peak of the fullest device, in {_unit(in_bytes)}", _BUBBLE)
    figure = figure_of(axes)
    placements = list(dict.fromkeys(point.placement for point in sorted(points, key=_by_peak)))
    if bound:
        # Each memory has its own bound, which is lower for more memory.
        axes.step(
            *zip(*bound, strict=True), where="pre", color="#9aa0a6", linewidth=1.1, linestyle="--", zorder=1,
            label="lower bound for all\nplacements shown",
        )  # fmt: skip
    for index, placement in enumerate(placements):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        named = [point for point in points if point.placement == placement and point.cap is None]
        _scatter(axes, named, colour, marker, placement)
    _scatter(
        axes, [point for point in points if point.cap is not None], _SEARCH, "*", "searched, with its cap", size=150
    )
    front = sorted((point for point in points if not point.dominated), key=_by_peak)
    steps = [(point.peak, point.bubble_rate) for point in front]
    if steps:
        axes.step(
            *zip(*steps, strict=True), where="post", color="#202124", linewidth=1.0, alpha=0.6, zorder=3, label="front"
        )
    right, top = _limits(points)
    inside = [point for point in points if point.peak <= right and point.bubble_rate <= top]
    axes.set_xlim(max(0.0, min(point.peak for point in points) - 0.08 * right), right)
    axes.set_ylim(-0.02 * top, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    handles, labels = axes.get_legend_handles_labels()
    if any(point.dominated for point in points):
        hollow = Line2D([], [], linestyle="", marker="o", markerfacecolor="white", markeredgecolor="#5f6368")
        handles, labels = [*handles, hollow], [*labels, "hollow: dominated"]
    figure.legend(handles, labels, frameon=False, fontsize=8.5, loc="outside right upper")
    note = figure.supxlabel(_note(points, inside, 0), x=0.01, ha="left", fontsize=8, color="#5f6368")
    missing = add_labels(axes, _labels(axes, inside))
    note.set_text(_note(points, inside, missing))
    return figure


def _labels(axes: Axes, inside: Sequence[Point]) -> list[Label]:
    """Return the names of the points, those of the front first, and draw the lines of families.

    The dominated points of a family share a name, at the point with the fewest chunks.
    """
    labels = []
    for family in _families(inside):
        if len(family) > 1:
            axes.plot(
                [p.peak for p in family], [p.bubble_rate for p in family], color="#c4c7cc", linewidth=0.8, zorder=1
            )
        labels += [Label(p.peak, p.bubble_rate, _own_name(p)) for p in family if not p.dominated]
        if dominated := [point for point in family if point.dominated]:
            first = dominated[0]
            name = f"{_shared_name(dominated)}, stock's" if first.is_stock else _shared_name(dominated)
            labels.append(Label(first.peak, first.bubble_rate, name, _FARTHEST, is_main=False))
            labels += [Label(p.peak, p.bubble_rate, "", is_main=False) for p in dominated[1:]]
    return sorted(labels, key=lambda label: (not label.is_main, label.x, label.y, label.text))


def _families(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points of every family, sorted by chunks. Searched points and those without a family are alone."""
    families: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.chunks, *_by_peak(point))):
        is_alone = point.cap is not None or not point.family
        families.setdefault(point.name if is_alone else f"of {point.family}", []).append(point)
    return list(families.values())


def _own_name(point: Point) -> str:
    return point.name if point.cap is None else f"{point.cap:.3g}"


def _shared_name(points: Sequence[Point]) -> str:
    """Return the name of points of one family, which are sorted by chunks."""
    if len(points) == 1:
        return _own_name(points[0])
    return f"{points[0].family} ({_chunks(points)})"


def _chunks(points: Sequence[Point]) -> str:
    counts = [point.chunks for point in points]
    return f"{min(counts)} to {max(counts)} chunks" if min(counts) < max(counts) else f"{counts[0]} chunks"


def _limits(points: Sequence[Point]) -> tuple[float, float]:
    """Return the upper ends of the memory axis and of the bubble axis, in this order.

    Points do not count if their bubble is far above that of most points, or if their peak is more than 1.5 times the
    highest of the points that are not dominated.
    """
    rates, fronts = sorted(point.bubble_rate for point in points), [p.peak for p in points if not p.dominated]
    usual = max(2.5 * rates[3 * (len(rates) - 1) // 4], 0.05)
    peak = max(point.peak for point in points if point.peak <= 1.5 * max(fronts, default=math.inf))
    return 1.1 * peak, 1.1 * max(rate for rate in rates if rate <= usual) or 0.1


def _note(points: Sequence[Point], inside: Sequence[Point], unnamed: int) -> str:
    """Return the text below the picture: chunks of searches, points beyond its limits, and the number of missing names.

    ``inside`` has the points within the limits, and ``unnamed`` is the number of names that found no room. The number of
    lines does not depend on ``unnamed``.
    """
    searched = [point for point in points if point.cap is not None]
    outside = [point for point in points if point not in inside]
    texts = [f"Searched schedules have {_chunks(searched)}."] if searched else []
    if outside:
        texts.append(
            f"Beyond the picture: {', '.join(map(_name_with_values, _families(sorted(outside, key=_by_peak))))}."
        )
    lines = textwrap.wrap(" ".join(texts), _NOTE)
    return "\n".join([*lines, f"Dominated schedules without a name, for lack of room: {unnamed}." if unnamed else " "])


def _name_with_values(family: Sequence[Point]) -> str:
    """Return the name, peak and bubble of a family's points, for example ``gems (0.2, 83%)``."""

    def span(values: Sequence[str]) -> str:
        return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"

    peaks = [f"{peak:.3g}" for peak in sorted(point.peak for point in family)]
    rates = [f"{rate:.0%}" for rate in sorted(point.bubble_rate for point in family)]
    name = f"cap {_own_name(family[0])}" if family[0].cap is not None else _shared_name(family)
    return f"{name} ({span(peaks)}, {span(rates)})"


def _by_peak(point: Point) -> tuple[float, float, str]:
    return (point.peak, point.bubble_rate, point.name)


def _scatter(axes: Axes, points: Sequence[Point], colour: str, marker: str, label: str, size: float = 55) -> None:
    """Draw points of one colour, hollow if they are dominated, with one legend entry."""
    for dominated in (True, False):
        chosen = [point for point in points if point.dominated is dominated]
        if chosen:
            axes.scatter(
                [point.peak for point in chosen], [point.bubble_rate for point in chosen],
                s=size if not dominated else 0.7 * size, marker=marker, edgecolors=colour, linewidths=1.3,
                facecolors="white" if dominated else colour, zorder=2 if dominated else 4,
                label=label if not dominated or all(point.dominated for point in points) else None,
            )  # fmt: skip
