"""Names in pictures: measured as they are drawn, none is on another, and each can be told to be of its point."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.tools.launch.grid import comparison
from megatron_pipemem.tools.launch.grid.store import Result
from megatron_pipemem.tools.report.pareto import Point, draw

NAMES = st.sampled_from(["a", "zb-h1", "v-half", "gis-h, 6 chunks", "auto 0.6875, 8 chunks"])


def check_names(axes) -> set[str]:
    """Returns the names."""
    renderer, area = FigureCanvasAgg(axes.figure).get_renderer(), axes.get_window_extent()
    annotations = [text for text in axes.texts if isinstance(text, Annotation)]
    names = [text for text in annotations if text.get_text()]
    joined = {text.xy for text in annotations if not text.get_text()}
    boxes = [name.get_window_extent(renderer) for name in names]
    for one, other in combinations(boxes, 2):
        assert not (one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)
    spots = [axes.transData.transform(spot) for points in axes.collections for spot in points.get_offsets()]
    for name, box in zip(names, boxes, strict=True):
        assert area.x0 - 1 <= box.x0 and box.x1 <= area.x1 + 1 and area.y0 - 1 <= box.y0 and box.y1 <= area.y1 + 1
        own, *others = sorted(
            (gap(box, spot) for spot in spots),
            key=lambda place: abs(place - gap(box, axes.transData.transform(name.xy))),
        )
        close = own < 12 * axes.figure.dpi / 72 and all(own <= other + 1e-6 for other in others)
        assert close or name.xy in joined
    return {name.get_text().replace("\n", " ") for name in names}


def gap(box, spot) -> float:
    x, y = max(box.x0 - spot[0], spot[0] - box.x1, 0), max(box.y0 - spot[1], spot[1] - box.y1, 0)
    return (x * x + y * y) ** 0.5


def check_pareto(points: list[Point]) -> None:
    figure = draw(points)
    (axes,) = figure.axes
    named = ", ".join(check_names(axes))
    inside = [p for p in points if p.peak <= axes.get_xlim()[1] and p.bubble_rate <= axes.get_ylim()[1]]
    said = re.search(r"without a name, for lack of room: (\d+)", figure.get_supxlabel())
    fronts = {p.name if p.cap is None else f"{p.cap:.3g}" for p in inside if not p.dominated}
    assert all(name in named for name in fronts)
    missing = [name for name in shared_names([p for p in inside if p.dominated]) if name not in named]
    assert len(missing) == (int(said[1]) if said else 0)


def shared_names(points: list[Point]) -> list[str]:
    """The names of dominated points: one for all chunks of a family."""
    counts = defaultdict(list)
    for point in points:
        counts[point.family or point.name].append(point)
    return [
        f"{family} ({min(p.chunks for p in own)} to {max(p.chunks for p in own)} chunks)" if own[1:] else own[0].name
        for family, own in counts.items()
    ]


def test_names_of_all_families_and_searches():
    """As ``pipemem pareto -p 8 -m 24 --costs 1,1.5,.5`` draws them."""
    costs = Costs(1, 1.5, 0.5)
    rates = (0.5539, 0.4740, 0.3975, 0.3064, 0.2294, 0.1084, 0.0986, 0.0806, 0.0680, 0.0392, 0.0311, 0.0270, 0.0187)
    peaks = [0.25 + index / 16 for index in range(13)]
    points = [Point(f"auto {x}", "wave", x, y, cap=x, chunks=8) for x, y in zip(peaks, rates, strict=True)]
    for schedule in synchronous_schedules(8, 24, costs, max_chunks=8):
        timeline, chunks = simulate(schedule, costs), schedule.placement.num_chunks
        name = f"{schedule.name}, {chunks} chunks" if chunks > 2 else schedule.name
        point = Point(name, schedule.placement.name, timeline.peak, timeline.bubble_rate, dominated=True)
        points.append(replace(point, family=schedule.name, chunks=chunks))
    check_pareto(points)


@settings(max_examples=6)
@given(st.lists(st.tuples(st.integers(5, 80), st.integers(0, 60), st.integers(0, 2), NAMES), min_size=1, max_size=30))
def test_names_of_random_points(rows):
    check_pareto(
        [Point(f"{name}<{i}>", "v", x / 40, y / 100, dominated=kind > 0) for i, (x, y, kind, name) in enumerate(rows)]
    )


def test_names_of_points_that_all_but_coincide():
    check_pareto([Point(f"<{i}>", "v", 1 + i / 500, 0.2 + i / 5000, dominated=i > 5) for i in range(12)])


@settings(max_examples=3)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(90, 100)), min_size=1, max_size=25))
def test_numbers_of_runs(rows):
    points = [
        Result(i, {}, "done", tokens_per_second=speed, predicted_peak_bytes=(None,), counted_peak_bytes=(peak << 20,))
        for i, (peak, speed) in enumerate(rows)
    ]
    numbers = check_names(comparison.draw(points).axes[0])
    assert {number for name in numbers for number in name.split(", ")} == {str(i) for i in range(len(rows))}
