"""Compare the runs of a grid by throughput and peak memory, in the terminal and as PNG or SVG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.results import busiest
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.tools.launch.grid.points import label
from megatron_pipemem.tools.launch.grid.store import Result
from megatron_pipemem.tools.report.figure import Label, add_labels, axes_for_points, figure_of
from megatron_pipemem.tools.report.terminal import FittingTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1 << 20
_FIGURES = ("tokens/s", "s/step", "predicted\npeak", "counted\npeak", "of\n1F1B", "planned\nbubble", "measured\nbubble")
_HEADING, _FARTHEST = 85, 60
"""Characters in a line of the title, and the largest distance in points between a dominated run and its name."""
_AGREEMENT = {True: "=", False: "≠", None: " "}


def front(points: Sequence[Result]) -> list[Result]:
    """Return the points that no other point dominates, sorted by peak memory.

    A point dominates another one if it is no worse in throughput and peak memory, and better in one of them.
    """
    best: list[Result] = []
    for point in sorted(points, key=lambda point: (_peak(point), -_speed(point), point.index)):
        twin = best and (_peak(best[-1]), _speed(best[-1])) == (_peak(point), _speed(point))
        if not best or twin or _speed(point) > _speed(best[-1]):
            best.append(point)
    return best


def table(points: Sequence[Result]) -> FittingTable:
    """Return a table of points, the fastest first. Points that no other one dominates are marked with ``*``."""
    chosen = {point.index for point in front(points)}
    columns = list(dict.fromkeys(key for point in points for key in point.settings))
    rows = FittingTable(
        ("#", *columns, *_FIGURES),
        text=("#", *columns),
        caption="Peaks: activation MiB of the fullest rank, predicted, and counted in the run; = if every rank held its "
        "predicted bytes, ≠ if not.\nOf 1F1B: share of 1F1B's bytes for the same model and cut.\n"
        "Bubble: of the rank that idles least, planned and measured. *: no other run is faster with less.",
    )
    for point in sorted(points, key=lambda point: (-_speed(point), point.index)):
        rows.add_row(
            f"{point.index} *" if point.index in chosen else str(point.index),
            *(str(point.settings.get(column, "")) for column in columns),
            f"{_speed(point):,.0f}",
            f"{point.seconds_per_step:.4g}",
            "-" if point.predicted_peak is None else _mebibytes(point.predicted_peak),
            f"{_mebibytes(_peak(point))} {_AGREEMENT[point.peaks_agree]}",
            "-" if point.share_of_1f1b is None else f"{point.share_of_1f1b:.2f}",
            *(_rate(busiest(rates)) for rates in (point.predicted_bubble_rate, point.measured_bubble_rate)),
            style="" if point.index in chosen else "dim",
        )
    return rows


def _mebibytes(nbytes: float) -> str:
    amount = nbytes / _MIB
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.4g}"


def draw(points: Sequence[Result], title: str = "") -> Figure:
    """Draw the points by peak memory (x axis) and throughput (y axis).

    Points that no other one dominates are filled, and the others are hollow. Runs of stock's schedule are squares. The
    name of a point has the values in which it differs from others, and the title those of all points. Raise an
    UnsupportedError without points.
    """
    if not points:
        raise UnsupportedError("nothing-to-draw", "no run has ended without an error; start failed runs again first")
    first, *rest = [point.settings for point in points]
    common = {key: value for key, value in first.items() if rest and all((key, value) in own.items() for own in rest)}
    heading = textwrap.fill(": ".join(filter(None, (title, label(common) if common else ""))), _HEADING)
    axes = axes_for_points(
        (9.6, 5.4), heading, "peak activations of the fullest rank (MiB)", "tokens per second, all devices"
    )
    best = front(points)
    axes.step(*_spots(best), where="post", color="#202124", linewidth=1.0, alpha=0.6)
    for is_stock, marker, colour in ((False, "o", "#2662a8"), (True, "s", "#c43c4e")):
        group = [point for point in points if _is_stock(point) is is_stock]
        faces = [colour if point in best else "white" for point in group]
        axes.scatter(*_spots(group), s=55, marker=marker, facecolors=faces, edgecolors=colour, linewidths=1.3, zorder=3)
    axes.margins(x=0.15, y=0.15)
    note = figure_of(axes).supxlabel(_note(points, 0), x=0.01, ha="left", fontsize=8, color="#5f6368")
    named = [*best, *(point for point in points if point not in best)]
    labels = [
        Label(x, y, _name(point, common), math.inf if point in best else _FARTHEST, point in best)
        for x, y, point in zip(*_spots(named), named, strict=True)
    ]
    note.set_text(_note(points, add_labels(axes, labels)))
    return figure_of(axes)


def _note(points: Sequence[Result], unnamed: int) -> str:
    squares = " Squares: stock's schedule." if any(map(_is_stock, points)) else ""
    missing = f" Runs without a name, for lack of room: {unnamed}." if unnamed else ""
    return f"Filled: no other run is faster with less memory.{squares}{missing}"


def _is_stock(point: Result) -> bool:
    return STOCK in (point.settings.get("schedule"), point.settings.get("schedule.name"))


def _name(point: Result, common: Collection[str]) -> str:
    """Return the values of a point's settings that not all points have; its number if there are none."""
    values = [str(value) for key, value in point.settings.items() if key not in common]
    return ", ".join(values) or str(point.index)


def _spots(points: Sequence[Result]) -> tuple[list[float], list[float]]:
    return [_peak(point) / _MIB for point in points], [_speed(point) for point in points]


def _speed(point: Result) -> float:
    assert point.tokens_per_second is not None, "points that are compared have run"
    return point.tokens_per_second


def _peak(point: Result) -> int:
    assert point.peak_bytes is not None, "points that are compared have run, and their bytes were counted"
    return point.peak_bytes


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
