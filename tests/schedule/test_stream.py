"""Consecutive steps without a barrier: their period, against published closed forms and steps simulated as one schedule."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.stream import draw_steps, family_window, steady, stream
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import search_schedule

SIZES = [(4, 4), (4, 8), (4, 16), (8, 16)]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-min"])
def test_schedules_whose_first_device_works_from_end_to_end_gain_nothing(name):
    assert [stream(build_schedule(name, num_devices=p, num_microbatches=m)).gain for p, m in SIZES] == [1] * len(SIZES)


@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[1] >= 2 * size[0]])
@pytest.mark.parametrize(("name", "part"), [("zbv", 6), ("zb-h2", 3)])
def test_zero_bubble_schedules_gain_what_their_closed_form_says(name, part, p, m):
    steps = stream(build_schedule(name, num_devices=p, num_microbatches=m))
    assert steps.gain == pytest.approx(1 + Fraction(p - 1, part * m))


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 2)])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_double_buffered_weights_save_the_drain_as_their_closed_form_says(p, m, forward, backward):
    costs = Costs(forward, backward / 2, backward / 2)
    steps = stream(build_schedule("pipedream-2bw", num_devices=p, num_microbatches=m), costs)
    assert steps.gain == pytest.approx(1 + (p - 1) * backward / (m * (forward + backward)))
    window = family_window("pipedream-2bw", p, m, steady(p, m))
    assert steps.synchronous == pytest.approx(window.simulate(costs).makespan)


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.2, 0.8, p2p=0.05), Costs(1.3, 0.9, 0.4, p2p=0.2)])
@pytest.mark.parametrize(
    ("name", "m", "options"),
    [
        ("pipedream-2bw", 4, {}),
        ("pipedream-2bw", 6, {}),
        ("pipedream", 2, {}),
        ("pipedream", 5, {"vertical_sync": True}),
    ],
)
def test_windows_follow_each_other_as_the_endless_schedule_runs(name, m, options, costs):
    one = simulate(build_schedule(name, num_devices=4, num_microbatches=m, **options), costs)
    found, drawn = stream(one.schedule, costs, steps=5), draw_steps(one, 5)
    assert drawn.schedule.orders == build_schedule("1f1b", num_devices=4, num_microbatches=5 * m).orders
    for device, (order, spans) in enumerate(zip(drawn.schedule.orders, drawn.spans, strict=True)):
        ends = {a.microbatch: end for a, (_, end) in zip(order, spans, strict=True) if a.kind is Kind.B}
        assert [ends[m * step + m - 1] for step in range(5)] == pytest.approx([each[device] for each in found.ends[:5]])


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.2, 0.8, p2p=0.05), Costs(1.3, 0.9, 0.4, p2p=0.2)])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h2", "zbv", "v-half", "dualpipe-v", "po-f", "seq1f1b"])
def test_steps_end_when_they_do_as_one_schedule(name, costs):
    one = simulate(build_schedule(name, num_devices=4, num_microbatches=8), costs)
    found = stream(one.schedule, costs, steps=3)
    drawn = draw_steps(one, 3)
    assert drawn.schedule.num_microbatches == 24
    for device, spans in enumerate(drawn.spans):
        count = len(one.spans[device])
        assert [spans[count * step - 1][1] for step in (1, 2, 3)] == pytest.approx(
            [ends[device] for ends in found.ends[:3]]
        )
    assert found.period <= found.synchronous + 1e-9 and found.synchronous == pytest.approx(one.makespan)


def test_tails_of_one_length_add_to_both_and_a_busy_device_hides_none_of_its_own():
    schedule = build_schedule("zbv", num_devices=4, num_microbatches=8)
    alone, even = stream(schedule), stream(schedule, tails=(2.0,) * 4)
    assert (even.period, even.synchronous) == (alone.period + 2, alone.synchronous + 2)
    uneven = stream(schedule, tails=(0.0, 2.0, 0.0, 0.0))
    assert uneven.period == even.period, "every device of zbv works all the time"
    assert alone.synchronous < uneven.synchronous < even.synchronous


@pytest.mark.parametrize(("placement", "period"), [(Placement.v_shape(8), 49), (Placement.linear(8), 51.4)])
def test_a_search_for_the_period_finds_steps_that_follow_each_other_sooner(placement, period):
    costs = Costs(1, 1.2, 0.8)
    size = {"num_devices": 8, "num_microbatches": 16, "placements": [placement], "effort": 0.2}
    one = search_schedule(**size, costs=costs)
    many = search_schedule(**size, costs=costs, period=True)
    assert many.makespan == stream(many.schedule, costs).period == pytest.approx(period)
    assert many.makespan < stream(one.schedule, costs).period < one.makespan <= simulate(many.schedule, costs).makespan
    assert many.lower_bound == pytest.approx(48), "what every device computes"


@examples(8)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.tuples(*(st.floats(0.3, 2),) * 3),
    st.sampled_from([0, 0.3, 2.0]),
    st.sampled_from([None, 1.5]),
)
def test_what_is_searched_for_its_period_is_valid_and_within_the_cap(p, m, prices, p2p, cap):
    costs = Costs(*prices, p2p=p2p)
    found = search_schedule(
        num_devices=p, num_microbatches=m, costs=costs, memory_cap=cap, max_chunks=3, effort=0.05, period=True
    )
    for each in found.candidates:
        validate(each.schedule, costs, cap)
        assert each.lower_bound <= each.makespan == pytest.approx(stream(each.schedule, costs).period)


def test_what_it_cannot_say_is_refused():
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    with refused("wrong-count", 1, 2, kind=CostsError):
        stream(schedule, tails=(1.0,))
    late = build_schedule("pipedream-2bw", num_devices=4, num_microbatches=8)
    for ask in (stream, lambda schedule: draw_steps(simulate(schedule), 2)):
        with refused("no-steps", kind=UnsupportedError):
            ask(Schedule.from_csv(late.to_csv()))
        with refused("needs-microbatches", kind=UnsupportedError):
            ask(build_schedule("pipedream-2bw", num_devices=4, num_microbatches=3))
    with refused("costs-mismatch", kind=CostsError):
        stream(late, Costs(microbatch=MicrobatchWeights((1.0,) * 8)))
    with refused("no-steps", kind=UnsupportedError):
        draw_steps(simulate(build_schedule("chimera", num_devices=2, num_microbatches=4)), 2)
    with refused("no-steps", kind=UnsupportedError):
        draw_steps(simulate(schedule, Costs(microbatch=MicrobatchWeights((1.0, 2.0, 1.0, 1.0)))), 2)
