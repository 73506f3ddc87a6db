"""Plans of a step whose microbatches are not alike: what they keep, and how good they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from lanes import examples
from random_schedules import FAMILIES
from refusals import refused

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import step_plan
from megatron_pipemem.search.step_plan import Dispatcher, ManyOrders, StepPlan, plan_step

SYNCHRONOUS = sorted(name for name, family in FAMILIES.items() if not family.asynchronous)
PLAIN = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "1f1b-v", "dualpipe-v")


def long_tailed(m: int, seed: int = 0) -> MicrobatchWeights:
    """Weights of microbatches of one document each, whose lengths are log-normal; W is linear in tokens."""
    random = Random(seed)
    tokens = [random.lognormvariate(0, 0.8) for _ in range(m)]
    attention = [each + 0.2 * each**2 for each in tokens]
    return MicrobatchWeights(tuple(attention), tuple(tokens), {Kind.W: tuple(tokens)})


@st.composite
def unequal(draw: st.DrawFn, m: int) -> Costs:
    """Return costs with weights, some kinds with their own, and messages that may take time."""
    weights = st.lists(st.floats(0.1, 9), min_size=m, max_size=m)
    own = draw(st.dictionaries(st.sampled_from([Kind.F, Kind.W, Kind.B]), weights, max_size=2))
    each = MicrobatchWeights(draw(weights), draw(st.none() | weights), own)
    return Costs(1.0, 1.25, 0.75, p2p=draw(st.sampled_from([0.0, 0.125])), microbatch=each)


def built(name: str, p: int, m: int) -> Schedule:
    """Return a family's schedule; rejects the example where the family has none."""
    try:
        return build_schedule(name, num_devices=p, num_microbatches=m)
    except UnsupportedError:
        reject()


def check(plan: StepPlan, base: Schedule, costs: Costs, cap: MemoryCap | None) -> None:
    """Raise unless a plan is valid, within the cap, as fast as it says, and never slower than the base."""
    assert sorted(plan.order) == list(range(base.num_microbatches))
    assert plan.schedule.placement == base.placement
    by_position = replace(costs, microbatch=costs.microbatch.reordered(plan.order))
    caps = peaks(base, costs) if cap is None else cap.of(base.num_devices)
    validate(plan.schedule, by_position, caps)
    assert plan.makespan == simulate(plan.schedule, by_position).makespan
    assert plan.arrival_makespan == simulate(base, costs).makespan
    if all(held <= loosened(most) for held, most in zip(peaks(base, costs), caps, strict=True)):
        assert plan.makespan <= plan.arrival_makespan
    assert plan.bound <= plan.makespan * (1 + 1e-9)
    kinds = [{(a.kind, a.stage) for order in each.orders for a in order} for each in (plan.schedule, base)]
    if "dualpipe" not in base.name:  # has stages with backwards of both sorts
        assert kinds[0] == kinds[1]


@settings(max_examples=15)
@given(st.data())
def test_any_plan_is_valid_within_its_cap_and_never_slower(data):
    name = data.draw(st.sampled_from(PLAIN))
    base = built(name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7)))
    costs = data.draw(unequal(base.num_microbatches))
    cap = MemoryCap(max(peaks(base, costs)) * data.draw(st.floats(1, 2)), False) if data.draw(st.booleans()) else None
    check(plan_step(base, costs, cap, seconds=0.01), base, costs, cap)


