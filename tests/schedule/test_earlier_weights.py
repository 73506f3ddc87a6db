"""W run earlier only as far as bytes need, and the result is a schedule of the same step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import oracle
from hypothesis import assume, given
from hypothesis import strategies as st
from random_schedules import FAMILIES, build_or_skip

from megatron_pipemem.choose.choice import EARLIER_WEIGHTS, choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.baseline import bytes_of_1f1b
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.schedule.validator import validate

SPLIT = [name for name, family in FAMILIES.items() if family.splits_backward]


def costs_of(saved: list[float], after_input: list[float]) -> Costs:
    """Bytes per stage after F, and from I to W."""
    at_input = tuple(waits - kept for kept, waits in zip(saved, after_input, strict=True))
    return Costs(memory={Kind.F: tuple(saved), Kind.I: at_input, Kind.W: tuple(-waits for waits in after_input)})


def whole_backwards(schedule: Schedule) -> Schedule:
    """The schedule with each W right after its I."""
    orders = []
    for order in schedule.orders:
        passes = [[action] for action in order if action.kind is not Kind.W]
        for items in passes:
            if items[0].kind is Kind.I:
                items.append(items[0]._replace(kind=Kind.W))
        orders.append(tuple(action for items in passes for action in items))
    return replace(schedule, orders=tuple(orders))


def test_the_head_of_four_ranks_lets_fewer_microbatches_wait():
    """A layer's share is 8 bytes after F and before W, and the head adds 4 after F: 4 microbatches wait beside its logits."""
    schedule = build_schedule("zb-h1", num_devices=4, num_microbatches=8)
    costs = costs_of([8, 8, 8, 12], [8, 8, 8, 8])
    moved = with_earlier_weights(schedule, costs)
    assert peaks(schedule, costs) == (32, 32, 32, 36) and peaks(moved, costs) == (32, 32, 32, 28)
    assert moved.orders[:3] == schedule.orders[:3]
    text = " ".join(f"{action.kind}{action.microbatch}" for action in moved.orders[3])
    assert text.startswith("F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3")
    assert text.endswith("F7 I7 W5 W6 W7")


@given(st.sampled_from(SPLIT), st.integers(2, 4), st.integers(1, 9), st.data())
def test_no_device_holds_more_than_one_of_1f1b_or_than_whole_backwards_need(name, devices, microbatches, data):
    slices = {"slices": data.draw(st.integers(1, 3))} if "slices" in FAMILIES[name].options else {}
    schedule = build_or_skip(name, devices, microbatches, **slices)
    placement, sizes = schedule.placement, st.integers(1, 20)
    count = placement.model_stages
    saved, after_input = (data.draw(st.lists(sizes, min_size=count, max_size=count)) for _ in range(2))
    costs = costs_of(saved, after_input)
    whole = bytes_of_1f1b(costs, placement, schedule.units)
    assume(whole is not None)
    moved = with_earlier_weights(schedule, costs)
    validate(moved)
    assert oracle.check(moved) == [] and oracle.disordered_weight_gradients(moved) == []
    assert [*map(Counter, moved.orders)] == [*map(Counter, schedule.orders)]
    before, after = peaks(schedule, costs), peaks(moved, costs)
    limit = max(whole, *peaks(whole_backwards(schedule), costs))
    assert max(after) <= limit * (1 + 1e-9)
    assert all(new <= old * (1 + 1e-9) for new, old in zip(after, before, strict=True))
    if max(before) <= limit:
        assert moved is schedule
    for old, new in zip(schedule.orders, moved.orders, strict=True):
        assert [a for a in new if a.kind is not Kind.W] == [a for a in old if a.kind is not Kind.W]
        assert all(others_before(a, new) <= others_before(a, old) for a in new if a.kind is Kind.W)


def others_before(weight: Action, order: tuple[Action, ...]) -> int:
    return sum(action.kind is not Kind.W for action in order[: order.index(weight)])


def test_a_schedule_without_bytes_or_with_other_actions_stays():
    costs = costs_of([8, 8, 8, 12], [8, 8, 8, 8])
    schedule = build_schedule("zb-h1", num_devices=4, num_microbatches=8)
    assert with_earlier_weights(schedule, Costs()) is schedule
    paired = replace(schedule, pairs=frozenset({schedule.orders[3][2]}))
    for other in (build_schedule("1f1b", num_devices=4, num_microbatches=8), paired):
        assert with_earlier_weights(other, costs) is other
    split = build_schedule("po-h", num_devices=4, num_microbatches=8)
    assert with_earlier_weights(split, costs_of([8] * 8, [8] * 8)) is split


def test_a_longer_step_repeats_the_rhythm():
    """A planner extends short steps: the last rank's middle is F, I, W in turn for any number of microbatches."""
    costs = costs_of([8, 8, 8, 12], [8, 8, 8, 8])
    few, many = (
        with_earlier_weights(build_schedule("zb-h1", num_devices=4, num_microbatches=m), costs) for m in (12, 40)
    )
    assert peaks(few, costs) == peaks(many, costs)
    assert [a.kind for a in few.orders[3][:20]] == [a.kind for a in many.orders[3][:20]]
    assert [a.kind for a in few.orders[3][-12:]] == [a.kind for a in many.orders[3][-12:]]


def test_the_slices_of_a_head_wait_for_each_other_less():
    schedule = build_schedule("zb-h1", num_devices=4, num_microbatches=8, slices=2)
    costs = costs_of([8, 8, 8, 24], [8, 8, 8, 8])
    whole = bytes_of_1f1b(costs, schedule.placement, schedule.units)
    moved = with_earlier_weights(schedule, costs)
    assert max(peaks(schedule, costs)) > whole >= max(peaks(moved, costs))


PREDICTED = costs_of([8, 8, 8, 12], [8, 8, 8, 8]).memory
KNOWN = Knowledge(is_measuring=True, predicted_bytes=PREDICTED)
SHAPE = Shape(4, 1, 8)


def test_a_run_moves_w_of_a_named_schedule_by_its_predicted_bytes():
    schedule = build_schedule("zb-h1", num_devices=4, num_microbatches=8)
    chosen = choose(Request("zb-h1"), SHAPE, KNOWN)
    assert (
        chosen.schedule == with_earlier_weights(schedule, Costs(memory=PREDICTED)) and chosen.notes == EARLIER_WEIGHTS
    )
    kept = choose(Request("zb-h1"), SHAPE, replace(KNOWN, predicted_bytes=None))
    assert kept.schedule == schedule and not kept.notes
    stages = costs_of([4] * 8, [4] * 8).memory
    v_half = choose(Request("v-half"), Shape(4, 2, 8), replace(KNOWN, predicted_bytes=stages))
    assert not v_half.notes and v_half.schedule == build_schedule("v-half", num_devices=4, num_microbatches=8)


def test_files_cut_heads_and_runs_that_free_memory_otherwise_keep_every_w():
    schedule = build_schedule("zb-h1", num_devices=4, num_microbatches=8)
    assert choose(Request("mine.csv", file=schedule), SHAPE, KNOWN).schedule is schedule
    cut = choose(Request("zb-h1", vocab_cut="2").decided(1), SHAPE, KNOWN)
    assert cut.schedule == choose(Request("zb-h1", vocab_cut="2").decided(1), SHAPE, Knowledge()).schedule
    again = Request("zb-h1", recompute="full")
    known = replace(KNOWN, costs=Costs(memory=PREDICTED))
    assert choose(again, SHAPE, known).schedule == choose(again, SHAPE, replace(known, predicted_bytes=None)).schedule
