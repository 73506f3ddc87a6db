"""Compare the runs of a grid by throughput and peak memory, in the terminal and as PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.results import busiest
from megatron_pipemem.tools.launch.grid.points import label
from megatron_pipemem.tools.launch.grid.store import Result
from megatron_pipemem.tools.report.figure import Label, add_labels, axes_for_points, figure_of
from megatron_pipemem.tools.report.terminal import FittingTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1 << 20
_FIGURES = ("tokens/s", "s/step", "predicted\npeak", "counted\npeak", "of\n1F1B", "planned\nbubble", "measured\nbubble")
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
        caption="Peaks: activation MiB of the fullest rank, counted in the run; = if every rank held the predicted bytes "
        "exactly.\nOf 1F1B: share of 1F1B's bytes for the same model and cut.\n"
        "Bubble: of the rank that idles least, planned and measured. *: no other run is faster with less.",
    )
    for point in sorted(points, key=lambda point: (-_speed(point), point.index)):
        rows.add_row(
            f"{point.index} *" if point.index in chosen else str(point.index),
            *(str(point.settings.get(column, "")) for column in columns),
            f"{_speed(point):,.0f}",
            f"{point.seconds_per_step:.4g}",
            "-" if point.predicted_peak is None else f"{point.predicted_peak / _MIB:.4g}",
            f"{_peak(point) / _MIB:.4g} {_AGREEMENT[point.peaks_agree]}",
            "-" if point.share_of_1f1b is None else f"{point.share_of_1f1b:.2f}",
            *(_rate(busiest(rates)) for rates in (point.predicted_bubble_rate, point.measured_bubble_rate)),
            style="" if point.index in chosen else "dim",
        )
    return rows


def draw(points: Sequence[Result], title: str = "") -> Figure:
    """Draw the points by peak memory (x axis) and throughput (y axis).

    Points that no other one dominates are filled and have names. The others are hollow and have numbers. Raise an
    UnsupportedError without points.
    """
    if not points:
        raise UnsupportedError("nothing-to-draw", "no run has ended without an error; start failed runs again first")
    axes = axes_for_points(
        (9.6, 5.4), title, "peak activations of the fullest rank (MiB)", "tokens per second, all devices"
    )
    best = front(points)
    others = [point for point in points if point not in best]
    axes.step(*_spots(best), where="post", color="#202124", linewidth=1.0, alpha=0.6)
    for group, face, size in ((others, "white", 40), (best, "#2662a8", 60)):
        axes.scatter(*_spots(group), s=size, facecolors=face, edgecolors="#2662a8", linewidths=1.3, zorder=3)
    legend = "\n".join(f"{point.index}: {label(point.settings)}" for point in best)
    axes.text(1.02, 1.0, f"front\n{legend}", transform=axes.transAxes, fontsize=8.5, va="top", clip_on=False)
    axes.set_ylim(0, 1.08 * max(map(_speed, points)) or 1)
    axes.margins(x=0.12)
    named = [*best, *others]
    spots = zip(*_spots(named), named, strict=True)
    add_labels(axes, [Label(x, y, str(point.index), is_main=point in best) for x, y, point in spots])
    return figure_of(axes)


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