@examples(20)
@given(st.data())
def test_many_orders_run_as_each_of_them_is_simulated(data):
    base = built(data.draw(st.sampled_from(SYNCHRONOUS)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    if data.draw(st.booleans()) and base.placement.replicas == base.slices == 1:
        base = (
            with_recompute(base, dict.fromkeys(range(base.num_devices), Kind.R))
            if data.draw(st.booleans())
            else with_vocabulary(base, 1)
        )
    costs = data.draw(unequal(base.num_microbatches))
    caps = [1.5] * base.num_devices
    orders = [data.draw(st.permutations(range(base.num_microbatches))) for _ in range(3)]
    makespans, excess = ManyOrders(base, costs, caps).try_all(orders)
    for order, makespan, over in zip(orders, makespans, excess, strict=True):
        by_position = replace(costs, microbatch=costs.microbatch.reordered(order))
        assert makespan == pytest.approx(simulate(base, by_position).makespan)
        assert over == pytest.approx(max(peaks(base, by_position)) / 1.5 - 1)


@settings(max_examples=15)
@given(st.data())
def test_dispatched_steps_end_when_they_say_and_keep_the_cap(data):
    base = built(data.draw(st.sampled_from(PLAIN)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7)))
    costs = data.draw(unequal(base.num_microbatches))
    tokens = costs.microbatch.tokens
    caps = [data.draw(st.floats(1, 4)) * max(tokens)] * base.num_devices
    order = tuple(data.draw(st.permutations(range(base.num_microbatches))))
    dispatcher = Dispatcher(base, costs, caps)
    found = dispatcher.run(order)
    assert found is not None, "a device that has room for one microbatch can always go on"
    by_position = replace(costs, microbatch=costs.microbatch.reordered(order))
    schedule = dispatcher.schedule(found)
    validate(schedule, by_position, caps)
    assert found.makespan == pytest.approx(simulate(schedule, by_position).makespan)


@pytest.mark.parametrize("seed", range(3))
def test_tiny_plans_are_the_best_there_are(seed, monkeypatch):
    """All orders of three microbatches, and all full-backward orders of two devices, in a cap of two of them."""
    monkeypatch.setattr(step_plan, "_KICKS", 6)
    p, m, costs = 2, 3, Costs(microbatch=long_tailed(3, seed))
    base = build_schedule("1f1b", num_devices=p, num_microbatches=m)
    cap = MemoryCap(max(peaks(base, costs)), False)
    ways = [way for way in product("FB", repeat=2 * m) if way.count("F") == m]
    ways = [way for way in ways if all(way[:at].count("F") >= way[:at].count("B") for at in range(2 * m))]
    best = float("inf")
    for order, *chosen in product(permutations(range(m)), ways, ways):
        actions = [
            tuple(Action(Kind(kind), device, way[:at].count(kind)) for at, kind in enumerate(way))
            for device, way in enumerate(chosen)
        ]
        schedule = replace(base, orders=tuple(actions))
        by_position = replace(costs, microbatch=costs.microbatch.reordered(order))
        if max(peaks(schedule, by_position)) <= loosened(cap.amount) and not Dependencies.of_schedule(schedule).stuck():
            best = min(best, simulate(schedule, by_position).makespan)
    assert plan_step(base, costs, cap, seconds=1).makespan == pytest.approx(best)


def test_an_order_that_rises_to_a_peak_beats_arrival_by_a_quarter_at_equal_memory():
    base = build_schedule("1f1b", num_devices=8, num_microbatches=32)
    costs = Costs(microbatch=long_tailed(32))
    cap = MemoryCap(max(peaks(base, costs)), False)
    plan = plan_step(base, costs, cap, seconds=0.2)
    check(plan, base, costs, cap)
    assert plan.arrival_makespan / plan.makespan > 1.25


def test_a_plan_that_time_does_not_end_is_always_the_same(monkeypatch):
    monkeypatch.setattr(step_plan, "_KICKS", 4)
    base = build_schedule("interleaved", num_devices=2, num_microbatches=4)
    costs = Costs(microbatch=long_tailed(4))
    assert plan_step(base, costs, seconds=60) == plan_step(base, costs, seconds=60)


@pytest.mark.parametrize("name", ["po-h", "chimera", "seq1f1b", "recomputed", "vocabulary", "forwards"])
def test_what_is_not_plain_keeps_its_actions_and_changes_the_order_alone(name):
    family = name if name in FAMILIES or name == "po-h" else "1f1b"
    base = build_schedule(family, num_devices=4, num_microbatches=8)
    if name == "recomputed":
        base = with_recompute(base, {0: Kind.R, 1: Kind.RS})
    elif name == "vocabulary":
        base = with_vocabulary(base, 2)
    elif name == "forwards":
        base = base.forward_only()
    costs = Costs(copy_sum=0.5, microbatch=long_tailed(8), channel=Channel(0.25))
    plan = plan_step(base, costs, seconds=0.1)
    check(plan, base, costs, None)
    if name != "forwards":
        assert plan.schedule.orders == base.orders
        assert plan.makespan < plan.arrival_makespan


def test_what_cannot_be_planned_is_refused():
    weights = MicrobatchWeights((1.0, 1.0, 1.0, 9.0))
    base = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    with refused("conflicting-features", kind=UnsupportedError):
        plan_step(build_schedule("pipedream", num_devices=2, num_microbatches=4), Costs())
    with refused("unit-mismatch", kind=UnsupportedError):
        plan_step(base, Costs(), MemoryCap(1e9, True))
    with refused("wrong-count", 3, 4, kind=CostsError):
        plan_step(base, Costs(microbatch=MicrobatchWeights((1.0, 2.0, 3.0))))
    with refused("cap-unreachable", kind=UnsupportedError):
        plan_step(base, Costs(microbatch=replace(weights, memory=weights.time)), MemoryCap(1.0, False))
