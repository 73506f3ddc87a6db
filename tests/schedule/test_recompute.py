"""What runs again: what first under a cap, and when."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.features.offload.orders import OffloadPlan, plan_offload
from megatron_pipemem.features.recompute.orders import (
    recompute_plans,
    recompute_steps,
    recomputed_by_mode,
    with_early_recompute,
    with_recompute,
)
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import RECOMPUTE, Kind
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.validator import validate


def planned(schedule: Schedule, costs: Costs, cap: float | None = None) -> OffloadPlan:
    return plan_offload(schedule, costs, "off", cap)


def chosen(name: str, costs: Costs, cap: float, **settings: object) -> OffloadPlan:
    return choose(Request(name, MemoryCap(cap, False), **settings), Shape(4, None, 8), Knowledge(costs)).offload


def early_recompute(plan: OffloadPlan) -> OffloadPlan:
    return with_early_recompute(plan, lambda tried: tried.keeps_cap)


def test_selectively_recomputed_stages_hold_less_and_take_longer() -> None:
    base = build_schedule("1f1b", num_devices=4, num_microbatches=8)
    costs = Costs(recompute_selective=0.25)
    plans = {mode: next(recompute_plans(base, costs, mode, lambda s: planned(s, costs), lambda s: ())) for mode in
             ("none", "selective", "full")}  # fmt: skip
    # Of four microbatches in flight one is whole.
    assert plans["selective"].peaks[0] == 1 - 3 / 4 * SELECTIVE_BYTES
    spans = [plans[mode].makespan for mode in ("none", "selective", "full")]
    assert spans == sorted(spans) and len(set(spans)) == 3
    assert recomputed_by_mode(plans["selective"].schedule) == {"selective": [0, 1, 2, 3]}
    assert recomputed_by_mode(plans["full"].schedule) == {"full": [0, 1, 2, 3]}
    assert recomputed_by_mode(base) == {}


def test_what_is_cheap_for_its_memory_runs_again_first() -> None:
    base = build_schedule("interleaved", num_devices=2, num_microbatches=4)
    assert recompute_steps(base, Costs(), 0) == [(0, Kind.RS), (2, Kind.RS), (0, Kind.R), (2, Kind.R)], (
        "0 is longer held"
    )
    dear = Costs(recompute_selective=0.9)
    assert recompute_steps(base, dear, 0) == [(0, Kind.R), (2, Kind.R)], "all of a stage costs less for its memory"
    # A stage without layers has nothing to drop.
    empty = Costs(memory={Kind.F: (0, 1, 1, 1), Kind.R: (0, 1, 1, 1), Kind.B: (0, -2, -2, -2)})
    assert {stage for stage, _ in recompute_steps(base, empty, 0)} == {2}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half"])
def test_a_lower_cap_takes_no_less_recomputation(name: str) -> None:
    costs, before = Costs(), -1.0
    for cap in (1.5, 0.8, 0.65, 0.6, 0.5):
        plan = chosen(name, costs, cap, recompute="auto")
        assert plan.keeps_cap
        validate(plan.schedule, costs, cap)
        work = sum(plan.timeline.work)
        assert work >= before and (cap < 1.5 or not plan.schedule.recomputed)
        before = work


def test_computing_again_is_preferred_to_waiting_for_the_channel() -> None:
    costs = Costs(channel=Channel(6.0))
    waiting, mixed = (chosen("1f1b", costs, 0.65, offload="auto", recompute=mode) for mode in ("none", "auto"))
    assert waiting.keeps_cap and waiting.delay > 0 and mixed.keeps_cap
    assert mixed.makespan < waiting.makespan and Kind.RS in mixed.schedule.recomputed.values()


def test_a_search_recomputes_in_part_where_that_is_enough() -> None:
    options = {"placement": "linear", "seconds": 1, "effort": 0.02}
    plan = chosen("auto", Costs(), 0.7, options=options, recompute="auto")
    validate(plan.schedule, memory_cap=0.7)
    assert plan.keeps_cap and set(plan.schedule.recomputed.values()) <= {Kind.RS}


def test_what_runs_again_fills_a_wait() -> None:
    """Device 1 waits for 1F1 before it can go on to 1B0, and 1B0 for nobody: 1R0 may as well run in that wait."""
    text = "0F0,0F1,0B0,0B1\n1F0,1F1,1R0,1B0,1R1,1B1\n"
    plan = planned(Schedule.from_csv(text), Costs((4, 2), 1, 1), 2.0)
    early = early_recompute(plan)
    validate(early.schedule)
    assert [str(action) for action in early.schedule.orders[1]][:4] == ["1F0", "1R0", "1F1", "1B0"]
    assert early.makespan < plan.makespan
    # It holds its input and a whole microbatch while 1F1 runs; afterwards two inputs and a whole microbatch in any case.
    costs = Costs((4, 2), 1, 1, memory={Kind.F: (0, 0.1), Kind.R: 1, Kind.B: (0, -1.1)})
    assert early_recompute(planned(Schedule.from_csv(text), costs)).schedule == early.schedule
    assert with_early_recompute(plan, lambda tried: False) is plan


@examples(60)
@given(data=st.data())
def test_running_again_early_is_valid_never_slower_and_within_the_cap(data: st.DataObject) -> None:
    base = data.draw(random_schedules())
    again = data.draw(
        st.dictionaries(st.integers(0, base.num_stages - 1), st.sampled_from(sorted(RECOMPUTE)), min_size=1)
    )
    prices = data.draw(st.tuples(*[st.integers(1, 5)] * 4, st.integers(0, 3)))
    costs = Costs(*prices[:3], recompute_selective=prices[3] / 4, p2p=prices[4])
    plan = planned(with_recompute(base, again), costs)
    if data.draw(st.booleans()):
        plan = planned(plan.schedule, costs, max(plan.peaks))
    early = early_recompute(plan)
    validate(early.schedule, costs, plan.memory_cap)
    assert early.makespan <= plan.makespan and max(early.peaks) <= max(plan.peaks)
    moved = [(sorted(a), sorted(b)) for a, b in zip(plan.schedule.orders, early.schedule.orders, strict=True)]
    assert all(a == b for a, b in moved)
    for before, after in zip(plan.schedule.orders, early.schedule.orders, strict=True):
        assert [a for a in before if a.kind not in RECOMPUTE] == [a for a in after if a.kind not in RECOMPUTE]


def test_a_schedule_goes_to_other_processes() -> None:
    schedule = with_recompute(build_schedule("v-half", num_devices=2, num_microbatches=4), {0: Kind.R, 1: Kind.RS})
    assert schedule.recomputed == {0: Kind.R, 1: Kind.RS}
    validate(schedule)  # what it keeps for itself goes too
    assert pickle.loads(pickle.dumps(schedule)) == schedule
