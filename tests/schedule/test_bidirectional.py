"""Two pipelines in opposite directions: doubled and overlapped orders as published, and the sums over replicas.

test_families.py compares all bidirectional families with the oracle, and with their closed forms.
"""

from __future__ import annotations

import oracle
import pytest
from promises import assert_correct

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


def build(name: str, p: int, m: int) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m)


def run_units(rows: list[list[list[Action]]], p: int) -> tuple[float, list[float]]:
    """Makespan and work per device when some actions run as one unit: it takes the seconds of all, F = I = W = 1, and
    gives their results at its end."""
    seconds = {"F": 1, "I": 1, "W": 1, "B": 2}
    end: dict[tuple[str, int, int], float] = {}
    done, now, moved = [0] * p, [0.0] * p, True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            while done[device] < len(row):
                unit = row[done[device]]
                needed = [
                    (("F", s - 1, k) if kind == "F" else ("B", s + 1, k))
                    for kind, s, k in unit
                    if (kind == "F" and s % p) or (kind in "IB" and (s + 1) % p)
                ]
                if not end.keys() >= {*needed}:
                    break
                start = max([now[device], *(end[action] for action in needed)])
                now[device] = start + sum(seconds[kind] for kind, _, _ in unit)
                end |= {("B" if kind == "I" else str(kind), s, k): now[device] for kind, s, k in unit}
                done[device] += 1
                moved = True
    assert done == [len(row) for row in rows]
    return max(now), [sum(seconds[kind] for unit in row for kind, _, _ in unit) for row in rows]


def test_costs_are_of_one_copy_of_the_model() -> None:
    """A device does either stage for half of the microbatches, so its work is that of a device of one pipeline."""
    placement = Placement.bidirectional(4)
    assert Costs((1, 2, 3, 4)).seconds(placement)[Kind.F] == (1, 2, 3, 4, 1, 2, 3, 4)
    assert Costs(tuple(range(8))).seconds(placement)[Kind.F] == tuple(range(8))
    for name in ("chimera", "gems", "dualpipe"):
        assert simulate(build(name, 4, 8)).work == simulate(build("1f1b", 4, 8)).work


@pytest.mark.parametrize(
    ("seconds", "sums"),
    [
        (0, [(1, 4, 4), (0, 6, 6)]),
        (1, [(1, 4, 5), (0, 6, 7)]),  # the sum of stage 1 hides behind the last backward
        (3, [(1, 4, 7), (0, 7, 10)]),  # and here that of stage 0 waits for it
        ((1, 3), [(1, 4, 7), (0, 7, 8)]),
    ],
)
def test_sums_of_copies_have_a_price(seconds: float | tuple[float, ...], sums: list[tuple[int, float, float]]) -> None:
    """Of two microbatches on two devices, whose stages 1 have gradients at 4 and stages 0 at 6."""
    timeline = simulate(build("chimera", 2, 2), Costs(copy_sum=seconds))
    assert [(action.stage, *span) for action, *span in timeline.replica_reductions] == sums
    assert timeline.makespan == sums[-1][2]


def test_sums_on_one_device_and_of_nothing_take_no_time() -> None:
    costs = Costs(copy_sum=5)
    gems = simulate(build("gems", 3, 4), costs)
    assert [action.stage for action, *_ in gems.replica_reductions] == [2, 0], "both copies of stage 1 are on device 1"
    alone = simulate(build("chimera", 2, 1), costs)
    assert [(action.stage, end) for action, _, end in alone.replica_reductions] == [(1, 9), (0, 14)]
    assert simulate(build("chimera", 2, 2).forward_only(), costs).makespan == 2
    assert simulate(build("1f1b", 2, 2), costs).replica_reductions == ()


def test_chimera_on_four_devices() -> None:
    """F0 F1 F0' B0' F1' B1' B0 B1; the other direction's microbatches are 2 and 3, on stage 7."""
    schedule = build("chimera", 4, 4)
    assert " ".join(map(str, schedule.orders[0])) == "0F0 0F1 7F2 7B2 7F3 7B3 0B0 0B1"
    assert simulate(schedule).peaks == (0.75, 1, 1, 0.75)


def doubled(p: int, m: int) -> Schedule:
    return build_schedule("chimera", num_devices=p, num_microbatches=m, doubling=True)


@pytest.mark.parametrize("p", [2, 4, 6, 12])
def test_doubled_chimera_with_every_number_of_microbatches(p: int) -> None:
    for m in range(1, 6 * p + 2):
        schedule = doubled(p, m)
        validate(schedule)
        if m in (1, p - 1, p, p + 1, 2 * p + 1, 4 * p):
            assert_correct(schedule)
        assert max(oracle.peak(schedule)) <= 2


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_doubled_chimera_rates(p: int, units: int) -> None:
    """One bubble per step in place of one per unit, for twice the activations."""
    n = 2 * p * units
    schedule = doubled(p, n)
    # The paper's slots: as long as two forwards or one backward, three for two microbatches, p - 2 of them idle.
    pairs = [
        [[row[i], row[i + 1]] if row[i].kind is Kind.F else [row[i]] for i in range(len(row)) if not follows(row, i)]
        for row in schedule.orders
    ]
    assert run_units(pairs, p) == (2 * (3 * n // 2 + p - 2), [3 * n] * p)
    # A device passes on each of the two forwards when it ends.
    for f, b in ((1, 2), (2, 3), (1, 1), (1, 3)):
        timeline = simulate(schedule, Costs(f, b / 2, b / 2))
        between = (units - 1) * (p - 2) * max(0, b - 2 * f)
        assert timeline.makespan - timeline.ideal == (p // 2 - 1) * (f + b) + between
    single = simulate(build("chimera", p, n))
    timeline = simulate(schedule)
    assert single.makespan - single.ideal - (timeline.makespan - timeline.ideal) == (p // 2 - 1) * (4 * units - 1)
    assert (min(timeline.peaks) * p, max(timeline.peaks)) == (3 * p // 2 + 1, 2)


def follows(row: Order, position: int) -> bool:
    """Whether a forward is the second of its slot: of all units here, whole ones, an odd microbatch."""
    return row[position].kind is Kind.F and row[position].microbatch % 2 == 1


def overlapped(schedule: Schedule) -> tuple[float, list[float]]:
    """Makespan and work per device when a forward and the full backward behind it run as one unit.

    The middle devices run their very first pair apart.
    """
    p = schedule.num_devices
    rows: list[list[list[Action]]] = []
    for device, order in enumerate(schedule.orders):
        row: list[list[Action]] = []
        apart = device in (p // 2 - 1, p // 2)
        for action in order:
            is_pair = action.kind is Kind.B and [other.kind for other in row[-1]] == [Kind.F]
            if is_pair and not apart:
                row[-1].append(action)
            else:
                row.append([action])
            apart = apart and not is_pair
        rows.append(row)
    return run_units(rows, p)


def test_dualpipe_official_figure() -> None:
    assert overlapped(build("dualpipe", 8, 20)) == (66, [60] * 8)


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_dualpipe_bubble_and_peak(p: int) -> None:
    for m in (2 * p, 2 * p + 2, 4 * p):
        schedule = build("dualpipe", p, m)
        assert overlapped(schedule) == (3 * m + p - 2, [3 * m] * p)
        assert simulate(schedule).peaks == pytest.approx(((p + 1) / p,) * p)
