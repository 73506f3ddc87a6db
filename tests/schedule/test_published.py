"""Grouped, waved and fitted families against the numbers that their papers print."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


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


@examples(60)
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


def hanayo(p: int, m: int, **options: object) -> Schedule:
    schedule = build_schedule("hanayo", num_devices=p, num_microbatches=m, **options)
    assert oracle.check(schedule) == []
    assert oracle.disordered_weight_gradients(schedule) == []
    return schedule


@pytest.mark.parametrize(("waves", "rate"), [(1, 0.333), (2, 0.213), (4, 0.119)])
def test_rates_for_as_many_microbatches_as_devices(waves: int, rate: float) -> None:
    assert simulate(hanayo(4, 4, waves=waves)).bubble_rate == pytest.approx(rate, abs=5e-4)


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_memory_is_that_of_1f1b_or_a_microbatch_more(p: int, waves: int) -> None:
    for m in (1, p, p + 1, 2 * p + 1, 4 * p):
        schedule = hanayo(p, m, waves=waves)
        most = 1 if m <= p else 1 + 1 / p
        assert max(oracle.peak(schedule)) <= min(most, m / p) + 1e-9


def test_waves_or_chunks_say_how_the_model_is_cut() -> None:
    assert hanayo(4, 6, chunks=6) == hanayo(4, 6, waves=3) == hanayo(4, 6, waves=3, chunks=6)
    assert hanayo(4, 6).placement.devices == (0, 1, 2, 3, 3, 2, 1, 0) * 2
    assert hanayo(4, 6, waves=1).placement.name == "v"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"waves": 0}, ("bad-number", 1)),
        ({"waves": "2"}, ("bad-number",)),
        ({"chunks": 3}, ("needs-chunks",)),
        ({"chunks": 1}, ("bad-number", 2)),
        ({"chunks": 2, "waves": 2}, ("conflicting-options", 2, 4)),
    ],
)
def test_impossible_waves_are_refused(options: dict[str, object], why: str) -> None:
    with refused(*why, kind=UnsupportedError):
        hanayo(4, 8, **options)


# p, m, seconds of F, I, W and a message, and the rates of ZB-1p (equal to those of ZB-H1) and ZB-H2.
PROFILES = {
    "1.5B": (8, 24, (18.522, 18.086, 9.337, 0.601), 0.1585, 0.1083),
    "6.2B": (8, 24, (29.718, 29.444, 19.927, 0.527), 0.1323, 0.0698),
    "14.6B": (16, 48, (11.347, 11.248, 8.132, 0.377), 0.1397, 0.0672),
    "28.3B": (32, 96, (10.419, 10.207, 7.715, 0.408), 0.1421, 0.0641),
}


def auto(p: int, m: int, **arguments: object) -> Schedule:
    return build_schedule("zb-auto", num_devices=p, num_microbatches=m, **arguments)


@pytest.mark.parametrize("profile", PROFILES)
def test_rates_of_the_paper(profile: str) -> None:
    p, m, prices, zb_1p, zb_h2 = PROFILES[profile]
    costs = Costs(*prices)
    assert round(simulate(auto(p, m, costs=costs), costs).device_bubble_rate, 4) == zb_1p
    assert simulate(auto(p, m, costs=costs, memory_cap=2), costs).device_bubble_rate < zb_h2


@examples(60)
@given(data=st.data())
def test_within_the_cap_and_no_slower_than_what_is_written_down(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 24))
    price = st.floats(0.1, 10)
    each = st.one_of(price, st.lists(price, min_size=p, max_size=p).map(tuple))
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), data.draw(st.floats(0, 2)))
    cap = data.draw(st.integers(1, 3 * p)) / p
    schedule = auto(p, m, costs=costs, memory_cap=cap)
    assert oracle.check(schedule) == []
    assert oracle.disordered_weight_gradients(schedule) == []
    assert max(oracle.peak(schedule)) <= cap + 1e-9
    validate(schedule, memory_cap=cap)
    for name, peak in (("zb-h1", 1), ("zb-h2", 2 - 1 / p)):
        if cap >= peak:
            known = build_schedule(name, num_devices=p, num_microbatches=m)
            assert simulate(schedule, costs).makespan <= simulate(known, costs).makespan * (1 + 1e-8)


@pytest.mark.parametrize("cap", [0.5, 0.75, 1.25, 1.5])
@pytest.mark.parametrize("costs", [Costs(p2p=0.3), Costs(1, 1.5, 0.5)])
def test_an_order_fitted_to_the_costs_beats_one_for_equal_passes(costs: Costs, cap: float) -> None:
    fitted, equal = auto(8, 24, costs=costs, memory_cap=cap), auto(8, 24, memory_cap=cap)
    assert simulate(fitted, costs).makespan < simulate(equal, costs).makespan
    assert simulate(equal).makespan <= simulate(fitted).makespan


@pytest.mark.parametrize("p", [1, 4])
def test_less_than_one_microbatch_is_refused(p: int) -> None:
    assert simulate(auto(p, 3, memory_cap=1 / p)).peak == pytest.approx(1 / p)
    with refused("cap-unreachable", f"{1 / p:.4g}", p, kind=UnsupportedError):
        auto(p, 3, memory_cap=0.9 / p)
