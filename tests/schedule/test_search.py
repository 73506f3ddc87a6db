"""The search: valid within every cap, never worse than what we have, optimal where the bound says so, and repeatable.

All of it with whole microbatches, and with microbatches cut into slices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples, rest_nightly
from promises import assert_correct
from refusals import refused

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import CostsError, PipememError, UnsupportedError
from megatron_pipemem.files import MOST_CACHED_BYTES
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import least_held
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.options import AUTO, slice_counts
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, synchronous_families, synchronous_schedules
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import SearchResult, search_schedule
from megatron_pipemem.search.exact import solve
from megatron_pipemem.search.improve import justify
from megatron_pipemem.search.portfolio import first_start, list_schedules
from megatron_pipemem.search.problem import make_problem, to_schedule
from megatron_pipemem.search.result import ResultCache
from megatron_pipemem.search.search import MAX_CHUNKS

PRICE = st.floats(0.3, 2.0)
QUICK = 0.15


def search(p: int, m: int, costs: Costs, cap, effort: float = QUICK, **settings):
    return search_schedule(
        num_devices=p, num_microbatches=m, costs=costs, memory_cap=cap, effort=effort, seconds=600, **settings
    )


def check(result: SearchResult, slices: int, costs: Costs, cap: float) -> None:
    """Every candidate is what it says, keeps the cap, and is no slower than a family of its placement that does.

    Of orders within a thousandth of the fastest, the search takes the one that suffers least from wrong costs.
    """
    for candidate in result.candidates:
        schedule, timeline = candidate.schedule, simulate(candidate.schedule, costs)
        assert schedule.units.parts == slices
        validate(schedule, costs, cap)
        assert_correct(schedule)
        assert candidate.makespan == timeline.makespan and timeline.peak <= loosened(cap)
        assert candidate.lower_bound <= candidate.makespan * (1 + 1e-9)
        for family in family_timelines(schedule.placement, schedule.num_microbatches, slices, costs):
            if family.peak <= loosened(cap):
                assert candidate.makespan <= family.makespan * 1.001, family.schedule.name
    # Of those that are equal but for rounding, the one with fewest stages.
    assert result.makespan <= min(candidate.makespan for candidate in result.candidates) * (1 + 1e-12)


def family_timelines(placement: Placement, m: int, n: int, costs: Costs) -> Iterator[Timeline]:
    for family in synchronous_families(Units.equal(m, n)):
        options = {"slices": n} if n > 1 else {}
        if "chunks" in family.options:
            options["chunks"] = placement.num_chunks
        try:
            schedule = build_schedule(family.name, num_devices=placement.num_devices, num_microbatches=m, **options)
        except PipememError:
            continue
        if schedule.placement == placement:
            yield simulate(schedule, costs)


@examples(45)
@given(data=st.data())
def test_every_result_is_valid_within_the_cap_and_no_worse_than_a_family(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 1, 2, 3, 4]))
    p, m = (data.draw(st.integers(1, most)) for most in ((5, 9) if n == 1 else (3, 5)))
    stages = data.draw(st.sampled_from([p, 2 * p]))
    prices = st.lists(PRICE, min_size=stages, max_size=stages).map(tuple)
    costs = Costs(data.draw(prices), data.draw(prices), data.draw(prices), p2p=data.draw(st.sampled_from([0.0, 0.15])))
    placements = [Placement.linear(p)] if stages == p else [Placement.v_shape(p), Placement.interleaved(p, 2)]
    parts = max(n, 2)
    cap = data.draw(st.integers(parts, parts * (p + 1))) / (p * parts)
    cap = max(cap, *least_held(placements[0], Units.equal(m, n), costs))
    result = search(p, m, costs, cap, placements=placements, slices=n)
    check(result, n, costs, cap)
    for candidate in result.candidates:
        assert float(max(oracle.peak(candidate.schedule))) <= cap * (1 + 1e-9)


@pytest.mark.parametrize(
    ("p", "m", "costs"),
    rest_nightly(
        [(2, 3, (1, 1, 1)), (3, 7, (1, 1.5, 0.5)), (4, 5, (2, 0.5, 1))],
        [(2, 3, (1, 1, 1))],
        "test_every_result_is_valid_within_the_cap_and_no_worse_than_a_family",
    ),
)
def test_never_worse_than_a_family_in_the_same_memory(p: int, m: int, costs: tuple[float, float, float]) -> None:
    """Families with any number of chunks; the search with its defaults."""
    prices = Costs(*costs, p2p=0.02)
    timelines = [simulate(schedule, prices) for schedule in synchronous_schedules(p, m, prices, MAX_CHUNKS)]
    caps = {round(timeline.peak, 9) for timeline in timelines}
    results = {cap: search(p, m, prices, cap, effort=0.0) for cap in caps}
    for timeline in timelines:
        result, schedule = results[round(timeline.peak, 9)], timeline.schedule
        what = f"{schedule.name}, {schedule.placement.num_chunks} chunks"
        assert result.makespan <= timeline.makespan * (1 + 1e-9), what


def test_optimal_is_about_all_placements_that_were_tried() -> None:
    result = search(4, 12, Costs(1, 1.5, 0.5), 0.75)
    assert result.lower_bound <= min(candidate.lower_bound for candidate in result.candidates)
    assert result.is_optimal == (result.makespan <= result.lower_bound * (1 + 1e-6))
    hasty = search_schedule(num_devices=4, num_microbatches=12, costs=Costs(1, 1.5, 0.5), memory_cap=0.75, seconds=0)
    assert hasty.lower_bound == result.lower_bound, "what there was no time for counts too"


@pytest.mark.parametrize(("p", "m"), rest_nightly([(4, 12), (8, 24), (16, 48)], [(4, 12), (8, 24)], "fewer devices"))
@pytest.mark.parametrize("cap", [0.5, 0.625, 0.75, 1.0])
def test_equal_costs_meet_the_bound(p: int, m: int, cap: float) -> None:
    result = search(p, m, Costs(), cap, max_chunks=2)
    assert result.is_optimal and result.gap == 0
    k = int(cap * 2 * p)
    # The papers' formula, in units of a chunk's pass, or what the fill costs in any case.
    assert result.makespan == pytest.approx((6 * m + max(6 * p - 1 - 3 * k, p - 1)) / 2)


@pytest.mark.parametrize(
    ("cap", "bubble"),
    rest_nightly(
        [(0.5, 0.298), (0.625, 0.163), (0.75, 0.133), (1.0, 0.086)],
        [(0.625, 0.163), (1.0, 0.086)],
        "the other caps, test_costs_that_no_fixed_rule_suits",
    ),
)
def test_unequal_costs_where_the_presets_collapse(cap: float, bubble: float) -> None:
    result = search(8, 24, Costs(1, 1.5, 0.5), cap, max_chunks=2)
    assert simulate(result.schedule, Costs(1, 1.5, 0.5)).bubble_rate <= bubble


def test_costs_that_no_fixed_rule_suits() -> None:
    """Where one kind of pass takes most of the time; families and fixed rules, justified and polished, reach .21."""
    costs = Costs(2, 0.4, 0.4)
    result = search(8, 24, costs, 0.625, effort=0.2, placements=[Placement.interleaved(8, 7)])
    assert simulate(result.schedule, costs).bubble_rate <= 0.195


def test_exact_search_gives_up_after_its_number_of_states() -> None:
    """What it finds is compared with all orders in test_tiny.py."""
    problem = make_problem(Placement.v_shape(2), Units.equal(4), Costs(), [2, 2])
    shorter_than = round(20 * problem.ticks_per_second)
    solved = solve(problem, shorter_than, 1000)
    assert solved is not None and solved.table.makespan == round(16.5 * problem.ticks_per_second)
    assert solve(problem, shorter_than, 20) is None


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
    result = search_schedule(num_devices=4, num_microbatches=8, costs=costs, memory_cap=1.0, seconds=0.5)
    for name in ("1f1b", "zb-h1", "zbv", "v-half", "gis"):
        family = simulate(build_schedule(name, num_devices=4, num_microbatches=8), costs)
        assert result.makespan <= family.makespan * (1 + 1e-9), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_cap": float("nan")}, ("bad-number", 0)),
        ({"memory_cap": -1.0}, ("bad-number", 0)),
        ({"memory_cap": 0.0}, ("cap-unreachable", 0)),
        ({"memory_cap": 0.2}, ("cap-unreachable", "0.25")),
        ({"memory_cap": [1.0, 1.0, 1.0]}, ("wrong-count", 3, 4)),
        (
            {"memory_cap": 2.0, "costs": Costs(memory={Kind.F: 1.0, Kind.I: 0.0, Kind.W: 0.0})},
            ("cap-unreachable", "1B"),
        ),
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
    one, other = (search(4, 6, costs, 0.625) for _ in range(2))
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


@examples(200)
@given(data=st.data())
def test_stages_of_any_length_are_justified_in_every_mode(data: st.DataObject) -> None:
    """For a period the clocks of devices start at different moments, and justification reverses time."""
    p, m, n = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 1, 2, 3]))
    any_devices = st.permutations((*range(p), *range(p))).map(lambda devices: Placement.from_devices(tuple(devices)))
    placement = data.draw(st.one_of(st.sampled_from([Placement.linear(p), Placement.v_shape(p)]), any_devices))
    short = data.draw(st.integers(0, placement.num_stages - 1))

    def prices() -> tuple[float, ...]:
        usual, least = (data.draw(st.sampled_from(values)) for values in ([0.8, 1, 1.5], [0, 1e-9, 0.01, 0.3, 1]))
        return tuple(least if stage == short else usual for stage in range(placement.num_stages))

    costs = Costs(prices(), prices(), prices(), p2p=data.draw(st.sampled_from([0.0, 0.1])))
    caps = None
    if data.draw(st.booleans()):
        caps = [least * data.draw(st.floats(1, 3)) for least in least_held(placement, Units.equal(m, n), costs)]
    unit = costs.memory_unit(placement, Units.equal(m, n))
    problem = make_problem(
        placement,
        Units.equal(m, n),
        costs,
        caps and [cap / unit for cap in caps],
        staggered=data.draw(st.booleans()),
    )
    for name, table in list_schedules(problem):
        justified = justify(problem, justify(problem, table))
        assert justified.makespan <= table.makespan, name
        validate(to_schedule(AUTO, placement, problem, justified.orders), costs, caps)


def test_a_search_that_ran_out_of_time_is_not_kept(tmp_path) -> None:
    question = {"num_devices": 4, "num_microbatches": 8, "costs": Costs(1, 1.5, 0.5), "memory_cap": 0.5}
    search_schedule(**question, seconds=0, cache=ResultCache(tmp_path))
    assert not list(tmp_path.glob("*.json"))


CACHED = {"p": 2, "m": 4, "costs": Costs(1, 1.5, 0.5), "cap": 0.75, "max_chunks": 2}


@pytest.fixture
def cached(tmp_path: Path) -> tuple[ResultCache, SearchResult, Path]:
    """A cache with the result of ``CACHED``, the result, and its file."""
    cache = ResultCache(tmp_path / "cache")
    fresh = search(**CACHED, cache=cache)
    (file,) = (tmp_path / "cache").iterdir()
    return cache, fresh, file


def test_finished_searches_are_found_again(cached) -> None:
    cache, fresh, file = cached
    again = search(**CACHED, cache=cache)
    assert again.candidates == fresh.candidates and again.seconds == 0 < fresh.seconds
    search(**{**CACHED, "cap": 1.0}, cache=cache)
    assert len(list(file.parent.iterdir())) == 2


def wrong_files(values: dict, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of files that are not the result of ``CACHED``, whose file has these values."""

    def other(**question: object) -> str:
        folder = tmp_path / f"other {sorted(question)}"
        search(**{**CACHED, **question}, cache=ResultCache(folder))
        (file,) = folder.iterdir()
        return file.read_text()

    first, *_ = rows = values["candidates"]

    def changed(number: int, **changes: object) -> str:
        return json.dumps({**values, "candidates": [*rows[:number], {**rows[number], **changes}, *rows[number + 1 :]]})

    far = next(number for number, row in enumerate(rows) if row["lower_bound"] < 0.9 * row["makespan"])
    yield "other microbatches", other(m=5)
    yield "above the cap", other(cap=None)
    yield "other devices", other(p=3)
    yield "other slices", other(slices=2)
    yield "a short makespan", changed(0, makespan=first["makespan"] * 0.9)
    yield "a high bound of a placement", changed(far, lower_bound=rows[far]["makespan"] * 0.95)
    yield "a low bound of a placement", changed(0, lower_bound=0.0)
    yield "a high bound", json.dumps({**values, "lower_bound": first["makespan"] * 2})
    yield "a low bound", json.dumps({**values, "lower_bound": 0.5})
    yield "an endless bound", json.dumps({**values, "lower_bound": float("nan")})
    yield "a placement twice", json.dumps({**values, "candidates": [first, first]})
    yield "an invalid order", changed(0, orders=first["orders"].replace("F0", "F1", 1))
    yield "a part of an order", changed(0, orders=first["orders"].partition("\n")[0])
    yield "another property", changed(0, orders="# update_every=4 versions_kept=2\n" + first["orders"])
    for text in (
        "not JSON",
        "3",
        "[" * 100_000,
        '{"candidates": [], "lower_bound": 1}',
        '{"candidates": [{"orders": 3}]}',
    ):
        yield text[:40], text


