"""The picture and the table of bubble against peak."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from megatron_pipemem.errors import OutputError, UnsupportedError
from megatron_pipemem.report.pareto import Bound, Point, save_pareto, table

POINTS = [
    Point("1f1b", "linear", 1.0, 0.22, dominated=True),
    Point("zb-h1", "linear", 1.0, 0.09, dominated=True),
    Point("zbv", "v", 1.0, 0.05),
    Point("v-half", "v", 0.6, 0.10),
    Point("cap 0.7", "v", 0.7, 0.06, is_search=True),
    Point("gems", "bidirectional", 0.2, 0.83),
]


def texts(path) -> list[str]:
    return ["".join(text.itertext()) for text in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_picture_names_points_placements_and_bounds(tmp_path):
    bounds = [Bound("v", ((0.4, 0.2), (1.0, 0.01)))]
    found = texts(save_pareto(POINTS, tmp_path / "new" / "front.svg", bounds, title="p=8, m=24"))
    assert {"1f1b", "zb-h1", "zbv", "v-half", "cap 0.7"} <= set(found)
    assert {"linear", "v", "searched", "front", "hollow: dominated", "lower bound: v", "p=8, m=24"} <= set(found)
    assert "above the picture: gems (0.2, 83%)" in found  # drawn, it would squeeze all others together


def test_points_in_one_place_share_a_line(tmp_path):
    same = [Point(name, "linear", 1.0, 0.2, dominated=name != "a") for name in ("a", "b", "c")]
    found = texts(save_pareto(same, tmp_path / "front.svg"))
    assert "a" in found and "b, c" in found


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.0, 0.4), (0.9, 0.9)])
def test_any_points_can_be_drawn(tmp_path, rates):
    points = [Point(f"s{index}", "v", 0.5 + index, rate) for index, rate in enumerate(rates)]
    path = save_pareto(points, tmp_path / "front.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    again = save_pareto(points, tmp_path / "again.png")
    assert again.read_bytes() == path.read_bytes()


def test_table_is_sorted_by_peak_and_marks_the_front():
    out = io.StringIO()
    Console(file=out, width=100).print(table(POINTS))
    rows = [line.split() for line in out.getvalue().splitlines() if "%" in line]
    assert [row[-2] for row in rows] == ["0.2", "0.6", "0.7", "1", "1", "1"]
    assert [row[1] for row in rows if row[0] == "*"] == ["gems", "v-half", "cap", "zbv"]
    assert "(searched)" in rows[2]


def test_refusals(tmp_path):
    with pytest.raises(UnsupportedError, match=r"\.png or \.svg"):
        save_pareto(POINTS, tmp_path / "front.html")
    with pytest.raises(UnsupportedError, match="no schedule is left"):
        save_pareto([], tmp_path / "front.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        save_pareto(POINTS, tmp_path / "file" / "front.png")
