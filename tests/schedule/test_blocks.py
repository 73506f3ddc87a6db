"""Building blocks: repeating, reordering, squeezing, and what a block tells about its schedule."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.families import blocks
from megatron_pipemem.families.blocks import Block, Pass, build, extend, reorder, repeat, squeeze
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate


def one_f_one_b(p: int) -> Block:
    """The block of 1F1B in the paper's section 2."""
    starts = {Pass(Kind.F, r): r for r in range(p)} | {Pass(Kind.B, r): p + 2 * (p - 1 - r) for r in range(p)}
    return Block(Placement.linear(p), 3, starts)


def v_block(p: int, hop: int, turn: int) -> Block:
    """A V whose first forwards step ``hop`` slots per device; ``turn`` slots wait at the loss."""
    clock, starts = 0, {}
    for stage in range(2 * p):
        starts[Pass(Kind.F, stage)] = clock
        clock += hop if stage < p - 1 else 1
    clock += turn
    for stage in reversed(range(2 * p)):
        starts[Pass(Kind.I, stage)] = clock
        clock += hop if stage >= p + 1 else 1
    return Block.with_weight_gradients(Placement.v_shape(p), 6, starts)


def lifespan_bounds(block: Block) -> tuple[int, ...]:
    """Per device: a stage with lifespan ``l`` has at most ``ceil(l / interval)`` alive (arXiv 2405.15362, equation 1)."""
    return tuple(
        sum(-(-block.lifespan(stage) // block.interval) for stage in stages) for stages in block.placement.stages
    )


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_the_paper_example(p: int) -> None:
    block = one_f_one_b(p)
    assert [block.lifespan(r) for r in range(p)] == [3 * (p - r) for r in range(p)]
    assert lifespan_bounds(block) == block.peaks() == tuple(p - r for r in range(p))
    squeezed = squeeze("1f1b", repeat(block, 3 * p), block.placement, 3 * p)
    assert squeezed.orders == build_schedule("1f1b", num_devices=p, num_microbatches=3 * p).orders


def test_colliding_passes_are_refused() -> None:
    starts = {Pass(Kind.F, 0): 0, Pass(Kind.I, 0): 1, Pass(Kind.W, 0): 3}
    with refused("slot-conflict", 0, 3, kind=ScheduleError):
        Block(Placement.linear(1), 3, starts)
    Block(Placement.linear(1), 4, starts)


def test_a_full_backward_takes_two_slots() -> None:
    with refused("slot-conflict", 0, 3, kind=ScheduleError):
        Block(Placement.linear(1), 3, {Pass(Kind.F, 0): 0, Pass(Kind.B, 0): 2})


def test_a_block_must_be_complete() -> None:
    with refused("missing-action", 1, kind=ScheduleError):
        Block(Placement.linear(2), 6, {Pass(Kind.F, 0): 0, Pass(Kind.B, 0): 9, Pass(Kind.F, 1): 1, Pass(Kind.I, 1): 2})


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({Pass(Kind.F, 0): 7}, ("slot-conflict", 1, 0, 8)),
        ({Pass(Kind.B, 1): 4}, ("slot-conflict", 0, 4, 1, 6)),
        ({Pass(Kind.B, 1): 1}, ("slot-conflict", 1, 2)),
    ],
)
def test_a_block_must_respect_its_own_inputs(late: dict[Pass, int], message: str) -> None:
    with refused(*message, kind=ScheduleError):
        Block(Placement.linear(2), 12, {**one_f_one_b(2).starts, **late})


def test_weight_gradients_need_room() -> None:
    with refused("slot-conflict", 0, 2, kind=ScheduleError):
        Block.with_weight_gradients(Placement.linear(1), 2, {Pass(Kind.F, 0): 0, Pass(Kind.I, 0): 1})


def test_weight_gradients_take_the_vacant_slots() -> None:
    starts = {Pass(Kind.F, 0): 0, Pass(Kind.F, 1): 1, Pass(Kind.I, 1): 2, Pass(Kind.I, 0): 4}
    block = Block.with_weight_gradients(Placement.v_shape(1), 6, starts)
    assert block.starts[Pass(Kind.W, 1)] == 3
    assert block.starts[Pass(Kind.W, 0)] == 5


