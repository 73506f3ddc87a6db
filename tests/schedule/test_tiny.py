"""Bound, search and exactness against all orders of tiny problems: memory of every sign, any placement, caps per device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import tiny_oracle
from hypothesis import example, given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import placements
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import SearchResult, search_schedule
from megatron_pipemem.search.exact import solve
from megatron_pipemem.search.problem import better_full, make_problem


class Tiny(NamedTuple):
    """A problem of microbatches that are alike: per stage the ticks of F, I and W, and the changes of what is held."""

    devices: tuple[int, ...]
    m: int
    ticks: tuple[tuple[int, ...], ...]
    changes: tuple[tuple[int, ...], ...]
    caps: tuple[float, ...] | None = None
    lag: int = 0


# Output gradients are held between I and W.
TAKEN = Tiny(
    (0, 1, 0, 1), 1, ((2, 1, 3, 2), (4, 4, 2, 2), (4, 4, 4, 4)), ((3, 4, 1, 4), (1, 2, 1, -1), (-4, -6, -2, -3))
)


@st.composite
def problems(draw: st.DrawFn, odd: bool) -> Tiny:
    """Passes change what is held by anything, where they are odd; else a microbatch never holds less than nothing, and
    nothing in the end."""
    devices = draw(placements(max_devices=3, max_stages=4)).devices
    stages = len(devices)
    m = draw(st.integers(1, 3 if stages < 3 else 2))

    def per_stage(numbers: st.SearchStrategy[int]) -> tuple[int, ...]:
        return draw(st.tuples(*(numbers,) * stages))

    ticks = tuple(per_stage(st.integers(1, 4)) for _ in range(3))
    forwards, inputs = per_stage(st.integers(-2 if odd else 0, 4)), per_stage(st.integers(-4, 3))
    if odd:
        weights = per_stage(st.integers(-4, 4))
    else:
        inputs = tuple(max(-f, i) for f, i in zip(forwards, inputs, strict=True))
        weights = tuple(-f - i for f, i in zip(forwards, inputs, strict=True))
    caps = None
    if draw(st.integers(0, 4)):
        device_stages = Placement.from_devices(devices).stages
        room = [sum(max(0, forwards[s]) for s in held) for held in device_stages]
        caps = tuple(max(1, need + draw(st.integers(-1, 6))) for need in room)
    return Tiny(devices, m, ticks, (forwards, inputs, weights), caps, lag=draw(st.integers(0, 2)))


def shortest(tiny: Tiny, kinds: str = "FIWB") -> int | None:
    """The least makespan whose weight gradients are added in the order of microbatches; ``None`` if the caps are too low."""
    ticks = (*tiny.ticks, [i + w for i, w in zip(*tiny.ticks[1:], strict=True)])
    return tiny_oracle.shortest(
        tiny_oracle.Tiny(
            tiny.devices,
            lambda kind, stage, k: ticks[kind][stage],
            lambda k: tiny.lag,
            lambda kind, stage, k: tiny.changes[kind][stage],
            tiny.caps,
            tiny.m,
            kinds,
            in_order=True,
        )
    )


def terms(tiny: Tiny) -> tuple[Placement, Costs]:
    costs = Costs(*tiny.ticks, p2p=tiny.lag, memory=dict(zip("FIW", tiny.changes, strict=True)))
    return Placement.from_devices(tiny.devices), costs


def search(tiny: Tiny, effort: float = 0.1) -> SearchResult:
    placement, costs = terms(tiny)
    return search_schedule(
        num_devices=placement.num_devices,
        num_microbatches=tiny.m,
        costs=costs,
        memory_cap=tiny.caps,
        placements=[placement],
        seconds=600,
        effort=effort,
    )


def assert_bounded(tiny: Tiny, optimum: int | None) -> None:
    placement, costs = terms(tiny)
    try:
        bound = lower_bound(placement, tiny.m, costs, tiny.caps)
    except UnsupportedError:
        assert optimum is None, "the bound refuses a cap that an order keeps"
    else:
        assert optimum is None or bound <= optimum * (1 + 1e-9)


def assert_searched(tiny: Tiny, optimum: int | None) -> None:
    placement, costs = terms(tiny)
    try:
        result = search(tiny)
    except UnsupportedError as error:
        # One microbatch after another needs least, unless the memory of some pass is odd.
        odd = any(min(f, f + i) < 0 or f + i + w for f, i, w in zip(*tiny.changes, strict=True))
        assert optimum is None or (odd and "no schedule was found" in str(error))
        return
    assert optimum is not None, "the search breaks a cap, or the oracle is wrong"
    validate(result.schedule, costs, tiny.caps)
    assert result.makespan == simulate(result.schedule, costs).makespan >= optimum * (1 - 1e-9)
    assert result.lower_bound <= optimum * (1 + 1e-6)
    if tiny.caps is None or not better_full(placement, costs):
        assert result.is_optimal
    assert not result.is_optimal or result.makespan == pytest.approx(optimum, rel=1e-6)


@examples(150)
@given(tiny=st.booleans().flatmap(problems))
@example(tiny=TAKEN)
def test_no_order_beats_the_bound_or_keeps_a_cap_that_it_refuses(tiny: Tiny) -> None:
    assert_bounded(tiny, shortest(tiny))


@examples(40)
@given(tiny=st.booleans().flatmap(problems))
@example(tiny=TAKEN)
def test_what_is_found_is_within_the_caps_and_what_is_called_optimal_is(tiny: Tiny) -> None:
    assert_searched(tiny, shortest(tiny))


@examples(100)
@given(tiny=problems(odd=False))
def test_an_exact_search_without_a_first_order_finds_the_shortest_step(tiny: Tiny) -> None:
    placement, costs = terms(tiny)
    problem, optimum = make_problem(placement, Units.equal(tiny.m), costs, tiny.caps), shortest(tiny, "FIW")
    solved = solve(problem, 1000 * max(problem.ticks), 100_000)
    assert solved is not None and (solved.table is None) is (optimum is None)
    assert optimum is None or solved.table.makespan == pytest.approx(optimum * problem.ticks_per_second, rel=1e-6)


def test_stages_go_to_any_device_next() -> None:
    """Devices 1 and 2 are never neighbours on a microbatch's way."""
    tiny = Tiny((0, 2, 0, 1), 2, ((1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1)), ((1,) * 4, (0,) * 4, (-1,) * 4), (3, 2, 2))
    result = search(tiny)
    assert result.is_optimal and result.makespan == pytest.approx(shortest(tiny))
    many = search(tiny._replace(m=12))
    validate(many.schedule, terms(tiny)[1], tiny.caps)


def test_a_full_backward_keeps_a_cap_that_an_i_exceeds() -> None:
    tiny = Tiny((0, 1), 3, ((1, 1), (1, 1), (1, 1)), ((2, 2), (1, 1), (-3, -3)), (4, 2))
    result = search(tiny)
    assert shortest(tiny) is not None and shortest(tiny, "FIW") is None
    assert result.peaks == (4, 2)
    assert {a.kind for a in result.schedule.orders[1]} == {Kind.F, Kind.B}
    with refused("cap-unreachable", "1B", "2B", kind=UnsupportedError):
        search(tiny._replace(caps=(4, 1)))


def test_fractions_of_memory_add_up_to_nothing() -> None:
    """Rounding does not fill the cap in the course of many microbatches."""
    placement, m = Placement.linear(2), 500
    costs = Costs(memory={Kind.F: 0.7, Kind.I: -0.1 / 3, Kind.W: 0.1 / 3 - 0.7})
    result = search_schedule(
        num_devices=2, num_microbatches=m, costs=costs, memory_cap=0.7, placements=[placement], seconds=0
    )
    validate(result.schedule, costs, 0.7)
