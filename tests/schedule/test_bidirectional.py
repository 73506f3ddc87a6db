"""Two pipelines in opposite directions: the published orders, rates and peaks, and what a replica means."""

from __future__ import annotations

import oracle
import pytest
from promises import assert_correct
from refusals import refused

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate

NAMES = ("chimera", "gems", "dualpipe")


def build(name: str, p: int, m: int) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m)


def takes(name: str, p: int, m: int) -> bool:
    return name == "gems" or (p % 2 == 0 and (name == "chimera" or (m % 2 == 0 and m >= 2 * p)))


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
                if not all(each in end for each in needed):
                    break
                start = max([now[device], *(end[each] for each in needed)])
                now[device] = start + sum(seconds[kind] for kind, _, _ in unit)
                end |= {("B" if kind == "I" else str(kind), s, k): now[device] for kind, s, k in unit}
                done[device] += 1
                moved = True
    assert done == [len(row) for row in rows]
    return max(now), [sum(seconds[kind] for unit in row for kind, _, _ in unit) for row in rows]


# ----------------------------------------------------------------------------------------------------------- placement


def test_a_bidirectional_placement() -> None:
    placement = Placement.bidirectional(3)
    assert placement == Placement("bidirectional", (0, 1, 2, 2, 1, 0), replicas=2)
    assert (placement.num_stages, placement.model_stages, placement.num_chunks) == (6, 3, 2)
    assert [placement.next_stage(stage) for stage in range(6)] == [1, 2, None, 4, 5, None]
    assert [placement.previous_stage(stage) for stage in range(6)] == [None, 0, 1, None, 3, 4]
    assert [placement.replica_of(stage) for stage in range(6)] == [0, 0, 0, 1, 1, 1]
    assert Placement.from_devices((0, 1, 2, 2, 1, 0), 2) == placement
    assert Placement.from_devices((0, 1, 0, 1), 2).name == "custom"
    assert Placement.from_devices((0, 1, 1, 0)).name == "v"


def test_replicas_are_equally_long() -> None:
    with refused("bad-placement", 3, 2, kind=ScheduleError):
        Placement("custom", (0, 1, 0), replicas=2)


def test_costs_are_of_one_copy_of_the_model() -> None:
    """A device does either stage for half of the microbatches, so its work is that of a device of one pipeline."""
    placement = Placement.bidirectional(4)
    assert Costs(3, 2, 1).seconds(placement)[Kind.F] == (3,) * 8
    assert Costs((1, 2, 3, 4)).seconds(placement)[Kind.F] == (1, 2, 3, 4, 1, 2, 3, 4)
    assert Costs(tuple(range(8))).seconds(placement)[Kind.F] == tuple(range(8))
    assert Costs().memory_unit(placement) == 1 / 4
    for name in NAMES:
        assert simulate(build(name, 4, 8)).work == simulate(build("1f1b", 4, 8)).work


# -------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [2, 3, 4, 6, 7])
def test_every_number_of_microbatches(name: str, p: int) -> None:
    by_oracle = {1, p - 1, p, p + 1, 2 * p, 4 * p}
    for m in range(1, 4 * p + 2):
        if not takes(name, p, m):
            with refused("needs-devices" if p % 2 else "needs-microbatches", name, kind=UnsupportedError):
                build(name, p, m)
            continue
        schedule = build(name, p, m)
        validate(schedule)
        if m in by_oracle:
            assert_correct(schedule)
            assert max(oracle.peak(schedule)) * p <= {"chimera": p, "gems": 1, "dualpipe": p + 1}[name]


# ------------------------------------------------------------------------------------------------------ sums of copies


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
    assert [(each.action.stage, *each[1:]) for each in timeline.replica_reductions] == sums
    assert timeline.makespan == sums[-1][2]


def test_sums_on_one_device_and_of_nothing_take_no_time() -> None:
    costs = Costs(copy_sum=5)
    gems = simulate(build("gems", 3, 4), costs)
    assert [each.action.stage for each in gems.replica_reductions] == [2, 0], "both copies of stage 1 are on device 1"
    alone = simulate(build("chimera", 2, 1), costs)
    assert [(each.action.stage, each.end) for each in alone.replica_reductions] == [(1, 9), (0, 14)]
    assert simulate(build("chimera", 2, 2).forward_only(), costs).makespan == 2
    assert simulate(build("1f1b", 2, 2), costs).replica_reductions == ()


# ------------------------------------------------------------------------------------------------------------- Chimera


def test_chimera_on_four_devices() -> None:
    """F0 F1 F0' B0' F1' B1' B0 B1; the other direction's microbatches are 2 and 3, on stage 7."""
    assert " ".join(map(str, build("chimera", 4, 4).orders[0])) == "0F0 0F1 7F2 7B2 7F3 7B3 0B0 0B1"


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 3, 5])
def test_chimera_rates(p: int, units: int) -> None:
    n = units * p
    equal = simulate(build("chimera", p, n), Costs(1, 0.5, 0.5))
    assert equal.bubble_rate == pytest.approx((p - 2) / (2 * n + p - 2))
    double = simulate(build("chimera", p, n))
    assert double.makespan - double.ideal == (p - 2) * (2 + (units - 1))
    if units == 1:
        assert double.bubble_rate == pytest.approx((p - 2) / (1.5 * n + p - 2))
        for f, b in ((1, 3), (2, 3), (1, 1)):
            assert simulate(build("chimera", p, p), Costs(f, b, 0)).makespan == p * f + (2 * p - 2) * b
    assert min(equal.peaks) * p == p // 2 + 1
    assert max(equal.peaks) == 1


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


@pytest.mark.parametrize("doubling", ["yes", 1])
def test_doubling_is_true_or_false(doubling: object) -> None:
    with refused("bad-choice", doubling, kind=UnsupportedError):
        build_schedule("chimera", num_devices=4, num_microbatches=8, doubling=doubling)


# ---------------------------------------------------------------------------------------------------------------- GEMS


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_gems_period_and_rate(p: int) -> None:
    makespans = [simulate(build("gems", p, m), Costs(1, 1.5, 0.5)).makespan for m in (1, 2, 3, 9, 10)]
    period = p * 2 + 1
    assert makespans[0] == p * 3
    assert makespans[1] - makespans[0] == makespans[2] - makespans[1] == makespans[4] - makespans[3] == period
    assert 1 - 3 / period == pytest.approx((p - 1) / (p + 1 / 2)), "the published rate"
    timeline = simulate(build("gems", p, 10))
    assert timeline.makespan - timeline.ideal == (p - 1) * (1 + 10 * 2)
    assert timeline.peaks == (1 / p,) * p


# ------------------------------------------------------------------------------------------------------------ DualPipe


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
        makespan, work = overlapped(schedule)
        assert (makespan - 3 * m, set(work)) == (p - 2, {3 * m})
        timeline = simulate(schedule)
        assert timeline.makespan - timeline.ideal <= p - 2
        assert timeline.peaks == pytest.approx(((p + 1) / p,) * p)