def test_repeat_is_sorted_and_complete() -> None:
    timetable = repeat(one_f_one_b(3), 4)
    assert timetable == sorted(timetable)
    assert [slot for slot, each in timetable if each == Pass(Kind.B, 1)] == [5, 8, 11, 14]


def test_squeeze_numbers_microbatches_and_assigns_weight_gradients() -> None:
    timetable = [(slot, Pass(Kind.F, slot)) for slot in (0, 1)] + [(5, Pass(Kind.I, 1)), (6, Pass(Kind.I, 0))]
    timetable += [(8, Pass(Kind.W, 0)), (9, Pass(Kind.W, 0))]
    schedule = squeeze("tiny", timetable, Placement.v_shape(1), 1)
    assert schedule.to_csv() == "0F0,1F0,1I0,0I0,1W0,0W0\n"
    assert oracle.check(schedule) == []


@pytest.mark.parametrize("name", ["v-half", "v-min", "1f1b-v"])
@pytest.mark.parametrize(("p", "n"), [*((p, 1) for p in (1, 2, 3, 4, 5, 8, 9, 12)), (2, 3), (3, 5), (4, 2), (8, 3)])
def test_long_steps_are_what_reordering_them_whole_would_give(
    name: str, p: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built() -> list[Schedule]:
        sizes = (3 * p + 4, 4 * p + 1, 7 * p + 3)
        return [build_schedule(name, num_devices=p, num_microbatches=m, slices=n) for m in sizes]

    extended = built()
    monkeypatch.setattr(blocks, "extend", lambda timetable, interval, num_microbatches: timetable)
    monkeypatch.setattr(Block, "length", 10**6)
    assert built() == extended


def test_extend_by_nothing_changes_nothing() -> None:
    timetable = repeat(one_f_one_b(3), 9)
    assert extend(timetable, 3, 0) == extend(timetable, 3, -5) == timetable
    assert extend(timetable, 3, 7) == repeat(one_f_one_b(3), 16)


@settings(max_examples=200, deadline=None)
@given(
    p=st.integers(1, 9),
    m=st.integers(1, 30),
    hop=st.integers(1, 5),
    turn=st.integers(0, 11),
    steady=st.booleans(),
)
def test_any_block_makes_a_correct_schedule(p: int, m: int, hop: int, turn: int, steady: bool) -> None:
    try:
        block = v_block(p, hop, turn)
    except ScheduleError:
        assume(False)
    peak = max(block.peaks())
    assert peak <= max(lifespan_bounds(block))
    schedule = build("v", block, m, steady=steady)
    assert oracle.check(schedule) == []
    assert oracle.disordered_weight_gradients(schedule) == []
    assert max(oracle.peak(schedule)) * 2 * p <= peak


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("p", [3, 4, 6, 9, 16])
def test_reordering_never_costs_time(name: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reordered = simulate(build_schedule(name, num_devices=p, num_microbatches=3 * p)).makespan
    monkeypatch.setattr(blocks, "reorder", lambda timetable, *_, **__: timetable)
    assert reordered <= simulate(build_schedule(name, num_devices=p, num_microbatches=3 * p)).makespan


@pytest.mark.parametrize(("p", "bubble"), [(4, 12), (6, 19), (8, 26), (16, 54)])
def test_v_half_without_reordering(p: int, bubble: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat and squeeze alone give 7p/2 - 2 for even p."""
    monkeypatch.setattr(blocks, "reorder", lambda timetable, *_, **__: timetable)
    schedule = build_schedule("v-half", num_devices=p, num_microbatches=3 * p)
    assert oracle.makespan(schedule, 2, 2, 2) - 18 * p == bubble


def test_reorder_keeps_a_given_peak() -> None:
    block = one_f_one_b(4)
    timetable = reorder(repeat(block, 12), block.placement, max(block.peaks()))
    assert max(oracle.peak(squeeze("x", timetable, block.placement, 12))) == 1
