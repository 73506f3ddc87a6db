"""Windows of a pipeline that is never flushed: put one behind the other, they are 1F1B over all batches."""

from __future__ import annotations

import program_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.stream import (
    Moment,
    Window,
    _check_messages,
    _window_numbers,
    family_window,
    horizon,
    steady,
)


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
    far, found, done = horizon(p, batch), [], 0
    for call in range(calls):
        left = min(far, calls - 1 - call) if knows_the_end else far
        found.append(cut(name, p, batch, Moment(min(call, far), done, left)))
        done = left
    return found


@examples(40)
@given(runs())
def test_windows_in_turn_are_one_pipeline_over_all_batches(run):
    name, p, batch, calls = run
    have: list[set] = [set() for _ in range(p)]
    computed: list[list[Action]] = [[] for _ in range(p)]
    for call, each in enumerate(windows_of(name, p, batch, calls)):
        first = call * batch
        moved = [
            [a if a.microbatch is None else a._replace(microbatch=a.microbatch + first) for a in actions]
            for actions in each.actions
        ]
        assert program_oracle.undelivered(Program(each.stream, moved), have) == []
        for device, actions in enumerate(moved):
            own = [a for a in actions if a.kind in (Kind.F, Kind.B)]
            computed[device] += own
            backwards = {a.microbatch for a in own if a.kind is Kind.B}
            assert backwards == set(range(first, first + batch)), "a call runs the backwards of its own batch"
            assert own == [a._replace(microbatch=a.microbatch + first) for a in each.schedule.orders[device]]
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
        each = cut(name, p, batch, Moment(min(call, far), done, left))
        done = left
        for device, actions in enumerate(each.actions):
            version = newest
            for action in actions:
                if action.kind in (Kind.F, Kind.B):
                    used = newest + each.versions[action]
                    assert used == due(name, p, batch, device, call * batch + action.microbatch)
                    assert used in alive[device], "the version is gone or not there yet"
                if action in each.updates:
                    needed = {newest + relative for relative in each.updates[action]}
                    assert needed <= alive[device]
                    version += 1
                    alive[device] = needed | {version}
                    assert len(alive[device]) <= each.versions_held[device]
            assert version == newest + each.updates_per_call
        newest += each.updates_per_call
    if calls > far + 1:
        assert tuple(map(len, alive)) <= each.versions_held


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
