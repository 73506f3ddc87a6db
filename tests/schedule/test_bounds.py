"""The lower bound: certified against everything we can build, and exact where the optimum is known."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import oracle
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules
from refusals import refused
from tiny_oracle import Tiny, shortest

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.features.slices.prices import slice_costs
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.search.exact import solve
from megatron_pipemem.search.problem import make_problem

UNIT_V = Costs(2, 2, 2)
PRICE = st.floats(0.01, 10)
KINDS = st.sampled_from(["FIWB", "FB"])


def assert_below(schedule: Schedule, costs: Costs) -> None:
    cap = float(max(oracle.peak(schedule)))
    bound = lower_bound(schedule.placement, schedule.num_microbatches, costs, cap)
    makespan = simulate(schedule, costs).makespan
    assert bound <= makespan * (1 + 1e-9)
    assert lower_bound(schedule.placement, schedule.num_microbatches, costs) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_equal_costs_give_the_papers_formula(p: int, extra: int) -> None:
    for k in range(max(2, p), 2 * p + 1):
        m = 2 * p + extra
        # With much memory only the wait for the first backward, then only that for the first forward, remains.
        papers = 6 * m + max(6 * p - 1 - 3 * k, 3 * p - 1 - k, p - 1)
        # With k // 2 microbatches at once on both stages of device d, each from F of the upper stage to its W.
        lives = (ceil(m / (k // 2)) * (2 * d + 3) + 2 * (2 * p - 1 - d) for d in range(p))
        assert lower_bound(Placement.v_shape(p), m, UNIT_V, k / (2 * p)) == pytest.approx(max(papers, *lives))


@pytest.mark.parametrize(
    ("p", "m", "costs", "p2p", "rates"),
    [
        (8, 24, (1, 1.5, 0.5), 0, (0.191, 0.163, 0.133, 0.0857)),
        (8, 64, (1, 1.5, 0.5), 0, (0.081, 0.068, 0.054, 0.0340)),
        (16, 64, (1, 1.5, 0.5), 0, (0.154, 0.131, 0.107, 0.0713)),
        (8, 24, (1, 1, 1), 0.1, (0.159, 0.128, 0.096, 0.059)),
        (8, 24, (1, 1.5, 0.5), 0.1, (0.210, 0.183, 0.154, 0.1017)),
    ],
)
def test_bubbles_at_the_bound(p: int, m: int, costs: tuple[float, ...], p2p: float, rates: tuple[float, ...]) -> None:
    """Links cost ``p2p`` forwards of a stage."""
    for cap, rate in zip((0.5, 0.625, 0.75, 1.0), rates, strict=True):
        bound = lower_bound(Placement.v_shape(p), m, Costs(*costs, p2p=p2p / 2), cap)
        assert 1 - m * sum(costs) / bound == pytest.approx(rate, abs=6e-4)


@pytest.mark.parametrize(
    ("p", "m", "costs", "cap", "p2p", "bound", "optimum"),
    [
        (4, 6, (1, 1.7, 0.9), 0.4, 0.1, 44.7, 46.7),
        (4, 8, (1, 1.5, 0.5), 0.4, 0.1, 52.4, 56.4),
        (4, 8, (1, 1.2, 0.8), 0.4, 0.1, 48.2, 52.1),
        (4, 8, (1, 1, 1), 0.4, 0, 40, 43),
        (3, 9, (1, 1.2, 0.8), 0.5, 0.1, 40.6, 44.1),
    ],
)
def test_a_small_cap_admits_few_microbatches_at_once(
    p: int, m: int, costs: tuple[float, ...], cap: float, p2p: float, bound: float, optimum: float
) -> None:
    """The bound was computed by hand; the optimum is the shortest order that any solver found."""
    assert lower_bound(Placement.v_shape(p), m, Costs(*costs, p2p), cap) == pytest.approx(bound)
    assert bound < optimum


def shortest_makespan(placement: Placement, m: int, costs: Costs, caps: Sequence[float]) -> float | None:
    """Return the makespan of the best order with split backwards; ``None`` if there is none, or too much to try."""
    problem = make_problem(placement, Units.equal(m), costs, caps)
    solved = solve(problem, 1000 * max(problem.ticks), 5000)
    return None if solved is None or solved.table is None else solved.table.makespan / problem.ticks_per_second


@examples(100)
@given(data=st.data())
def test_the_exact_solver_never_beats_the_bound(data: st.DataObject) -> None:
    placements = [Placement.v_shape(2), Placement.interleaved(2, 2), Placement.linear(2), Placement.linear(3)]
    placement = data.draw(st.sampled_from(placements))

    def several(*values: float) -> tuple[float, ...]:
        return data.draw(st.tuples(*(st.sampled_from(values),) * placement.num_stages))

    taken = several(1, 2)
    by_input = tuple(f * share for f, share in zip(taken, several(0, -0.5, 0.5), strict=True))
    by_weight = tuple(-f - i for f, i in zip(taken, by_input, strict=True))
    memory = {Kind.F: taken, Kind.I: by_input, Kind.W: by_weight}
    prices = [several(0.1, 0.5, 1, 2, 4) for _ in "FIW"]
    costs = Costs(*prices, p2p=data.draw(st.sampled_from([0, 0.1])), memory=memory)
    more = several(0, 1, 2)
    caps = [sum(taken[s] for s in stages) + more[d] for d, stages in enumerate(placement.stages)]
    m = data.draw(st.integers(2, 4))
    optimum = shortest_makespan(placement, m, costs, caps)
    assume(optimum is not None)
    assert lower_bound(placement, m, costs, caps) <= optimum * (1 + 1e-6)


@pytest.mark.parametrize(
    ("placement", "m", "prices", "released_by_input", "caps"),
    [
        # A stage before the last one releases its memory first.
        (
            Placement.interleaved(2, 2),
            4,
            [(0.5, 1, 0.1, 4), (1, 1, 0.1, 1), (1, 0.1, 4, 1)],
            (0, 0, 0, 0),
            (3, 5),
        ),
        (
            Placement.v_shape(2),
            3,
            [(4, 2, 4, 0.5), (4, 0.5, 0.5, 0.5), (2, 0.1, 4, 0.5)],
            (0, 0, 0, 0),
            (4, 3),
        ),
        # I releases half of it.
        (Placement.linear(3), 2, [(0.1, 1, 0.1), (2, 1, 2), (2, 1, 1)], (0.5, 0, 0), (1.5, 1, 1.5)),
        (Placement.linear(2), 2, [(0.5, 1), (2, 1), (4, 2)], (0.5, 0), (1.5, 1)),
    ],
)
def test_memory_is_released_by_whatever_comes_first(
    placement: Placement,
    m: int,
    prices: list[tuple[float, ...]],
    released_by_input: tuple[float, ...],
    caps: tuple[float, ...],
) -> None:
    memory = {
        Kind.F: (1,) * placement.num_stages,
        Kind.I: tuple(-share for share in released_by_input),
        Kind.W: tuple(share - 1 for share in released_by_input),
    }
    costs = Costs(*prices, memory=memory)
    assert lower_bound(placement, m, costs, caps) <= shortest_makespan(placement, m, costs, caps) * (1 + 1e-6)


@examples(120)
@given(data=st.data())
def test_no_order_of_any_placement_beats_the_bound(data: st.DataObject) -> None:
    schedule = data.draw(random_schedules())
    prices = st.lists(PRICE, min_size=schedule.num_stages, max_size=schedule.num_stages).map(tuple)
    devices = range(schedule.num_devices)
    links = {(a, b): data.draw(st.floats(0, 3)) for a in devices for b in devices}
    assert_below(schedule, Costs(data.draw(prices), data.draw(prices), data.draw(prices), links))


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "v-half"])
@pytest.mark.parametrize("p", [3, 4, 8, 13])
def test_families_that_meet_the_bound(name: str, p: int) -> None:
    timeline = simulate(build_schedule(name, num_devices=p, num_microbatches=3 * p))
    bound = lower_bound(timeline.schedule.placement, 3 * p, Costs(), timeline.peak)
    assert timeline.makespan == pytest.approx(bound)


def test_what_has_no_bound_is_refused() -> None:
    with refused("cap-unreachable", "0.25", "0.2", kind=UnsupportedError):
        lower_bound(Placement.v_shape(4), 8, Costs(), 0.2)
    with refused("costs-mismatch", 3, 4, kind=CostsError):
        lower_bound(Placement.linear(4), 8, Costs(forward=(1, 2, 3)))


def test_a_cap_written_as_a_fraction_keeps_all_its_stages() -> None:
    for p in (1, 3, 7, 12, 29):
        for k in range(2, 2 * p + 1):
            exact = lower_bound(Placement.v_shape(p), 4, UNIT_V, float(Fraction(k, 2 * p)))
            assert exact == lower_bound(Placement.v_shape(p), 4, UNIT_V, k / (2 * p) + 1e-12)


SIZES = {
    (0,): [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2)],
    (0, 1): [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)],
    (0, 0): [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)],
    (0, 1, 2): [(1, 1), (2, 1), (1, 2)],
    (0, 1, 0): [(1, 1), (2, 1), (1, 2)],
    (0, 1, 1, 0): [(1, 1)],
}
"""Microbatches and slices of the problems of every placement. All their orders can be tried."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tiny, Costs]:
    """A tiny problem of microbatches and slices that are not alike, and its costs."""
    devices = draw(st.sampled_from([*SIZES]))
    m, n = draw(st.sampled_from(SIZES[devices]))
    places = len(devices) * n

    def several(least: int, most: int, count: int = places) -> tuple[int, ...]:
        return draw(st.tuples(*(st.integers(least, most),) * count))

    prices = [several(0 if kind == "W" else 1, 3) for kind in "FIW"]
    time, tokens, message = several(0, 5, m), several(0, 4, m), draw(st.integers(0, 2))
    own = draw(st.dictionaries(st.sampled_from([Kind.F, Kind.I, Kind.W, Kind.B]), st.tuples(*(st.integers(0, 5),) * m)))
    factors = [own.get(kind, time) for kind in (Kind.F, Kind.I, Kind.W)]
    forwards = several(0, 3)
    inputs = [max(-f, i) for f, i in zip(forwards, several(-1, 1), strict=True)]
    weights = [-f - i for f, i in zip(forwards, inputs, strict=True)]
    forwards = list(forwards)
    for first in range(0, places if n > 1 else 0, n):
        # Caches of keys and values, and their gradients.
        cache = draw(st.integers(0, 2))
        forwards[first] += cache
        inputs[first + n - 1] += cache
        inputs[first] -= 2 * cache
    changes = (forwards, inputs, weights)
    memory = dict(zip((Kind.F, Kind.I, Kind.W), map(tuple, changes), strict=True))
    costs = Costs(*prices, p2p=message * n, memory=memory, microbatch=MicrobatchFactors(time, tokens, own))
    caps = None
    if draw(st.booleans()):
        whole = [0] * (max(devices) + 1)
        for place, forward in enumerate(forwards):
            whole[devices[place // n]] += forward * max(tokens)
        caps = tuple(max(0, least + draw(st.integers(-2, 6))) for least in whole)

    def ticks(kind: int, stage: int, unit: int) -> int:
        at, k = stage * n + unit % n, unit // n
        if kind < 3:
            return prices[kind][at] * factors[kind][k]
        full = own.get(Kind.B)
        if full is None:
            return ticks(1, stage, unit) + ticks(2, stage, unit)
        return (prices[1][at] + prices[2][at]) * full[k]

    def change(kind: int, stage: int, unit: int) -> int:
        return changes[kind][stage * n + unit % n] * tokens[unit // n]

    return Tiny(devices, ticks, lambda unit: message * tokens[unit // n], change, caps, m * n, draw(KINDS), n), costs


@examples(120)
@given(problems())
def test_no_order_beats_the_bound(problem: tuple[Tiny, Costs]) -> None:
    tiny, costs = problem
    optimum, placement = shortest(tiny), Placement.from_devices(tiny.devices)
    m, n = tiny.m // tiny.slices, tiny.slices
    try:
        bound = lower_bound(placement, Units.equal(m, n), costs, tiny.caps, splits="I" in tiny.kinds)
    except UnsupportedError:
        assert optimum is None, "the bound refuses a cap that an order keeps"
    else:
        assert optimum is None or bound <= optimum * (1 + 1e-9)


@examples(60)
@given(data=st.data())
def test_no_order_of_any_placement_and_slices_beats_the_bound(data: st.DataObject) -> None:
    schedule = data.draw(random_schedules(max_slices=4) | random_schedules(max_slices=4, ragged=True))
    n = schedule.units.parts
    tokens = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    some = Costs(data.draw(PRICE), data.draw(PRICE), data.draw(PRICE), p2p=data.draw(PRICE))
    costs = slice_costs(some, schedule.placement, tokens, data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1)))
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule.placement, schedule.units, costs, timeline.peaks)
    assert bound <= timeline.makespan * (1 + 1e-9)
