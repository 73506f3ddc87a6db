"""Throughput against peak memory: which runs are on the front, and how they are told."""

from __future__ import annotations

import io
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from rich.console import Console

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.tools.launch.grid.comparison import draw, front, table
from megatron_pipemem.tools.launch.grid.store import Result
from megatron_pipemem.tools.report.figure import write_picture


def run(index, settings, speed, peak, predicted=None, planned=None, measured=None) -> Result:
    """A run of two ranks, the second of which holds nothing."""
    return Result(
        index,
        settings,
        "done",
        seconds_per_step=1 / speed,
        tokens_per_second=speed,
        predicted_peak_bytes=(predicted, None),
        counted_peak_bytes=(peak, 0),
        predicted_bubble_rate=(planned, planned),
        measured_bubble_rate=(measured, None),
    )


runs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12).map(
    lambda pairs: [run(i, {"name": f"run {i}"}, float(speed), peak << 20) for i, (speed, peak) in enumerate(pairs)]
)


@given(runs)
def test_the_front_is_what_nothing_dominates(points):
    def dominated(point: Result) -> bool:
        return any(
            other.tokens_per_second >= point.tokens_per_second
            and other.peak_bytes <= point.peak_bytes
            and (other.tokens_per_second, other.peak_bytes) != (point.tokens_per_second, point.peak_bytes)
            for other in points
        )

    assert {point.index for point in front(points)} == {point.index for point in points if not dominated(point)}


def test_the_table_is_sorted_and_tells_where_the_prediction_missed():
    points = [
        replace(
            run(0, {"pp": 2}, 100.0, 2 << 20, 2 << 20, 0.1),
            measured_bubble_rate=(0.1, 0.09),
            bytes_of_1f1b=5 << 20,
        ),
        run(1, {"pipemem_memory_cap": "0.5"}, 200.0, 3 << 20, 1 << 20, 0.1, 0.2),
        run(2, {}, 50.0, 4 << 20),
    ]
    text = io.StringIO()
    Console(file=text, width=120).print(table(points))
    rows = [line for line in text.getvalue().splitlines() if line.strip()[:1] in ("0", "1", "2")]
    assert "pipemem_memory_cap" in text.getvalue()
    assert rows[0].split()[:3] == ["1", "*", "0.5"] and "3 ≠" in rows[0]
    assert (
        rows[1].split()[:3] == ["0", "*", "2"]
        and "2 =" in rows[1]
        and rows[1].split()[-3:] == ["0.40", "10.0%", "9.0%"]
    )
    assert rows[2].split()[:2] == ["2", "50"]


def test_a_picture_names_runs_by_their_differences_and_marks_stock():
    points = [
        run(0, {"tp": 1, "schedule": "v-half", "lr": 1}, 100.0, 2 << 20),
        run(1, {"tp": 1, "schedule": "stock", "lr": 1}, 90.0, 3 << 20),
        run(2, {"tp": 1, "schedule": "v-half", "lr": 2}, 120.0, 4 << 20),
    ]
    figure = draw(points, "grid")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "grid: tp=1"
    assert {text.get_text() for text in axes.texts} == {"v-half, 1", "stock, 1", "v-half, 2"}
    ours, stock = axes.collections
    assert [tuple(spot) for spot in stock.get_offsets()] == [(3, 90)] and len(ours.get_offsets()) == 2
    hollow, filled = stock.get_facecolors()[0].tolist(), ours.get_facecolors()
    assert hollow == [1, 1, 1, 1] and all(colour.tolist() != hollow for colour in filled)
    assert "Squares" in figure.get_supxlabel() and "Squares" not in draw(points[::2]).get_supxlabel()


def save_picture(points, path, title=""):
    return write_picture(lambda: draw(points, title), path, "a comparison of runs")


def test_pictures(tmp_path):
    points = [run(i, {"name": f"n{i}"}, 100.0 + i, (i + 1) << 20) for i in range(3)]
    assert save_picture(points, tmp_path / "a" / "b.png").read_bytes().startswith(b"\x89PNG")
    written = save_picture(points, tmp_path / "b.svg", "title").read_text()
    assert "n2" in written and "title" in written
    (axes,) = draw(points).axes
    ours, stock = axes.collections
    assert [tuple(spot) for spot in ours.get_offsets()] == [(1, 100), (2, 101), (3, 102)]
    assert not len(stock.get_offsets())
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    assert 99 < low < 100 and 102 < high < 103 and 0 < left < 1 and 3 < right < 4, "whole markers, and no empty canvas"
    with refused("nothing-to-draw", kind=UnsupportedError):
        draw([])