def test_files_that_are_not_a_result_are_a_miss_with_one_warning(cached, tmp_path, caplog) -> None:
    cache, fresh, file = cached
    right = file.read_text()
    for name, text in wrong_files(json.loads(right), tmp_path):
        caplog.clear()
        file.write_text(text)
        assert search(**CACHED, cache=cache).candidates == fresh.candidates, name
        assert [record.levelname for record in caplog.records if record.name.endswith("result")] == ["WARNING"], name
        assert file.read_text() == right, name
    assert search(**CACHED, cache=cache).seconds == 0


def test_the_cache_opens_only_regular_files_and_writes_through_no_link(cached, tmp_path, caplog) -> None:
    cache, fresh, file = cached
    right, aim = file.read_text(), tmp_path / "aim"
    for make in (
        lambda: aim.write_text(right) and file.symlink_to(aim),
        lambda: file.symlink_to(tmp_path / "nothing"),
        lambda: os.mkfifo(file),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.write_bytes(b" " * MOST_CACHED_BYTES + right.encode()),
    ):
        caplog.clear()
        file.unlink()
        make()
        assert search(**CACHED, cache=cache).candidates == fresh.candidates
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
        assert not file.is_symlink() and file.read_text() == right
    assert aim.read_text() == right and not (tmp_path / "nothing").exists()


