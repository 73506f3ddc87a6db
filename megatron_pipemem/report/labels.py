"""Place names beside the points of a picture, so that none covers another: each at its own point or joined to it by a line."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_pipemem.report.figure import figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from numpy.typing import NDArray

_MARKER = 5.0
"""Half of a marker's side in points; names keep off it."""
_PAD = 1.0
"""Points between two names."""
_NEAR = 3.0
"""Points between a marker and a name that needs no line to it."""
_GROWTH, _DIRECTIONS = 1.12, 32
"""Places that are tried: on rings, each so many times as wide as the one before it, in so many directions."""
_COST_OF_LINE, _COST_OF_COVERING, _COST_OF_CROSSING = 12.0, 14.0, 100.0
"""Points of distance that are worth going for a name that needs no line, covers no curve, or whose line crosses nothing."""
_ROUNDS = 3
"""How often every name chooses, the later times among all others."""
_CHARACTERS = 36
"""In a line of names that share a point."""

_STYLES: dict[bool, dict[str, Any]] = {
    True: {"fontsize": 8.5, "color": "#202124", "fontweight": "bold"},
    False: {"fontsize": 7.0, "color": "#6f757b"},
}


class Label(NamedTuple):
    """A name for the point at ``(x, y)``, in data coordinates.

    Args:
        x: of the point.
        y: of the point.
        text: the name.
        farthest: points to the farthest place for it; where there is none, the name is left out.
        is_main: whether it is written large.
    """

    x: float
    y: float
    text: str
    farthest: float = math.inf
    is_main: bool = True


