"""zb-auto: fits the order to costs and cap, and is never worse than the orders that are written down."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate

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


@settings(max_examples=60, deadline=None)
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