@examples(60)
@given(data=st.data())
def test_a_damaged_file_never_changes_a_result(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        cache = ResultCache(Path(folder))
        fresh = search(2, 2, Costs(1, 1.5, 0.5), 1.0, effort=0.02, max_chunks=2, cache=cache)
        (file,) = Path(folder).iterdir()
        text = file.read_text()
        at = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 3))
        file.write_text(text[:at] + data.draw(st.text('0123456789FIWB,.\\n"-e', max_size=3)) + text[at + length :])
        again = search(2, 2, Costs(1, 1.5, 0.5), 1.0, effort=0.02, max_chunks=2, cache=cache)
        # Another valid order is no lie about its makespan and bounds.
        assert all(simulate(c.schedule, Costs(1, 1.5, 0.5)).makespan == c.makespan for c in again.candidates)
        assert again.lower_bound == pytest.approx(fresh.lower_bound, rel=1e-5)
        assert again.makespan >= fresh.lower_bound * (1 - 1e-5)


def test_a_user_without_a_home_searches_without_a_cache(monkeypatch, caplog) -> None:
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    search(2, 2, Costs(), 1.0, cache=ResultCache())
    assert "XDG_CACHE_HOME" in caplog.text


# ----------------------------------------------------------------------------------------------------------------- slices


