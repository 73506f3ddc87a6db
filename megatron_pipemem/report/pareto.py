"""Bubble against peak memory: which schedules are worth a second look, in the terminal and as PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from megatron_pipemem.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg")
_COLOURS = ("#2662a8", "#c43c4e", "#3aa38f", "#8a5fb0", "#9a6a00", "#5f6368")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_SEARCH = "#d97706"


@dataclass(frozen=True)
class Point:
    """One schedule.

    Args:
        name: its name, with the options that tell it from others of its family.
        placement: where its stages are; one colour and marker each.
        peak: the most a device holds, in activation units (1 is the peak of 1F1B).
        bubble_rate: part of the makespan that the busiest device idles, from 0 to 1.
        dominated: whether another one is no worse in both and better in one.
        is_search: whether it was searched for, under a cap, rather than written down.
    """

    name: str
    placement: str
    peak: float
    bubble_rate: float
    dominated: bool = False
    is_search: bool = False


@dataclass(frozen=True)
class Bound:
    """What no schedule of a placement can beat: ``(memory cap, bubble rate)``, caps ascending."""

    name: str
    points: tuple[tuple[float, float], ...]


def table(points: Sequence[Point]) -> Table:
    """The points by peak, a rich renderable; those on the front are marked, dominated ones dim."""
    rows = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    rows.add_column("front")
    rows.add_column("schedule", no_wrap=True)
    rows.add_column("placement", no_wrap=True)
    rows.add_column("peak", justify="right")
    rows.add_column("bubble", justify="right")
    for point in sorted(points, key=_by_peak):
        rows.add_row(
            "" if point.dominated else "*",
            f"{point.name} (searched)" if point.is_search else point.name,
            point.placement,
            f"{point.peak:.4g}",
            f"{point.bubble_rate:.2%}",
            style="dim" if point.dominated else None,
        )
    return rows


def save_pareto(points: Sequence[Point], path: str | Path, bounds: Sequence[Bound] = (), title: str = "") -> Path:
    """Draw the points with their front; the suffix of ``path`` chooses PNG or SVG. Folders are made as needed.

    Raises:
        UnsupportedError: the suffix is neither, there are no points, or matplotlib is missing.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise UnsupportedError(f"cannot draw bubble against peak as {path.name!r}: end it in {' or '.join(_SUFFIXES)}")
    if not points:
        raise UnsupportedError("no schedule is left to draw; ask for fewer conditions")
    try:
        from megatron_pipemem.report import figure

        with figure.style():
            figure.save(draw(points, bounds, title), path)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"a {path.suffix} picture needs {error.name}: pip install {error.name}") from error
    return path