def add_labels(axes: Axes, labels: Sequence[Label], curves: Sequence[Sequence[tuple[float, float]]] = ()) -> int:
    """Write names beside their points; those that come first choose first. The layout of the figure is settled by it.

    Args:
        axes: with its final limits, in a figure with the dpi that it is saved with.
        labels: one per point. Points in one place share a name.
        curves: corners in data coordinates, of what names rather leave visible.

    Returns:
        How many points are without a name, for want of room.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(axes)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # a name must not move the axes that it was placed in
    renderer, points = FigureCanvasAgg(figure).get_renderer(), 72 / figure.dpi
    groups: dict[tuple[float, ...], list[Label]] = {}
    for label in labels:
        spot = axes.transData.transform((label.x, label.y)) * points
        groups.setdefault(tuple(spot.round()), []).append(label)
    artists = [_write(axes, group) for group in groups.values()]
    spots = axes.transData.transform([artist.xy for artist in artists]) * points
    boxes = [artist.get_window_extent(renderer) for artist in artists]
    drawn = [axes.transData.transform(curve) * points for curve in curves if len(curve) > 1]
    places = place(
        spots,
        [(box.width * points, box.height * points) for box in boxes],
        [edge * points for edge in axes.get_window_extent(renderer).extents],
        [group[0].farthest for group in groups.values()],
        np.vstack([np.empty((0, 4)), *(np.hstack([corners[:-1], corners[1:]]) for corners in drawn)]),
    )
    missing = 0
    for group, artist, spot, found in zip(groups.values(), artists, spots, places, strict=True):
        if found is None:
            artist.remove()
            missing += len(group)
            continue
        artist.xyann = tuple(found.box[:2] - spot)
        if found.line is not None:
            axes.annotate(
                "", artist.xy, xytext=tuple(found.line[2:] - spot), textcoords="offset points", annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": "#80868b", "linewidth": 0.6, "shrinkA": 0, "shrinkB": _MARKER - 1},
            )  # fmt: skip
    return missing


def _write(axes: Axes, group: Sequence[Label]) -> Annotation:
    """Return the names of one place, at its point for the time being."""
    text = textwrap.fill(", ".join(label.text for label in group), _CHARACTERS)
    return axes.annotate(
        text, (group[0].x, group[0].y), xytext=(0, 0), textcoords="offset points", ha="left", va="bottom",
        annotation_clip=False, **_STYLES[group[0].is_main],
    )  # fmt: skip


class LabelPlace(NamedTuple):
    """Say where a name stands: left, bottom, right and top. ``line`` goes from its point to its nearest edge, where
    there is one.
    """

    box: NDArray
    line: NDArray | None


def place(
    spots: NDArray,
    sizes: Sequence[tuple[float, float]],
    area: Sequence[float],
    farthest: Sequence[float],
    curves: NDArray,
) -> list[LabelPlace | None]:
    """Return a free place for every name, near its point; those that come first choose first.

    Args:
        spots: ``(n, 2)``, where the points are.
        sizes: width and height of their names.
        area: left, bottom, right and top of where names may stand.
        farthest: from its point that a name may stand.
        curves: ``(k, 4)``, segments that names rather leave visible.
    """
    choices = [
        _Choice.of(index, spots, np.array(size), area, limit, curves)
        for index, (size, limit) in enumerate(zip(sizes, farthest, strict=True))
    ]
    places: list[LabelPlace | None] = [None] * len(spots)
    for _ in range(_ROUNDS):
        for index, choice in enumerate(choices):
            others = [found for other, found in enumerate(places) if found is not None and other != index]
            places[index] = choice.best(others)
    return places


class _Choice(NamedTuple):
    """List where the name of one point can go among all points.

    Args:
        boxes: left, bottom, right and top of every place.
        lines: from the point to the nearest edge of the name there.
        joined: whether it needs that line.
        cost: in points, as far as other names have no part in it.
    """

    boxes: NDArray
    lines: NDArray
    joined: NDArray
    cost: NDArray

    @classmethod
    def of(
        cls, index: int, spots: NDArray, size: NDArray, area: Sequence[float], limit: float, curves: NDArray
    ) -> _Choice:
        spot, markers = spots[index], np.hstack([spots - _MARKER, spots + _MARKER])
        boxes, distance = _candidates(spot, size, area, limit)
        free = ~_overlap(boxes, markers).any(1)
        boxes, distance = boxes[free], distance[free]
        gaps = _gap(boxes, spots)
        is_nearest = (gaps[:, index, None] < np.delete(gaps, index, axis=1) - 1e-6).all(1)
        joined = ~is_nearest | (gaps[:, index] > _MARKER * 2**0.5 + _NEAR)
        ends = np.clip(spot, boxes[:, :2], boxes[:, 2:])
        lines = np.hstack([np.broadcast_to(spot, ends.shape), ends])
        # Markers that cover this point are no obstacle: a line to it has to end there.
        apart = markers[(np.abs(spots - spot) > _MARKER).any(1)]
        crossed = joined * _meet(lines, apart).sum(1)
        covers = _meet(curves, boxes).any(0)
        cost = distance + _COST_OF_LINE * joined + _COST_OF_COVERING * covers + _COST_OF_CROSSING * crossed
        return cls(boxes, lines, joined, cost)

    def best(self, others: Sequence[LabelPlace]) -> LabelPlace | None:
        """Return the best place beside other names; ``None`` where all places are taken."""
        names = np.array([other.box for other in others]).reshape(-1, 4) + [-_PAD, -_PAD, _PAD, _PAD]
        lines = np.array([other.line for other in others if other.line is not None]).reshape(-1, 4)
        free = ~_overlap(self.boxes, names).any(1)
        if not free.any():
            return None
        boxes, own, joined, cost = (each[free] for each in self)
        crossings = joined * (_meet(own, names).sum(1) + _cross(own, lines).sum(1)) + _meet(lines, boxes).sum(0)
        best = np.argmin(cost + _COST_OF_CROSSING * crossings)
        return LabelPlace(boxes[best], own[best] if joined[best] else None)


def _candidates(spot: NDArray, size: NDArray, area: Sequence[float], limit: float) -> tuple[NDArray, NDArray]:
    """Return boxes within ``area`` around a point, and their distances from it: right and left of it first, then all
    around.
    """
    reach = min(limit, float(np.hypot(area[2] - area[0], area[3] - area[1])))
    rings = (_MARKER + 1) * _GROWTH ** np.arange(max(1, math.ceil(math.log(reach / _MARKER, _GROWTH))))
    angles = np.arange(_DIRECTIONS) * 2 * np.pi / _DIRECTIONS
    # On equal terms the side to write towards: right before left, above before below.
    taste = 0.5 - 0.4 * np.cos(angles) - 0.1 * np.sin(angles)
    away = np.stack([np.cos(angles), np.sin(angles)], 1)
    centres = spot + away * (rings[:, None, None] + size / 2)
    boxes = np.concatenate([centres - size / 2, centres + size / 2], 2).reshape(-1, 4)
    distance = (rings[:, None] + taste).reshape(-1)
    low, high = np.array(area[:2]), np.array(area[2:])
    inside = (boxes[:, :2] >= low).all(1) & (boxes[:, 2:] <= high).all(1)
    return boxes[inside], distance[inside]


def _overlap(boxes: NDArray, others: NDArray) -> NDArray:
    """``(a, b)``: whether two boxes share a point."""
    a, b = boxes[:, None], others[None]
    return (a[..., :2] < b[..., 2:]).all(-1) & (b[..., :2] < a[..., 2:]).all(-1)


def _gap(boxes: NDArray, spots: NDArray) -> NDArray:
    """``(a, n)``: how far a point is from a box."""
    a = boxes[:, None]
    return np.linalg.norm(np.maximum(np.maximum(a[..., :2] - spots, spots - a[..., 2:]), 0), axis=-1)


def _meet(segments: NDArray, boxes: NDArray) -> NDArray:
    """``(a, b)``: whether a segment runs through a box."""
    start, end = segments[:, None, :2], segments[:, None, 2:]
    step = np.where(np.abs(end - start) < 1e-9, 1e-9, end - start)
    one, other = (boxes[None, :, :2] - start) / step, (boxes[None, :, 2:] - start) / step
    enter = np.maximum(np.minimum(one, other).max(-1), 0)
    leave = np.minimum(np.maximum(one, other).min(-1), 1)
    return enter < leave


def _cross(segments: NDArray, others: NDArray) -> NDArray:
    """``(a, b)``: whether two segments cross."""

    def side(of: NDArray, x: NDArray, y: NDArray) -> NDArray:
        return (of[..., 2] - of[..., 0]) * (y - of[..., 1]) - (of[..., 3] - of[..., 1]) * (x - of[..., 0])

    a, b = segments[:, None], others[None]
    return (side(a, b[..., 0], b[..., 1]) * side(a, b[..., 2], b[..., 3]) <= 0) & (
        side(b, a[..., 0], a[..., 1]) * side(b, a[..., 2], a[..., 3]) <= 0
    )
