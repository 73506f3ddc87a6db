"""DualPipeV against the official figures, with results handed on early and late."""

from __future__ import annotations

import oracle
import pytest

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.dependencies import dependencies
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule

SLOTS = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}


def dualpipe_v(p: int, m: int) -> Schedule:
    return build_schedule("dualpipe-v", num_devices=p, num_microbatches=m)


def slots_with_late_release(schedule: Schedule) -> int:
    """Makespan when a forward and the backward after it are one unit, whose results are there when it ends.

    On the last device the first of these pairs is not joined.
    """
    fused = {action for order in schedule.orders for action in order if action.kind is Kind.B}
    units: list[list[list]] = []
    for device, order in enumerate(schedule.orders):
        units.append([])
        joined = 0
        for action in order:
            before = units[-1][-1] if units[-1] else [action]
            pair = action.kind is Kind.B and len(before) == 1 and before[0].kind is Kind.F
            joined += pair
            if pair and not (joined == 1 and device == schedule.num_devices - 1):
                before.append(action)
            else:
                units[-1].append([action])
    ends: dict = {}
    free = [0] * schedule.num_devices
    places = [0] * schedule.num_devices
    while any(place < len(units[device]) for device, place in enumerate(places)):
        for device, place in enumerate(places):
            if place == len(units[device]):
                continue
            unit = units[device][place]
            needed = [d for a in unit for d in dependencies(a, schedule.placement, fused) if d not in unit]
            if all(d in ends for d in needed):
                start = max([free[device], *(ends[d] for d in needed)])
                free[device] = start + sum(SLOTS[action.kind] for action in unit)
                ends |= dict.fromkeys(unit, free[device])
                places[device] += 1
    return max(free)


def test_official_figure() -> None:
    """66 slots of one chunk's pass, 60 of them busy on every device."""
    schedule = dualpipe_v(4, 10)
    assert slots_with_late_release(schedule) == 66
    assert [sum(SLOTS[action.kind] for action in order) for order in schedule.orders] == [60] * 4


@pytest.mark.parametrize("p", [2, 3, 4, 8, 13])
def test_bubble_and_peak_of_every_device(p: int) -> None:
    for m in (2 * p, 2 * p + 1, 4 * p):
        schedule = dualpipe_v(p, m)
        assert oracle.makespan(schedule, 2, 2, 2) == 6 * m + p - 1
        assert slots_with_late_release(schedule) == 6 * m + 2 * (p - 1)
        assert [peak * 2 * p for peak in oracle.peak(schedule)] == [2 * p + 1] * p


@pytest.mark.parametrize(("p", "m", "slots"), [(4, 8, 51), (8, 16, 103)])
def test_published_makespans(p: int, m: int, slots: int) -> None:
    assert oracle.makespan(dualpipe_v(p, m), 2, 2, 2) == slots


def test_most_backwards_stay_whole() -> None:
    for device, order in enumerate(dualpipe_v(4, 32).orders):
        assert sum(action.kind is Kind.I for action in order) == (3 - device) * 2 + device + 1
