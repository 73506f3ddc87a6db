"""Building blocks: repeating, reordering, squeezing, and what a block tells about its schedule."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lanes import examples
from promises import assert_correct
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.families import blocks
from megatron_pipemem.families.blocks import Block, Pass, build, repeat, squeeze
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units


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
    squeezed = squeeze("1f1b", [(repeat(block, 3 * p), 1)], block.placement, Units.equal(3 * p))
    assert squeezed.orders == build_schedule("1f1b", num_devices=p, num_microbatches=3 * p).orders


@pytest.mark.parametrize(
    ("stages", "interval", "starts", "fault"),
    [
        (1, 3, {("F", 0): 0, ("I", 0): 1, ("W", 0): 3}, ("slot-conflict", 0, 3)),
        (1, 3, {("F", 0): 0, ("B", 0): 2}, ("slot-conflict", 0, 3)),
        (2, 6, {("F", 0): 0, ("B", 0): 9, ("F", 1): 1, ("I", 1): 2}, ("missing-action", 1)),
        (2, 12, {**one_f_one_b(2).starts, ("F", 0): 7}, ("slot-conflict", 1, 0, 8)),
        (2, 12, {**one_f_one_b(2).starts, ("B", 1): 4}, ("slot-conflict", 0, 4, 1, 6)),
        (2, 12, {**one_f_one_b(2).starts, ("B", 1): 1}, ("slot-conflict", 1, 2)),
    ],
)
def test_a_block_is_complete_and_its_passes_neither_collide_nor_start_early(stages, interval, starts, fault) -> None:
    with refused(*fault, kind=ScheduleError):
        Block(
            Placement.linear(stages),
            interval,
            {Pass(Kind(kind), stage): slot for (kind, stage), slot in starts.items()},
        )


def test_weight_gradients_need_room() -> None:
    with refused("slot-conflict", 0, 2, kind=ScheduleError):
        Block.with_weight_gradients(Placement.linear(1), 2, {Pass(Kind.F, 0): 0, Pass(Kind.I, 0): 1})


@pytest.mark.parametrize("name", ["v-half", "v-min", "1f1b-v"])
@pytest.mark.parametrize(("p", "n"), [(1, 1), (3, 1), (4, 1), (8, 1), (3, 5), (4, 2)])
def test_long_steps_are_what_reordering_them_whole_would_give(
    name: str, p: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built() -> list[Schedule]:
        sizes = (3 * p + 4, 4 * p + 1, 7 * p + 3)
        return [build_schedule(name, num_devices=p, num_microbatches=m, slices=n) for m in sizes]

    extended = built()
    monkeypatch.setattr(blocks, "extend", lambda timetable, interval, num_microbatches: [(timetable, 1)])
    monkeypatch.setattr(Block, "length", 10**6)
    assert built() == extended


@examples(200)
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
    schedule = build("v", block, Units.equal(m), steady=steady)
    assert_correct(schedule)
    assert max(oracle.peak(schedule)) * 2 * p <= peak
