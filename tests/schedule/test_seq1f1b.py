"""Slices of sequences: order, peaks, bubble, and what slices ask of one another."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
from refusals import refused

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


def build(p: int, m: int, n: int) -> Schedule:
    return build_schedule("seq1f1b", num_devices=p, num_microbatches=m, slices=n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("p", range(1, 17))
def test_every_number_of_microbatches(p: int, n: int) -> None:
    for m in range(1, 4 * p + 2):
        schedule = build(p, m, n)
        if m in (1, p - 1, p, 4 * p + 1) or p < 6:
            validate(schedule)
        if m in (1, p, p + 1):
            assert oracle.check(schedule) == []
            assert oracle.disordered_weight_gradients(schedule) == []
        held = [min(p - r - 1 + n, m * n) for r in range(p)]
        if m in (1, p):
            assert [peak * p * n for peak in oracle.peak(schedule)] == held
        for order, count in zip(schedule.orders, held, strict=True):
            assert [a.kind for a in order].index(Kind.B) == count, "warm-up and the first forward of the steady phase"


def test_order_on_the_last_device() -> None:
    """Two microbatches of two slices: 0 and 1, 2 and 3."""
    assert [" ".join(map(str, order)) for order in build(2, 2, 2).orders] == [
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2",
        "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 9), (8, 16)])
def test_one_slice_is_1f1b(p: int, m: int) -> None:
    schedule = build(p, m, 1)
    assert schedule.orders == build_schedule("1f1b", num_devices=p, num_microbatches=m).orders
    assert schedule.slices == 1


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (8, 3)])
def test_bubble_and_peak_shrink_with_the_slices(p: int, m: int, n: int) -> None:
    timeline = simulate(build(p, m, n))
    assert timeline.ideal == 3 * m
    assert timeline.makespan == pytest.approx(3 * m + 3 * (p - 1) / n)
    assert timeline.peak == pytest.approx(min(p - 1 + n, m * n) / (n * p))


def test_a_slice_costs_its_part_of_everything() -> None:
    schedule = build(2, 1, 2)
    bytes_of = Costs(4, 2, 2, p2p=1, memory={Kind.F: 100, Kind.B: -100})
    timeline = simulate(schedule, bytes_of)
    assert timeline.spans == (
        ((0, 2), (2, 4), (8.5 + 0.5, 11), (11, 13)),
        ((2.5, 4.5), (4.5, 6.5), (6.5, 8.5), (8.5, 10.5)),
    )
    assert timeline.peaks == (100, 100)
    validate(schedule, bytes_of, memory_cap=100)
    with refused("over-cap", 100, 99, kind=ScheduleError):
        validate(schedule, bytes_of, memory_cap=99)


@pytest.mark.parametrize(
    ("csv", "message"),
    [
        ("0F1,0F0,0B1,0B0", ("wrong-order", "0F1", "0F0", 1)),
        ("0F0,0F1,0B0,0B1", ("wrong-order", "0B0", "0B1", 3)),
        ("0F0,0I0,0F1,0I1,0W0,0W1", ("wrong-order", "0I0", "0I1", 3)),
        ("0F0,0B0,0F1,0B1", ("wrong-order", "0B0", "0B1", 3)),
        ("0F0,0F1,0I1,0I0,0W0,0W1", ("wrong-order", "0W0")),
        ("0F0,0F1,0B1,0B0,0F2", ("unknown-microbatch", "0F2", 2, 0, 1)),
        ("0F0,0F1,0B1", ("missing-action", "0F0", "0B0")),
    ],
)
def test_slices_wait_for_one_another(csv: str, message: str) -> None:
    schedule = replace(Schedule.from_csv(f"# slices=2\n{csv}\n"), num_microbatches=1)
    with refused(*message, kind=ScheduleError):
        validate(schedule)
    assert oracle.check(schedule) or oracle.disordered_weight_gradients(schedule)


def test_slices_may_split_their_backwards() -> None:
    validate(Schedule.from_csv("# slices=2\n0F0,0F1,0I1,0I0,0W1,0W0\n"))


@pytest.mark.parametrize("slices", [0, "2", 1.5, True])
def test_slices_are_whole_numbers(slices: object) -> None:
    with refused("bad-number", 1, kind=UnsupportedError):
        build_schedule("seq1f1b", num_devices=2, num_microbatches=2, slices=slices)
