"""The picture and the table of bubble against peak."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.tools.report.figure import write_picture
from megatron_pipemem.tools.report.pareto import Point, draw

POINTS = [
    Point("1f1b", "linear", 1.0, 0.22, dominated=True, is_stock=True),
    Point("zb-h1", "linear", 1.0, 0.09, dominated=True),
    Point("zbv", "v", 1.0, 0.05),
    Point("v-half", "v", 0.6, 0.10),
    Point("auto 0.7", "v", 0.7, 0.06, cap=0.7, chunks=3),
    Point("gems", "bidirectional", 0.2, 0.83),
]


def save_pareto(points, path, *others, **named):
    return write_picture(lambda: draw(points, *others, **named), path, "bubble against peak")


def texts(path) -> list[str]:
    return ["".join(text.itertext()) for text in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_picture_names_points_placements_and_the_bound(tmp_path):
    labels = texts(save_pareto(POINTS, tmp_path / "new" / "front.svg", [(0.4, 0.2), (1.0, 0.01)], title="p=8, m=24"))
    assert {"zbv", "v-half", "0.7", "1f1b, stock's", "zb-h1"} <= set(labels)
    assert {"linear", "v", "searched, with its cap", "front", "hollow: dominated", "p=8, m=24"} <= set(labels)
    assert {"lower bound for all", "placements shown"} <= set(labels)
    # Drawn, gems would squeeze all others together.
    note = next(label for label in labels if "Beyond the picture: gems (0.2, 83%)." in label)
    assert note.startswith("Searched schedules have 3 chunks.")


def test_between_two_memories_the_line_is_the_bound_of_the_larger():
    """On from each memory it would lie above schedules that are possible."""
    bound = [(0.4, 0.2), (0.8, 0.1), (1.0, 0.01)]
    (axes,) = draw(POINTS, bound).axes
    (line,) = [line for line in axes.lines if line.get_label().startswith("lower bound")]
    assert line.get_drawstyle() == "steps-pre" and [tuple(corner) for corner in line.get_xydata()] == bound


def test_points_stand_where_they_are_and_the_rest_is_said():
    figure = draw([*POINTS, Point("gpipe", "linear", 4.0, 0.22, dominated=True)])
    (axes,) = figure.axes
    drawn = {tuple(offset) for points in axes.collections for offset in points.get_offsets()}
    assert {(point.peak, point.bubble_rate) for point in POINTS} <= drawn
    assert axes.get_xlim()[1] < 4 and axes.get_ylim()[1] < 0.83
    assert "Beyond the picture: gems (0.2, 83%), gpipe (4, 22%)." in figure.get_supxlabel()


def test_schedules_of_a_family_share_a_name_and_a_line():
    gis = [Point(f"gis, {n} chunks", "v", 1, 0.3 / n, n < 5, family="gis", chunks=n) for n in (4, 2, 3, 5)]
    far = [Point(f"bfs, {n} chunks", "v", 4, 0.2 / n, True, family="bfs", chunks=n) for n in (2, 4)]
    figure = draw([*POINTS, *gis, *far])
    (axes,) = figure.axes
    names = {text.get_text() for text in axes.texts}
    assert {"gis (2 to 4 chunks)", "gis, 5 chunks", "zbv"} <= names and "gis, 3 chunks" not in names
    lines = [[tuple(corner) for corner in line.get_xydata()] for line in axes.lines]
    assert [(1, 0.3 / n) for n in (2, 3, 4, 5)] in lines
    assert "bfs (2 to 4 chunks) (4, 5% to 10%)" in figure.get_supxlabel()


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.0, 0.4), (0.9, 0.9)])
def test_any_points_can_be_drawn(tmp_path, rates):
    points = [Point(f"s{index}", "v", 0.5 + index, rate) for index, rate in enumerate(rates)]
    path = save_pareto(points, tmp_path / "front.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    again = save_pareto(points, tmp_path / "again.png")
    assert again.read_bytes() == path.read_bytes()


def test_no_points_are_refused():
    with refused("nothing-to-draw", kind=UnsupportedError):
        draw([])
