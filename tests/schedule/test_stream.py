"""Consecutive steps: their period without a barrier, and windows and versions of weights that change in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import oracle
import program_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program, Schedule, WeightUpdates, weight_uses
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.stream import (
    Moment,
    Window,
    _check_messages,
    _window_numbers,
    consecutive_steps,
    draw_steps,
    family_window,
    horizon,
    steady,
)
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import search_schedule

SIZES = [(4, 4), (4, 8), (4, 16), (8, 16)]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-min"])
def test_schedules_whose_first_device_works_from_end_to_end_gain_nothing(name):
    schedules = [build_schedule(name, num_devices=p, num_microbatches=m) for p, m in SIZES]
    assert [consecutive_steps(schedule).gain for schedule in schedules] == [1] * len(SIZES)


@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[1] >= 2 * size[0]])
@pytest.mark.parametrize(("name", "part"), [("zbv", 6), ("zb-h2", 3)])
def test_zero_bubble_schedules_gain_what_their_closed_form_says(name, part, p, m):
    steps = consecutive_steps(build_schedule(name, num_devices=p, num_microbatches=m))
    assert steps.gain == pytest.approx(1 + Fraction(p - 1, part * m))


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 2)])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_double_buffered_weights_save_the_drain_as_their_closed_form_says(p, m, forward, backward):
    costs = Costs(forward, backward / 2, backward / 2)
    steps = consecutive_steps(build_schedule("pipedream-2bw", num_devices=p, num_microbatches=m), costs)
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
    steps, drawn = consecutive_steps(one.schedule, costs, steps=5), draw_steps(one, 5)
    assert drawn.schedule.orders == build_schedule("1f1b", num_devices=4, num_microbatches=5 * m).orders
    for device, (order, spans) in enumerate(zip(drawn.schedule.orders, drawn.spans, strict=True)):
        ends = {a.microbatch: end for a, (_, end) in zip(order, spans, strict=True) if a.kind is Kind.B}
        assert [ends[m * step + m - 1] for step in range(5)] == pytest.approx(
            [step_ends[device] for step_ends in steps.ends[:5]]
        )


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.2, 0.8, p2p=0.05), Costs(1.3, 0.9, 0.4, p2p=0.2)])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h2", "zbv", "v-half", "dualpipe-v", "po-f", "seq1f1b"])
def test_steps_end_when_they_do_as_one_schedule(name, costs):
    one = simulate(build_schedule(name, num_devices=4, num_microbatches=8), costs)
    steps = consecutive_steps(one.schedule, costs, steps=3)
    drawn = draw_steps(one, 3)
    assert drawn.schedule.num_microbatches == 24
    for device, spans in enumerate(drawn.spans):
        count = len(one.spans[device])
        assert [spans[count * step - 1][1] for step in (1, 2, 3)] == pytest.approx(
            [ends[device] for ends in steps.ends[:3]]
        )
    assert steps.period <= steps.synchronous + 1e-9 and steps.synchronous == pytest.approx(one.makespan)


def test_tails_of_one_length_add_to_both_and_a_busy_device_hides_none_of_its_own():
    schedule = build_schedule("zbv", num_devices=4, num_microbatches=8)
    alone, even = consecutive_steps(schedule), consecutive_steps(schedule, tails=(2.0,) * 4)
    assert (even.period, even.synchronous) == (alone.period + 2, alone.synchronous + 2)
    uneven = consecutive_steps(schedule, tails=(0.0, 2.0, 0.0, 0.0))
    assert uneven.period == even.period, "every device of zbv works all the time"
    assert alone.synchronous < uneven.synchronous < even.synchronous


@pytest.mark.parametrize(("placement", "period"), [(Placement.v_shape(8), 49), (Placement.linear(8), 51.4)])
def test_a_search_for_the_period_finds_steps_that_follow_each_other_sooner(placement, period):
    costs = Costs(1, 1.2, 0.8)
    size = {"num_devices": 8, "num_microbatches": 16, "placements": [placement], "effort": 0.2}
    one = search_schedule(**size, costs=costs)
    many = search_schedule(**size, costs=costs, period=True)
    assert many.makespan == consecutive_steps(many.schedule, costs).period == pytest.approx(period)
    alone = consecutive_steps(one.schedule, costs).period
    assert many.makespan < alone < one.makespan <= simulate(many.schedule, costs).makespan
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
    result = search_schedule(
        num_devices=p, num_microbatches=m, costs=costs, memory_cap=cap, max_chunks=3, effort=0.05, period=True
    )
    for candidate in result.candidates:
        validate(candidate.schedule, costs, cap)
        period = consecutive_steps(candidate.schedule, costs).period
        assert candidate.lower_bound <= candidate.makespan == pytest.approx(period)


def test_what_it_cannot_say_is_refused():
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    with refused("wrong-count", 1, 2, kind=CostsError):
        consecutive_steps(schedule, tails=(1.0,))
    late = build_schedule("pipedream-2bw", num_devices=4, num_microbatches=8)
    for ask in (consecutive_steps, lambda schedule: draw_steps(simulate(schedule), 2)):
        with refused("no-steps", kind=UnsupportedError):
            ask(Schedule.from_csv(late.to_csv()))
        with refused("needs-microbatches", kind=UnsupportedError):
            ask(build_schedule("pipedream-2bw", num_devices=4, num_microbatches=3))
    with refused("costs-mismatch", kind=CostsError):
        consecutive_steps(late, Costs(microbatch=MicrobatchFactors((1.0,) * 8)))
    with refused("no-steps", kind=UnsupportedError):
        draw_steps(simulate(build_schedule("chimera", num_devices=2, num_microbatches=4)), 2)
    with refused("no-steps", kind=UnsupportedError):
        draw_steps(simulate(schedule, Costs(microbatch=MicrobatchFactors((1.0, 2.0, 1.0, 1.0)))), 2)


# -------------------------------------------------------------------------------------- windows and versions of weights


def cut(name: str, p: int, batch: int, moment: Moment) -> Window:
    if name == "vertical":
        return family_window("pipedream", p, batch, moment, vertical_sync=True)
    return family_window(name, p, batch, moment)


@st.composite
def runs(draw) -> tuple[str, int, int, int]:
    """A family, devices, microbatches per call, and calls."""
    name = draw(st.sampled_from(["pipedream-2bw", "pipedream", "vertical"]))
    p = draw(st.integers(2, 5))
    batch = draw(st.integers(p if name == "pipedream-2bw" else 1, p + 3))
    return name, p, batch, draw(st.integers(1, 6))


def windows_of(name: str, p: int, batch: int, calls: int, knows_the_end: bool = True) -> list[Window]:
    """As a training loop asks for them."""
    far, windows, done = horizon(p, batch), [], 0
    for call in range(calls):
        left = min(far, calls - 1 - call) if knows_the_end else far
        windows.append(cut(name, p, batch, Moment(min(call, far), done, left)))
        done = left
    return windows


@examples(40)
@given(runs())
def test_windows_in_turn_are_one_pipeline_over_all_batches(run):
    name, p, batch, calls = run
    have: list[set] = [set() for _ in range(p)]
    computed: list[list[Action]] = [[] for _ in range(p)]
    for call, window in enumerate(windows_of(name, p, batch, calls)):
        first = call * batch
        moved = [
            [a if a.microbatch is None else a._replace(microbatch=a.microbatch + first) for a in actions]
            for actions in window.actions
        ]
        assert program_oracle.undelivered(Program(window.stream, moved), have) == []
        for device, actions in enumerate(moved):
            own = [a for a in actions if a.kind in (Kind.F, Kind.B)]
            computed[device] += own
            backwards = {a.microbatch for a in own if a.kind is Kind.B}
            assert backwards == set(range(first, first + batch)), "a call runs the backwards of its own batch"
            assert own == [a._replace(microbatch=a.microbatch + first) for a in window.schedule.orders[device]]
            reductions = [Action(Kind.REDUCE_GRAD, device)] if name == "pipedream-2bw" else []
            assert (
                [a for a in actions if a.kind is Kind.REDUCE_GRAD]
                == reductions
                == actions[len(actions) - len(reductions) :]
            )
        forwards = {a.microbatch for a in moved[p - 1] if a.kind is Kind.F}
        assert forwards == set(range(first, first + batch)), "losses are of the own batch"
    whole = build_schedule("1f1b", num_devices=p, num_microbatches=calls * batch)
    assert tuple(map(tuple, computed)) == whole.orders


def due(name: str, p: int, batch: int, device: int, microbatch: int) -> int:
    """Which version the papers say, counted from the first."""
    if name == "pipedream-2bw":
        return max(0, microbatch // batch - 1)
    return max(0, microbatch - (p - 1 if name == "vertical" else p - 1 - device))


@examples(40)
@given(runs(), st.integers(0, 5))
def test_everybody_meets_the_weights_that_the_paper_says(run, cut_off):
    """Also when the run is broken off before some call, and goes on with the weights it had, but nothing in flight."""
    name, p, batch, calls = run
    far = horizon(p, batch)
    done, newest = 0, 0
    alive = [{0} for _ in range(p)]
    for call in range(calls):
        done = 0 if call == cut_off else done
        left = min(far, calls - 1 - call)
        window = cut(name, p, batch, Moment(min(call, far), done, left))
        done = left
        for device, actions in enumerate(window.actions):
            version = newest
            for action in actions:
                if action.kind in (Kind.F, Kind.B):
                    used = newest + window.versions[action]
                    assert used == due(name, p, batch, device, call * batch + action.microbatch)
                    assert used in alive[device], "the version is gone or not there yet"
                if action in window.updates:
                    needed = {newest + relative for relative in window.updates[action]}
                    assert needed <= alive[device]
                    version += 1
                    alive[device] = needed | {version}
                    assert len(alive[device]) <= window.versions_held[device]
            assert version == newest + window.updates_per_call
        newest += window.updates_per_call
    if calls > far + 1:
        assert tuple(map(len, alive)) <= window.versions_held


@pytest.mark.parametrize("name", ["pipedream-2bw", "pipedream"])
def test_between_steps_no_rank_waits_for_more_than_the_backwards(name):
    """A loop joins all ranks at the optimizer, so a step still ends with one backward through the pipeline."""
    timeline = cut(name, 4, 8, steady(4, 8)).simulate(Costs(2, 1, 2, p2p=0))
    assert timeline.makespan == 8 * 5 + 3 * 3
    assert timeline.ideal == 8 * 5
    assert timeline.peaks == pytest.approx((1, 0.75, 0.5, 0.25))
    assert cut(name, 4, 8, Moment(0, 0, 0)).simulate(Costs(2, 1, 2, p2p=0)).makespan == 8 * 5 + 3 * 5


def test_a_message_across_the_end_of_a_window_is_found():
    program = lower(build_schedule("1f1b", num_devices=3, num_microbatches=6))
    rows = program.actions
    number = {a: n for actions in rows for a, n in zip(actions, _window_numbers(actions, 3), strict=True)}
    _check_messages(program, number, 0)
    with refused("message-order", 1, 0, kind=ScheduleError):
        _check_messages(program, number | {Action(Kind.RECV_F, 1, 3): 1}, 0)


@pytest.mark.parametrize("single_queue", [False, True])
@given(runs())
@examples(20)
def test_the_past_is_what_the_windows_before_ran(single_queue: bool, run: tuple[str, int, int, int]) -> None:
    """In their order, too: what a device holds at most depends on it."""
    name, p, batch, _ = run
    far = horizon(p, batch)
    moments = [Moment(call, far if call else 0, far) for call in range(far + 1)]
    options = {"vertical_sync": True} if name == "vertical" else {}
    family = "pipedream" if name == "vertical" else name
    windows = [family_window(family, p, batch, moment, single_queue=single_queue, **options) for moment in moments]
    for device in range(p):
        ran = [
            action._replace(microbatch=action.microbatch - (far - call) * batch)
            for call, window in enumerate(windows[:-1])
            for action in window.actions[device]
            if action.kind is not Kind.REDUCE_GRAD
        ]
        assert list(windows[-1].past[device]) == ran


# ------------------------------------------------------------------------------------------------------------- versions


def weight_versions(schedule: Schedule) -> dict[Action, int]:
    """Return the version of its stage's weights that every action uses."""
    return {use.action: use.version for use in weight_uses(schedule)}


