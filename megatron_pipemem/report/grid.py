"""Compare runs by throughput and peak memory, in the terminal and as PNG or SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_suffix
from megatron_pipemem.report.picture import SUFFIXES, axes_for_points, write_picture
from megatron_pipemem.report.tables import FittingTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1 << 20
_FIGURES = ("tokens/s", "s/step", "predicted\npeak", "counted\npeak", "planned\nbubble", "measured\nbubble")
_AGREEMENT = {True: "=", False: "≠", None: " "}


@dataclass(frozen=True)
class RunPoint:
    """One run that has ended well.

    Args:
        number: its number in table and picture.
        settings: what tells it from the others, column -> text.
        tokens_per_second: over all devices.
        seconds_per_step: of a training step.
        peak_bytes: activations of the rank that held most.
        predicted_peak_bytes: likewise, before the run; ``None`` where nothing was predicted.
        peaks_agree: whether every rank held what was predicted; ``None`` likewise.
        predicted_bubble_rate: of the rank that idled least, planned.
        measured_bubble_rate: likewise, measured.
    """

    number: int
    settings: Mapping[str, str]
    tokens_per_second: float
    seconds_per_step: float
    peak_bytes: int
    predicted_peak_bytes: int | None = None
    peaks_agree: bool | None = None
    predicted_bubble_rate: float | None = None
    measured_bubble_rate: float | None = None


def front(points: Sequence[RunPoint]) -> list[RunPoint]:
    """Return the runs that no other beats in one of throughput and peak without being worse in the other, by peak."""
    best: list[RunPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, -point.tokens_per_second, point.number)):
        twin = best and (best[-1].peak_bytes, best[-1].tokens_per_second) == (point.peak_bytes, point.tokens_per_second)
        if not best or twin or point.tokens_per_second > best[-1].tokens_per_second:
            best.append(point)
    return best


def table(points: Sequence[RunPoint]) -> FittingTable:
    """Return the runs, fastest first, as a rich renderable; those on the front are marked."""
    chosen = {point.number for point in front(points)}
    columns = list(dict.fromkeys(key for point in points for key in point.settings))
    headings = [column.rpartition(".")[2].replace("_", " ") for column in columns]
    rows = FittingTable(
        ("#", *headings, *_FIGURES),
        text=("#", *headings),
        caption="Peaks: activation MiB of the fullest rank, counted in the run; = where every rank held to the byte what was "
        "predicted.\nBubble: of the rank that idles least, planned and measured. *: no other run is faster with less.",
    )
    for point in sorted(points, key=lambda point: (-point.tokens_per_second, point.number)):
        rows.add_row(
            f"{point.number} *" if point.number in chosen else str(point.number),
            *(point.settings.get(column, "") for column in columns),
            f"{point.tokens_per_second:,.0f}",
            f"{point.seconds_per_step:.4g}",
            "-" if point.predicted_peak_bytes is None else f"{point.predicted_peak_bytes / _MIB:.4g}",
            f"{point.peak_bytes / _MIB:.4g} {_AGREEMENT[point.peaks_agree]}",
            *(
                "-" if rate is None else f"{rate:.1%}"
                for rate in (point.predicted_bubble_rate, point.measured_bubble_rate)
            ),
            style="" if point.number in chosen else "dim",
        )
    return rows


def save_picture(points: Sequence[RunPoint], path: str | Path, title: str = "") -> Path:
    """Draw the runs with their front; the suffix of ``path`` chooses PNG or SVG. Folders are made as needed.

    Args:
        points: one per run.
        path: of the picture.
        title: above it.

    Raises:
        UnsupportedError: the suffix is neither, there are no runs, or matplotlib is missing.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    check_suffix(path, SUFFIXES, "a comparison of runs")
    if not points:
        raise UnsupportedError("no run has ended well; there is nothing to draw")
    return write_picture(lambda: draw(points, title), path)


def draw(points: Sequence[RunPoint], title: str = "") -> Figure:
    """Draw throughput (up) against peak (right). The front is filled, numbered and named; others are hollow and
    numbered.
    """
    from megatron_pipemem.report.labels import Label, add_labels

    axes = axes_for_points(
        (9.6, 5.4), title, "peak activations of the fullest rank (MiB)", "tokens per second, all devices"
    )
    best = front(points)
    numbers = {point.number for point in best}
    others = [point for point in points if point.number not in numbers]
    axes.step(
        [point.peak_bytes / _MIB for point in best],
        [point.tokens_per_second for point in best],
        where="post",
        color="#202124",
        linewidth=1.0,
        alpha=0.6,
    )
    for group, face, size in ((others, "white", 40), (best, "#2662a8", 60)):
        axes.scatter(
            [point.peak_bytes / _MIB for point in group],
            [point.tokens_per_second for point in group],
            s=size,
            facecolors=face,
            edgecolors="#2662a8",
            linewidths=1.3,
            zorder=3,
        )
    legend = "\n".join(f"{point.number}: {_settings(point)}" for point in best)
    axes.text(1.02, 1.0, f"front\n{legend}", transform=axes.transAxes, fontsize=8.5, va="top", clip_on=False)
    axes.set_ylim(0, 1.08 * max(point.tokens_per_second for point in points) or 1)
    axes.margins(x=0.12)
    add_labels(
        axes,
        [
            Label(p.peak_bytes / _MIB, p.tokens_per_second, str(p.number), is_main=p.number in numbers)
            for p in sorted(points, key=lambda p: p.number not in numbers)
        ],
    )
    return axes.figure


def _settings(point: RunPoint) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.settings.items())
