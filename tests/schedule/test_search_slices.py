"""The search over numbers of slices: valid within every cap, never worse than a family, and honest about its bound."""

from __future__ import annotations

from types import SimpleNamespace

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.options import AUTO, slice_counts
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, synchronous_families
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import search_schedule
from megatron_pipemem.search.portfolio import first_start, list_schedules
from megatron_pipemem.search.problem import make_problem, to_schedule

PRICE = st.floats(0.3, 2.0)


def search(p: int, m: int, n: int, costs: Costs, cap, placements, effort: float = 0.2):
    return search_schedule(
        num_devices=p,
        num_microbatches=m,
        slices=n,
        costs=costs,
        memory_cap=cap,
        placements=placements,
        effort=effort,
        seconds=600,
    )


def family_timelines(placement: Placement, m: int, n: int, costs: Costs):
    for family in synchronous_families(sliced=True):
        chunks = {"chunks": placement.num_chunks} if "chunks" in family.options else {}
        try:
            schedule = build_schedule(
                family.name, num_devices=placement.num_devices, num_microbatches=m, slices=n, **chunks
            )
        except PipememError:
            continue
        if schedule.placement == placement:
            yield simulate(schedule, costs)


@settings(max_examples=12)
@given(data=st.data())
def test_every_result_is_valid_within_the_cap_and_no_worse_than_a_family(data: st.DataObject) -> None:
    p, m, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), data.draw(st.integers(2, 4))
    stages = data.draw(st.sampled_from([p, 2 * p]))
    prices = st.lists(PRICE, min_size=stages, max_size=stages).map(tuple)
    costs = Costs(data.draw(prices), data.draw(prices), data.draw(prices), p2p=data.draw(st.sampled_from([0.0, 0.2])))
    placements = [Placement.linear(p)] if stages == p else [Placement.v_shape(p), Placement.interleaved(p, 2)]
    cap = (n + data.draw(st.integers(0, p * n))) / (p * n)
    result = search(p, m, n, costs, cap, placements)
    assert result.lower_bound <= result.makespan * (1 + 1e-9)
    for found in result.candidates:
        schedule = found.schedule
        assert schedule.slices == n
        validate(schedule, costs, cap)
        assert oracle.check(schedule) == []
        assert oracle.disordered_weight_gradients(schedule) == []
        assert float(max(oracle.peak(schedule))) <= cap * (1 + 1e-9)
        timeline = simulate(schedule, costs)
        assert found.makespan == timeline.makespan
        for family in family_timelines(schedule.placement, m, n, costs):
            if family.peak <= loosened(cap):
                assert found.makespan <= family.makespan * (1 + 1e-9)


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
    problem = make_problem(placement, m, costs, (cap,) * placement.num_devices, slices=n)
    *_, (name, table) = list_schedules(problem)
    assert name == "list schedule, one by one"
    evenly_spaced = first_start(problem)
    assert evenly_spaced is not None
    for orders in (table.orders, evenly_spaced.orders):
        validate(to_schedule(AUTO, placement, problem, orders), costs, cap)


@settings(max_examples=12)
@given(data=st.data())
def test_slices_with_prices_of_their_own(data: st.DataObject) -> None:
    placement, m, n, costs, alone = draw_prices(data)
    p, cap = placement.num_devices, alone * data.draw(st.floats(1, 2.5))
    result = search(p, m, n, costs, cap, [placement])
    validate(result.schedule, costs, cap)
    assert oracle.check(result.schedule) == []
    timeline = simulate(result.schedule, costs)
    assert result.makespan == timeline.makespan
    assert timeline.peak <= loosened(cap)
    assert result.lower_bound <= result.makespan * (1 + 1e-9)
    for family in family_timelines(placement, m, n, costs):
        if family.peak <= loosened(cap):
            assert result.makespan <= family.makespan * (1 + 1e-9)


def test_auto_keeps_the_best_number_of_slices() -> None:
    """One microbatch on four devices: only slices overlap anything."""
    options = {"slices": "1,2,4", "placement": "linear", "seconds": 600, "effort": 0.2}
    chosen = choose(Request(AUTO, None, options=options), Shape(4, None, 1), Knowledge())
    assert chosen.schedule.slices == 4
    validate(chosen.schedule)
    assert {each.schedule.slices for each in chosen.search.candidates} == {1, 2, 4}
    alone = {
        n: choose(Request(AUTO, None, options={**options, "slices": n}), Shape(4, None, 1), Knowledge())
        for n in (1, 2, 4)
    }
    assert chosen.search.makespan == min(each.search.makespan for each in alone.values())
    assert chosen.search.lower_bound == min(each.search.lower_bound for each in alone.values())


def test_a_cap_that_only_slices_keep() -> None:
    options = {"slices": [1, 4], "placement": "linear", "seconds": 600, "effort": 0.2}
    cap = MemoryCap((0.6, 0.6, 0.3, 0.3), False)
    chosen = choose(Request(AUTO, cap, options=options), Shape(4, None, 6), Knowledge())
    one = choose(Request(AUTO, cap, options={**options, "slices": 1}), Shape(4, None, 6), Knowledge())
    assert chosen.schedule.slices == 4
    assert chosen.search.makespan < one.search.makespan
    validate(chosen.schedule, memory_cap=cap.amount)


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


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2,x", "", [], [2, 0], None])
def test_wrong_numbers_of_slices(wrong: object) -> None:
    with refused("bad-syntax" if wrong == [] else "bad-number", kind=UnsupportedError):
        slice_counts(wrong)


def test_numbers_of_slices() -> None:
    assert slice_counts(4) == (4,)
    assert slice_counts("8, 1,2,2") == (1, 2, 8)
    assert slice_counts([2, 1]) == (1, 2)


@pytest.mark.parametrize(
    "asked",
    [{"offload": "full"}, {"recompute": "full"}, {"vocab_parallel": "2"}, {"options": {"period": True}}],
)
def test_what_slices_are_not_searched_with(asked: dict) -> None:
    asked = SimpleNamespace(**({"options": {}} | asked))
    options = {"slices": 2, **asked.options}
    rest = {key: value for key, value in vars(asked).items() if key != "options"}
    with refused("conflicting-features", kind=UnsupportedError):
        choose(Request(AUTO, None, options=options, **rest), Shape(2, None, 2), Knowledge())


def test_a_run_counts_no_bytes_of_slices() -> None:
    request = Request(AUTO, MemoryCap(2**30, True), options={"slices": 2})
    with refused("unit-mismatch", kind=UnsupportedError):
        choose(request, Shape(2, None, 2), Knowledge(measures=True))