def draw(points: Sequence[Point], bounds: Sequence[Bound] = (), title: str = "") -> Figure:
    """Bubble (up) against peak (right): the front as a staircase, dominated points hollow, searched ones as stars."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9.6, 5.4), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    placements = list(dict.fromkeys(point.placement for point in sorted(points, key=_by_peak)))
    for index, bound in enumerate(bounds):
        caps, rates = zip(*bound.points, strict=True)
        axes.step(
            caps, rates, where="post", color="#9aa0a6", linewidth=1.1,
            linestyle=("--", ":", "-.")[index % 3], label=f"lower bound: {bound.name}", zorder=1,
        )  # fmt: skip
    for index, placement in enumerate(placements):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        _scatter(axes, [p for p in points if p.placement == placement and not p.is_search], colour, marker, placement)
    _scatter(axes, [point for point in points if point.is_search], _SEARCH, "*", "searched", size=150)
    _draw_front(axes, points)
    xs, highest = [point.peak for point in points], _highest([point.bubble_rate for point in points])
    axes.set_xlim(max(0.0, min(xs) - 0.08 * (max(xs) - min(xs) or 1)), max(xs) + 0.16 * (max(xs) - min(xs) or 1))
    axes.set_ylim(-0.02 * highest, 1.1 * highest or 0.1)
    above = [
        f"{p.name} ({p.peak:.3g}, {p.bubble_rate:.0%})" for p in sorted(points, key=_by_peak) if p.bubble_rate > highest
    ]
    if above:
        note = f"above the picture: {', '.join(above)}"
        axes.text(0, 1.01, note, transform=axes.transAxes, fontsize=8, color="#5f6368", va="bottom")
    axes.set_xlabel("peak memory of the fullest device (activation units, 1F1B = 1)")
    axes.set_ylabel("bubble rate")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.grid(color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=18)
    handles, labels = axes.get_legend_handles_labels()
    if any(point.dominated for point in points):
        hollow = Line2D([], [], linestyle="", marker="o", markerfacecolor="white", markeredgecolor="#5f6368")
        handles, labels = [*handles, hollow], [*labels, "hollow: dominated"]
    figure.legend(handles, labels, frameon=False, fontsize=8.5, loc="outside right upper")
    _name(axes, points)
    return figure


def _highest(rates: Sequence[float]) -> float:
    """The highest rate that is drawn: the few that lie far above most would squeeze all others together."""
    usual = sorted(rates)[3 * (len(rates) - 1) // 4]
    return max(rate for rate in rates if rate <= max(2.5 * usual, 0.05))


def _by_peak(point: Point) -> tuple[float, float, str]:
    return (point.peak, point.bubble_rate, point.name)


def _scatter(axes: Axes, points: Sequence[Point], colour: str, marker: str, label: str, size: float = 55) -> None:
    """Filled on the front, hollow where dominated; one entry in the legend."""
    for dominated in (True, False):
        chosen = [point for point in points if point.dominated is dominated]
        if chosen:
            axes.scatter(
                [point.peak for point in chosen], [point.bubble_rate for point in chosen],
                s=size if not dominated else 0.7 * size, marker=marker, edgecolors=colour, linewidths=1.3,
                facecolors="white" if dominated else colour, zorder=2 if dominated else 4,
                label=label if not dominated or all(point.dominated for point in points) else None,
            )  # fmt: skip


def _draw_front(axes: Axes, points: Sequence[Point]) -> None:
    front = sorted((point for point in points if not point.dominated), key=_by_peak)
    if front:
        axes.step(
            [point.peak for point in front], [point.bubble_rate for point in front],
            where="post", color="#202124", linewidth=1.0, alpha=0.6, zorder=3, label="front",
        )  # fmt: skip


def _name(axes: Axes, points: Sequence[Point]) -> None:
    """Names beside the points, each at the first of several places where it covers neither point nor name.

    Points in one place share a line of names. The front is named first; a dominated point whose name finds no place keeps
    none, the table has it.
    """
    axes.figure.draw_without_rendering()  # settles the scale that places are measured in
    scale, bottom, top = axes.figure.dpi / 72, *axes.get_ylim()
    groups: dict[tuple[float, float, bool], list[str]] = {}
    for point in sorted(points, key=lambda point: (point.dominated, _by_peak(point))):
        if bottom <= point.bubble_rate <= top:
            place = (round(point.peak, 3), round(point.bubble_rate, 4), point.dominated)
            groups.setdefault(place, []).append(point.name)
    spots = {place: axes.transData.transform(place[:2]) for place in groups}
    taken = [(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in spots.values()]
    for (peak, rate, dominated), names in groups.items():
        x, y = spots[peak, rate, dominated]
        text, size = ", ".join(names), 7.0 if dominated else 8.5
        width, height = 0.6 * size * len(text) * scale, 1.2 * size * scale
        for right, up in ((7, 4), (-7, 4), (7, -5 - size), (-7, -5 - size), (7, 14), (-7, 14), (7, -24), (-7, -24)):
            left = x + right * scale - (width if right < 0 else 0)
            spot = (left, y + up * scale, left + width, y + up * scale + height)
            if not any(_overlap(spot, other) for other in taken):
                break
        else:
            if dominated:
                continue
            right, up = 7, 4
        taken.append(spot)
        axes.annotate(
            text, (peak, rate), xytext=(right, up), textcoords="offset points",
            fontsize=size, ha="left" if right > 0 else "right", va="bottom",
            color="#6f757b" if dominated else "#202124", fontweight="normal" if dominated else "bold",
        )  # fmt: skip


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