def draw_prices(data: st.DataObject) -> tuple[Placement, int, int, Costs, float]:
    """A placement, numbers of microbatches and slices, unequal seconds and bytes of slices, and what one microbatch after
    another holds. Keys and values live from the first slice's F to its I.
    """
    p, m, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    placement = data.draw(st.sampled_from([Placement.linear(p), Placement.v_shape(p)]))
    places = placement.num_stages * n
    prices = st.lists(PRICE, min_size=places, max_size=places).map(tuple)
    kept = data.draw(prices)
    caches = data.draw(st.lists(st.floats(0, 2), min_size=placement.num_stages, max_size=placement.num_stages))
    waits = data.draw(st.floats(0, 1))
    takes, gives = list(kept), [-value * (1 - waits) for value in kept]
    for stage, cache in enumerate(caches):
        takes[stage * n] += cache
        gives[stage * n + n - 1] += cache
        gives[stage * n] -= 2 * cache
    memory = {Kind.F: tuple(takes), Kind.I: tuple(gives), Kind.W: tuple(-value * waits for value in kept)}
    costs = Costs(data.draw(prices), data.draw(prices), data.draw(prices), p2p=0.1, memory=memory)
    # All forwards of a microbatch, and the gradients of its keys and values.
    alone = max(
        sum(sum(takes[s * n : s * n + n]) + cache for s in stages for cache in (caches[s],))
        for stages in placement.stages
    )
    return placement, m, n, costs, alone


