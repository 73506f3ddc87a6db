"""All schedules by memory and bubble: what is dominated, and what none of them can beat."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples

from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.planner.pareto import bound_line, choices, dominated, trades, useful_caps


@pytest.mark.parametrize(("p", "m", "costs"), [(2, 6, (1, 1.5, 0.5)), (4, 8, (1, 1, 1))])
def test_pareto_choices_are_not_dominated(p: int, m: int, costs: tuple[float, float, float]) -> None:
    compared = choices(p, m, Costs(*costs), [0.5, 1.0], max_chunks=2)
    front = []
    for (choice, _), is_dominated in zip(compared, dominated(compared), strict=True):
        better = [
            other
            for other, _ in compared
            if other.peak <= choice.peak and other.makespan <= choice.makespan
            and (other.peak, other.makespan) != (choice.peak, choice.makespan)
        ]  # fmt: skip
        assert is_dominated or not better
        front += [] if is_dominated else [choice]
    assert [choice.peak for choice in front] == sorted(choice.peak for choice in front)
    assert [choice.makespan for choice in front] == sorted((choice.makespan for choice in front), reverse=True)
    assert trades(compared)
    assert all(less in front and more.bubble_rate < less.bubble_rate for less, more in trades(compared))


@examples(6)
@given(
    p=st.integers(1, 4),
    m=st.integers(1, 7),
    costs=st.builds(Costs, *[st.sampled_from([0.5, 1, 1.5])] * 3, p2p=st.sampled_from([0, 0.25])),
    barriers=st.sampled_from([(0,), (0, 1, 2)]),
)
def test_no_choice_is_below_the_line_of_bounds(p, m, costs, barriers) -> None:
    timelines = [timeline for timeline, _ in choices(p, m, costs, barriers=barriers, max_chunks=4)]
    line = bound_line(timelines, costs, levels=5)
    assert [rate for _, rate in line] == sorted((rate for _, rate in line), reverse=True)
    assert all(0 <= rate < 1 for _, rate in line)
    levels = dict(line)
    work = min(choice.makespan * (1 - choice.bubble_rate) for choice in timelines)
    assert all(1 - work / choice.makespan >= levels[choice.peak] - 1e-9 for choice in timelines)


def test_the_line_of_bounds_is_lower_bound() -> None:
    """Recomputed forwards are no work of these schedules: counted as such they made it .2552, -.0921 and -.2343."""
    costs, v = Costs(1, 1.5, 0.5), Placement.v_shape(8)
    timelines = [timeline for timeline, _ in choices(8, 24, costs, max_chunks=2) if timeline.schedule.placement == v]
    line = bound_line(timelines, costs, levels=8)
    for cap, rate in line:
        assert rate == pytest.approx(1 - 24 * 3 / lower_bound(v, 24, costs, cap))
    assert line[0][1] > 0.1 > line[-1][1] > 0.04


def test_orders_that_the_bound_does_not_know_have_none() -> None:
    ((plain, _), *_) = choices(2, 4, max_chunks=1)
    assert bound_line([plain], levels=1)[0][1] > 0
    full = Schedule.from_csv("0F0,0R0,0B0,0F1,0R1,0B1\n1F0,1R0,1B0,1F1,1R1,1B1")
    assert bound_line([replace(plain, schedule=full)], levels=1)[0][1] == 0


def test_useful_caps_are_whole_stages() -> None:
    assert useful_caps(2) == [0.5, 0.75, 1.0]
    caps = useful_caps(64)
    assert caps[0] == 0.25 and caps[-1] == 1.0 and all(float(cap * 128).is_integer() for cap in caps)
