"""Draw timelines as PNG and SVG with matplotlib, which is imported only when a picture is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_pipemem.report.figure_rows import HELD, HELD_EDGE, LIMIT, QUIET, PicturedRun, draw_run
from megatron_pipemem.report.timeline import IDLE, colour
from megatron_pipemem.schedule.action import COMPUTE, COPIES, VOCABULARY, Kind
from megatron_pipemem.schedule.simulator import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LEFT, _RIGHT = 0.8, 0.75
"""Inches beside the time axis, for the devices' names and their peaks."""
_NARROWEST, _WIDEST = 9.0, 24.0
_COMFORTABLE = 7.5
"""Points of the shortest action: enough for a two-digit label."""


def draw(timelines: Sequence[Timeline]) -> Figure:
    """Draw for every device its actions, and below them what it holds; several runs under one another, on one scale of time
    and one of memory.

    The whole of every run is drawn. Where a page has no room for labels, the picture says which are left out.
    """
    runs = [PicturedRun(timeline) for timeline in timelines]
    longest, shortest = max(run.end for run in runs), min(run.shortest for run in runs)
    width = min(_WIDEST, max(_NARROWEST, longest / shortest * _COMFORTABLE / 72 + _LEFT + _RIGHT))
    points = (width - _LEFT - _RIGHT) * 72 / longest
    heights = [_row_inches(len(run.rows), len(runs)) * len(run.rows) for run in runs]
    figure, panels = _panels(width, heights)
    left_out = set()
    for run, axes in zip(runs, panels, strict=True):
        left_out |= draw_run(run, axes, longest, points, run.memory_scale(runs))
        axes.set_title(
            _title(run, runs[0]), loc="left", fontsize=13 if len(runs) == 1 else 11, fontweight="bold", pad=7
        )
    panels[-1].tick_params(labelbottom=True)
    _label_time(figure, runs, width)
    _add_legend(figure, runs)
    _add_footnotes(figure, runs, sorted(left_out))
    return figure


def _row_inches(devices: int, runs: int) -> float:
    """Return the height of a device's actions and memory together."""
    return min(0.62, max(0.26, 7.0 / devices)) * (1 if runs == 1 else 0.85)


def _panels(width: float, heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Return the axes of every run."""
    from matplotlib.figure import Figure  # a Figure without pyplot draws with Agg and leaves no global state

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
    timeline = runs[0].timeline
    makespan = f" (makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g})"
    text = "time" if len(runs) > 1 else f"time{makespan}"
    middle = (_LEFT + (width - _LEFT - _RIGHT) / 2) / width
    bottom = 0.86 if figure.get_figwidth() > 11 else 1.06
    figure.text(middle, bottom / figure.get_figheight(), text, ha="center", va="center", color="#3c4043")


def _add_legend(figure: Figure, runs: Sequence[PicturedRun]) -> None:
    """Add a legend with one entry per kind, with a swatch of every chunk's shade."""
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
    entries["idle"] = (Patch(facecolor=IDLE, edgecolor="#dadce0"),)
    entries["held activations" if runs[0].in_units else "held memory"] = (
        Patch(facecolor=HELD, edgecolor=HELD_EDGE, linewidth=0.7),
    )
    if runs[0].in_units:
        entries["1F1B's peak (1)"] = Line2D([], [], color=LIMIT, linewidth=0.9, linestyle=(0, (4, 3)))
    columns = len(entries) if figure.get_figwidth() > 11 else -(-len(entries) // 2)
    figure.legend(
        list(entries.values()), list(entries), loc="lower center", bbox_to_anchor=(0.5, 0.34 / figure.get_figheight()),
        ncols=columns, frameon=False, fontsize=8.5, handleheight=1.0, columnspacing=1.3, handletextpad=0.6,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def _add_footnotes(figure: Figure, runs: Sequence[PicturedRun], left_out: list[str]) -> None:
    schedules = [run.timeline.schedule for run in runs]
    reading = "Numbers are microbatches" if all(s.slices == 1 for s in schedules) else "Numbers are sequence slices"
    if any(s.placement.num_chunks > s.placement.replicas for s in schedules):
        reading += "; paler: a device's later chunk"
    elif any(s.placement.replicas > 1 for s in schedules):
        reading += "; paler: the model's other replica"
    lines = [f"{reading}; in a bubble: the action whose result the device waits for."]
    if left_out:
        lines.append(f"Left out for want of room: {', '.join(left_out)}. The .html page has everything.")
    for line, text in enumerate(lines):
        place = (0.28 - 0.16 * line) / figure.get_figheight()
        figure.text(0.5, place, text, ha="center", va="center", fontsize=8, color=QUIET)