def build(name: str, p: int, m: int, **options: object) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, **options)


VERSIONS = [
    # Family and options, the version that the paper's formula gives a microbatch, and the versions kept per device.
    ("pipedream", {}, lambda p, stage, microbatch: microbatch - (p - stage - 1), lambda p, device: p - device),
    # w(t+1) = w(t) - lr * gradient(w(t-p+1)), the same t on every stage.
    ("pipedream", {"vertical_sync": True}, lambda p, stage, microbatch: microbatch - p + 1, lambda p, device: p),
    # W(t+1) = W(t) - lr * gradient(W(t-1)), on every stage.
    *(
        ("pipedream-2bw", {"update_every": every}, lambda p, s, k, every=every: k // every - 1, lambda p, device: 2)
        for every in (8, 11)
    ),
]


@pytest.mark.parametrize(("name", "options", "version", "kept"), VERSIONS)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_versions_of_the_papers(
    name: str, options: dict[str, object], version: Callable, kept: Callable, p: int
) -> None:
    schedule = build(name, p, 45, **options)
    validate(schedule)
    for action, used in weight_versions(schedule).items():
        assert used == max(0, version(p, action.stage, action.microbatch)), "F and B alike"
    timeline = simulate(schedule)
    assert list(timeline.weight_versions) == [kept(p, device) for device in range(p)] == oracle.versions_kept(schedule)


@examples(150)
@given(
    random_schedules(max_microbatches=6, max_slices=2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(0, 3),
)
def test_as_the_oracle_sees_it(schedule: Schedule, every: int, kept: int, delay: int | None) -> None:
    schedule = replace(schedule, updates=WeightUpdates(every, kept, delay))
    versions = {(a.kind.value, a.stage, a.microbatch): v for a, v in weight_versions(schedule).items()}
    assert versions == oracle.versions(schedule)
    if oracle.lost_versions(schedule):
        with refused("weight-version", kind=ScheduleError):
            validate(schedule)
    else:
        validate(schedule)
        assert list(simulate(schedule).weight_versions) == oracle.versions_kept(schedule)


@pytest.mark.parametrize("updates", [WeightUpdates(0, 1), WeightUpdates(1, 0), WeightUpdates(1, 1, -1)])
def test_updates_that_make_no_sense(updates: WeightUpdates) -> None:
    with refused("bad-number", 1, 0, kind=ScheduleError):
        validate(replace(build("1f1b", 2, 2), updates=updates))


def test_synchronous_schedules_use_one_version() -> None:
    for family in families():
        if not family.asynchronous:
            assert simulate(family.schedule(6, 24, {})).weight_versions == (1,) * 6


def test_evaluation_updates_nothing() -> None:
    schedule = build("pipedream", 4, 8).forward_only()
    assert schedule.updates is None
    assert {action.kind for order in schedule.orders for action in order} == {Kind.F}
