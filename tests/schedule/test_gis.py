"""GIS, GIS-H, groups of any size between and below, uniform repeating; and looped BFS, which has one group."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.registry import build_schedule


def bubble_and_peak(name: str, p: int, m: int, v: int, **options: object) -> tuple[float, float]:
    """In unit passes of one chunk, and in stage activations."""
    schedule = build_schedule(name, num_devices=p, num_microbatches=m, chunks=v, **options)
    assert oracle.check(schedule) == []
    assert oracle.disordered_weight_gradients(schedule) == []
    return oracle.makespan(schedule, v, v, v) - 3 * m * v, max(oracle.peak(schedule)) * schedule.num_stages


@pytest.mark.parametrize(
    ("v", "gis", "gis_h"),
    [(2, (14, 16), (18, 12)), (3, (14, 24), (22, 16)), (5, (14, 40), (30, 24)), (16, (14, 128), (74, 68))],
)
def test_published_bubbles_and_peaks(v: int, gis: tuple[int, int], gis_h: tuple[int, int]) -> None:
    assert bubble_and_peak("gis", 8, 32, v) == gis
    assert bubble_and_peak("gis-h", 8, 32, v) == gis_h


@pytest.mark.parametrize(
    ("v", "group", "percent", "stages"), [(2, 4, 9.4, 6), (2, 8, 7.3, 8), (4, 4, 6.8, 5), (4, 8, 3.7, 8)]
)
def test_published_percentages(v: int, group: int, percent: float, stages: int) -> None:
    bubble, peak = bubble_and_peak("gis", 8, 32, v, group_size=group)
    assert bubble / (3 * 32 * v) == pytest.approx(percent / 100, abs=6e-4)
    assert peak / v == stages


@pytest.mark.parametrize(
    ("p", "v", "bubble", "peak"), [(8, 2, 23, 13), (8, 3, 34, 16), (8, 5, 56, 24), (8, 16, 172, 71)]
)
def test_uniform_repeating(p: int, v: int, bubble: int, peak: int) -> None:
    assert bubble_and_peak("gis-h", p, 4 * p, v, group_size=1) == (bubble, peak)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_groups_that_do_not_divide_are_balanced_and_cost_nothing(data: st.DataObject) -> None:
    p, v = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 4))
    m, group = data.draw(st.integers(1, 40)), data.draw(st.integers((p + 1) // 2, p))
    bubble, peak = bubble_and_peak("gis", p, m, v, group_size=group)
    assert peak <= group * (v - 1) + p
    groups = -(-m // group)
    if m // groups >= (p + 1) // 2 and groups > 1:
        largest = -(-m // groups)
        assert (bubble, peak) == (2 * (p - 1) + (p - largest) * (v - 1), largest * (v - 1) + p)


@pytest.mark.parametrize("name", ["gis", "gis-h", "looped-bfs"])
@pytest.mark.parametrize("options", [{"chunks": 0}, {"group_size": 0}, {"group_size": 2.0}, {"chunks": True}])
def test_impossible_options_are_refused(name: str, options: dict[str, object]) -> None:
    (option,) = options
    code = "unknown-option" if name == "looped-bfs" and option == "group_size" else "bad-number"
    with refused(code, name, option, kind=UnsupportedError):
        build_schedule(name, num_devices=4, num_microbatches=8, **options)


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 2), (5, 5), (8, 3), (8, 20)])
def test_looped_bfs(p: int, m: int, v: int) -> None:
    assert bubble_and_peak("looped-bfs", p, m, v) == (3 * (p - 1) + 3 * (v - 1) * max(0, p - m), m * v)