@examples(100)
@given(data=st.data())
def test_one_microbatch_after_another_fits_any_cap_that_admits_one(data: st.DataObject) -> None:
    placement, m, n, costs, alone = draw_prices(data)
    cap = alone * data.draw(st.floats(1, 1.5))
    problem = make_problem(placement, Units.equal(m, n), costs, (cap,) * placement.num_devices)
    *_, (name, table) = list_schedules(problem)
    assert name == "list schedule, one by one"
    evenly_spaced = first_start(problem)
    assert evenly_spaced is not None
    for orders in (table.orders, evenly_spaced.orders):
        validate(to_schedule(AUTO, placement, problem, orders), costs, cap)


@examples(12)
@given(data=st.data())
def test_slices_with_prices_of_their_own(data: st.DataObject) -> None:
    placement, m, n, costs, alone = draw_prices(data)
    p, cap = placement.num_devices, alone * data.draw(st.floats(1, 2.5))
    check(search(p, m, costs, cap, placements=[placement], slices=n), n, costs, cap)


def test_auto_keeps_the_best_number_of_slices() -> None:
    """One microbatch on four devices: only slices overlap anything."""
    options = {"slices": "1,2,4", "placement": "linear", "seconds": 600, "effort": 0.2}
    chosen = choose(Request(AUTO, None, options=options), Shape(4, None, 1), Knowledge())
    assert chosen.schedule.units.parts == 4
    validate(chosen.schedule)
    assert {candidate.schedule.units.parts for candidate in chosen.search.candidates} == {1, 2, 4}
    alone = {
        n: choose(Request(AUTO, None, options={**options, "slices": n}), Shape(4, None, 1), Knowledge())
        for n in (1, 2, 4)
    }
    assert chosen.search.makespan == min(choice.search.makespan for choice in alone.values())
    assert chosen.search.lower_bound == min(choice.search.lower_bound for choice in alone.values())


def test_auto_without_the_option_is_as_before() -> None:
    """And the option with one slice asks for the same."""
    shape, knowledge = Shape(4, None, 6), Knowledge(Costs(1, 1.3, 0.7))
    plain = choose(Request(AUTO, None, options={"seconds": 600, "effort": 0.2}), shape, knowledge)
    one = choose(Request(AUTO, None, options={"seconds": 600, "effort": 0.2, "slices": 1}), shape, knowledge)
    direct = search_schedule(
        num_devices=4,
        num_microbatches=6,
        costs=Costs(1, 1.3, 0.7),
        placements=[Placement.v_shape(4), Placement.interleaved(4, 2)],
        seconds=600,
        effort=0.2,
    )
    assert plain.schedule.orders == one.schedule.orders == direct.schedule.orders


def test_numbers_of_slices() -> None:
    for value, counts in ((4, (4,)), ("8, 1,2,2", (1, 2, 8)), ([2, 1], (1, 2))):
        assert slice_counts(value) == counts
    for wrong in (0, -1, True, 1.5, "2,x", "", [], [2, 0], None):
        with refused("bad-syntax" if wrong == [] else "bad-number", kind=UnsupportedError):
            slice_counts(wrong)


@pytest.mark.parametrize(
    "asked",
    [{"offload": "full"}, {"recompute": "full"}, {"vocab_cut": "2"}, {"options": {"slices": 2, "period": True}}],
)
def test_what_slices_are_not_searched_with(asked: dict[str, object]) -> None:
    with refused("conflicting-features", kind=UnsupportedError):
        choose(Request(AUTO, None, **({"options": {"slices": 2}} | asked)), Shape(2, None, 2), Knowledge())


def test_a_run_counts_no_bytes_of_slices() -> None:
    request = Request(AUTO, MemoryCap(2**30, True), options={"slices": 2})
    with refused("unit-mismatch", kind=UnsupportedError):
        choose(request, Shape(2, None, 2), Knowledge(is_measuring=True))
