"""The search: valid within every cap, never worse than what we have, optimal where the bound says so, and repeatable."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import least_held, lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, synchronous_schedules
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import search_schedule
from megatron_pipemem.search.exact import solve
from megatron_pipemem.search.problem import make_problem, to_schedule
from megatron_pipemem.search.result import ResultCache
from megatron_pipemem.search.search import MAX_CHUNKS

PRICE = st.floats(0.4, 2.0)
QUICK = 0.15


def search(p: int, m: int, costs: Costs, cap, effort: float = QUICK, **settings):
    return search_schedule(
        num_devices=p, num_microbatches=m, costs=costs, memory_cap=cap, effort=effort, seconds=600, **settings
    )


@examples(25)
@given(data=st.data())
def test_every_result_is_valid_and_within_the_cap(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 13))
    stages = data.draw(st.sampled_from([p, 2 * p]))
    prices = st.lists(PRICE, min_size=stages, max_size=stages).map(tuple)
    costs = Costs(data.draw(prices), data.draw(prices), data.draw(prices), p2p=data.draw(st.sampled_from([0.0, 0.1])))
    placements = [Placement.linear(p)] if stages == p else [Placement.v_shape(p), Placement.interleaved(p, 2)]
    cap = data.draw(st.integers(2, 2 * p)) / (2 * p) if p > 1 else 1.0
    cap = max(cap, max(least_held(placements[0], m, costs)))
    result = search(p, m, costs, cap, placements=placements)
    for candidate in result.candidates:
        validate(candidate.schedule, memory_cap=cap)
        assert oracle.check(candidate.schedule) == []
        assert float(max(oracle.peak(candidate.schedule))) <= cap * (1 + 1e-9)
        assert candidate.makespan == simulate(candidate.schedule, costs).makespan
        assert candidate.lower_bound <= candidate.makespan * (1 + 1e-9)
    # Of those that are equal but for rounding, the one with fewest stages.
    assert result.makespan <= min(candidate.makespan for candidate in result.candidates) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("p", "m", "costs"),
    [(2, 3, (1, 1, 1)), (3, 7, (1, 1.5, 0.5)), (4, 5, (2, 0.5, 1))],
)
def test_never_worse_than_a_family_in_the_same_memory(p: int, m: int, costs: tuple[float, float, float]) -> None:
    """Families with any number of chunks; the search with its defaults."""
    prices = Costs(*costs, p2p=0.02)
    timelines = [simulate(schedule, prices) for schedule in synchronous_schedules(p, m, prices, MAX_CHUNKS)]
    found = {
        peak: search(p, m, prices, peak, effort=0.0) for peak in {round(timeline.peak, 9) for timeline in timelines}
    }
    for timeline in timelines:
        result, schedule = found[round(timeline.peak, 9)], timeline.schedule
        what = f"{schedule.name}, {schedule.placement.num_chunks} chunks"
        assert result.makespan <= timeline.makespan * (1 + 1e-9), what


def test_optimal_is_about_all_placements_that_were_tried() -> None:
    result = search(4, 12, Costs(1, 1.5, 0.5), 0.75)
    assert result.lower_bound <= min(candidate.lower_bound for candidate in result.candidates)
    assert result.is_optimal == (result.makespan <= result.lower_bound * (1 + 1e-6))
    hasty = search_schedule(num_devices=8, num_microbatches=24, costs=Costs(1, 1.5, 0.5), memory_cap=0.5, seconds=0)
    patient = search(8, 24, Costs(1, 1.5, 0.5), 0.5)
    assert hasty.lower_bound == patient.lower_bound, "what there was no time for counts too"


@pytest.mark.parametrize(("p", "m"), [(4, 12), (8, 24), (16, 48)])
@pytest.mark.parametrize("cap", [0.5, 0.625, 0.75, 1.0])
def test_equal_costs_meet_the_bound(p: int, m: int, cap: float) -> None:
    result = search(p, m, Costs(), cap, max_chunks=2)
    assert result.is_optimal and result.gap == 0
    k = int(cap * 2 * p)
    # The papers' formula, in units of a chunk's pass, or what the fill costs in any case.
    assert result.makespan == pytest.approx((6 * m + max(6 * p - 1 - 3 * k, p - 1)) / 2)


@pytest.mark.parametrize(("cap", "bubble"), [(0.5, 0.300), (0.625, 0.163), (0.75, 0.133), (1.0, 0.086)])
def test_unequal_costs_where_the_presets_collapse(cap: float, bubble: float) -> None:
    result = search(8, 24, Costs(1, 1.5, 0.5), cap, effort=1, max_chunks=2)
    assert simulate(result.schedule, Costs(1, 1.5, 0.5)).bubble_rate <= bubble


def test_costs_that_no_fixed_rule_suits() -> None:
    """Where one kind of pass takes most of the time; families and fixed rules, justified and polished, reach .21."""
    costs = Costs(2, 0.4, 0.4)
    result = search(8, 24, costs, 0.625, effort=0.5, placements=[Placement.interleaved(8, 7)])
    assert simulate(result.schedule, costs).bubble_rate <= 0.195


@pytest.mark.parametrize(
    ("p", "m", "cap", "costs", "makespan"),
    [
        (2, 4, 0.5, (1, 1, 1), 16.5),
        (2, 4, 0.75, (1, 1, 1), 13.5),
        (2, 6, 0.75, (1, 1.5, 0.5), 21.0),
        (3, 6, 0.5, (1, 1.5, 0.5), 29.75),
    ],
)
def test_optimal_although_the_bound_is_lower(
    p: int, m: int, cap: float, costs: tuple[float, float, float], makespan: float
) -> None:
    placement = Placement.v_shape(p)
    result = search(p, m, Costs(*costs), cap, effort=1, placements=[placement])
    assert lower_bound(placement, m, Costs(*costs), cap) < result.makespan == pytest.approx(makespan)
    assert result.is_optimal and result.gap == 0 and result.lower_bound == result.best.lower_bound == result.makespan


def test_exact_search_improves_what_was_found_and_gives_up_in_time() -> None:
    placement, costs = Placement.v_shape(2), Costs()
    problem = make_problem(placement, 4, costs, [2, 2])
    ticks_per_second = problem.ticks_per_second
    solved = solve(problem, round(20 * ticks_per_second), 1000)
    assert solved is not None and solved.table is not None
    schedule = to_schedule("exact", placement, problem, solved.table.orders)
    validate(schedule, memory_cap=0.5)
    assert simulate(schedule, costs).makespan == pytest.approx(16.5)
    proved = solve(problem, solved.table.makespan, 1000)
    assert proved is not None and proved.table is None, "nothing is shorter"
    assert solve(problem, round(20 * ticks_per_second), 20) is None


def test_memory_in_bytes_and_a_cap_per_device() -> None:
    p, m = 4, 10
    costs = Costs(1, 1.5, 0.5, memory={Kind.F: 1000.0, Kind.I: -400.0, Kind.W: -600.0})
    caps = [2200.0, 2600.0, 3000.0, 2400.0]
    result = search(p, m, costs, caps)
    assert all(peak <= cap for peak, cap in zip(result.peaks, caps, strict=True))
    timeline = simulate(result.schedule, costs)
    assert timeline.peaks == result.peaks
    assert result.lower_bound <= result.makespan


def test_a_cap_that_nothing_fits_says_what_is_needed() -> None:
    with refused("cap-unreachable", "0.25", kind=UnsupportedError):
        search(4, 8, Costs(), 0.2)
    with refused("wrong-count", 3, 4, kind=UnsupportedError):
        search(4, 8, Costs(), [1.0, 1.0, 1.0])


def test_costs_that_never_give_memory_back_are_said_to_be_the_reason() -> None:
    with refused("cap-unreachable", 1, kind=UnsupportedError):
        search(2, 8, Costs(memory={Kind.F: 1.0, Kind.I: 0.0, Kind.W: 0.0}), 2.0)


def test_costs_of_single_stages_choose_the_placements() -> None:
    two_chunks = search(4, 6, Costs((0.25,) * 7 + (0.5,)), 1.0)
    assert {c.schedule.placement.name for c in two_chunks.candidates} == {"v", "interleaved"}
    four_chunks = search(4, 6, Costs((0.25,) * 16), 1.0)
    assert {c.schedule.placement.name for c in four_chunks.candidates} == {"wave", "interleaved"}
    one_chunk = search(4, 6, Costs((1.0, 1.0, 1.0, 1.5)), 1.0)
    assert {c.schedule.placement.name for c in one_chunk.candidates} == {"linear"}
    with refused("costs-mismatch", 4, 8, 12, 16, 20, 24, 28, 32, kind=CostsError):
        search(4, 6, Costs((1.0, 1.0, 1.0)), 1.0)


@pytest.mark.parametrize("p2p", [0.0, 2.0])
def test_even_without_time_no_family_is_better(p2p: float) -> None:
    costs = Costs(2, 1, 0.1, p2p=p2p)
    found = search_schedule(num_devices=4, num_microbatches=8, costs=costs, memory_cap=1.0, seconds=0.5)
    for name in ("1f1b", "zb-h1", "zbv", "v-half", "gis"):
        family = simulate(build_schedule(name, num_devices=4, num_microbatches=8), costs)
        assert found.makespan <= family.makespan * (1 + 1e-9), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_cap": float("nan")}, ("bad-number", 0)),
        ({"memory_cap": -1.0}, ("bad-number", 0)),
        ({"memory_cap": 0.0}, ("cap-unreachable", 0)),
        ({"placements": []}, ("unsupported-placement",)),
        ({"placements": [Placement.linear(3)]}, ("unsupported-placement", 4)),
        ({"num_microbatches": 0}, ("bad-number",)),
        ({"costs": Costs(0, 0, 0)}, ("no-time", 0)),
        ({"seconds": "abc"}, ("bad-number",)),
        ({"seconds": float("nan")}, ("bad-number",)),
        ({"effort": -1}, ("bad-number",)),
        ({"seed": "--5"}, ("bad-number",)),
    ],
)
def test_questions_without_an_answer(change: dict[str, object], message: str) -> None:
    with refused(*message):
        search_schedule(**{"num_devices": 4, "num_microbatches": 8, **change})


def test_numbers_of_other_libraries() -> None:
    import numpy as np

    costs = Costs(np.full(8, 0.5), np.float32(1.5), np.float64(0.5))
    plain = Costs((0.5,) * 8, 1.5, 0.5)
    assert costs == plain
    one, other = search(4, 6, costs, np.array([1.0] * 4)), search(4, 6, plain, 1.0)
    assert one.makespan == other.makespan


def test_equal_seeds_find_equal_schedules() -> None:
    costs = Costs(1.3, 0.8, 1.1)
    one, other = (search(4, 12, costs, 0.625) for _ in range(2))
    assert one.schedule == other.schedule and one.candidates == other.candidates


@examples(25)
@given(data=st.data())
def test_the_first_start_keeps_every_cap(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    placement = data.draw(
        st.sampled_from([Placement.linear(p), Placement.v_shape(p), Placement.interleaved(p, 3), Placement.wave(p, 4)])
    )
    costs = Costs(data.draw(PRICE), data.draw(PRICE), data.draw(PRICE), p2p=data.draw(st.sampled_from([0.0, 0.3])))
    least = max(least_held(placement, m, costs))
    cap = least * data.draw(st.floats(1, 3))
    result = search_schedule(
        num_devices=p, num_microbatches=m, costs=costs, memory_cap=cap, placements=[placement], seconds=0
    )
    assert result.best.found_by == "evenly spaced", "no family was built for it"
    validate(result.schedule, memory_cap=cap)
    serial = m * sum(sum(costs.seconds(placement)[kind]) for kind in (Kind.F, Kind.I, Kind.W))
    messages = 2 * m * costs.p2p * (placement.num_stages - 1)
    assert result.makespan <= (serial + messages) * (1 + 1e-6)


def test_a_search_that_ran_out_of_time_is_not_kept(tmp_path) -> None:
    question = {"num_devices": 4, "num_microbatches": 8, "costs": Costs(1, 1.5, 0.5), "memory_cap": 0.5}
    search_schedule(**question, seconds=0, cache=ResultCache(tmp_path))
    assert not list(tmp_path.glob("*.json"))


def test_finished_searches_are_found_again(tmp_path) -> None:
    cache = ResultCache(tmp_path)
    question = {"p": 4, "m": 8, "costs": Costs(1, 1.5, 0.5), "cap": 0.75}
    fresh = search(**question, cache=cache)
    (kept,) = tmp_path.glob("*.json")
    again = search(**question, cache=cache)
    assert again.candidates == fresh.candidates and again.seconds == 0 < fresh.seconds
    search(**{**question, "cap": 0.5}, cache=cache)
    assert len(list(tmp_path.glob("*.json"))) == 2
    for damaged in (
        "not JSON",
        "3",
        '{"candidates": [], "lower_bound": 1}',
        '{"candidates": [{"name": "x", "orders": 3}]}',
    ):
        kept.write_text(damaged)
        assert search(**question, cache=cache).candidates == fresh.candidates


def test_a_user_without_a_home_searches_without_a_cache(monkeypatch, caplog) -> None:
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    search(2, 2, Costs(), 1.0, cache=ResultCache())
    assert "XDG_CACHE_HOME" in caplog.text
