"""Pairs of a forward and a backward that run together: their proof, prices, files, programs, and choice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.conflicts import make_request
from megatron_pipemem.errors import PipememError, ScheduleError
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import needs_of
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.search.two_lanes import TurnTimes, improved, lanes_of, simulated, turns_of
from megatron_pipemem.tools.report.terminal import TerminalTimeline
from megatron_pipemem.tools.report.timeline import DrawnRun

COSTS = Costs(1, 1.5, 0.5, p2p=0.02).with_exchanges(0.4)
FAMILIES = [family.name for family in families() if not (family.asynchronous or family.offloads or family.slices > 1)]
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 10))
OWN_BACKWARD = "0F0,(0F1;0B1)OVERLAP_F_B,0B0\n"


def built(name: str, p: int, m: int) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, costs=COSTS)


def built_nearby(name: str, p: int, m: int) -> Schedule:
    """Of the nearest size that the family has: bidirectional ones need an even p, and many microbatches."""
    with suppress(PipememError):
        return built(name, p, m)
    return built(name, p + p % 2, 4 * (p + p % 2))


def ends(schedule: Schedule) -> bool:
    """Whether all devices reach their ends if the two actions of a pair start together and end together."""
    done: set[Action] = set()
    fused = {action for order in schedule.orders for action in order if action.kind is Kind.B}
    at = [0] * schedule.num_devices
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(schedule.orders):
            run = order[at[device] : at[device] + 1]
            if schedule.pairs.intersection(run):
                run = order[at[device] : at[device] + 2]
            if run and all(done.issuperset(needs_of(action, schedule.placement, fused)) for action in run):
                done.update(run)
                at[device] += len(run)
                moved = True
    return all(reached == len(order) for reached, order in zip(at, schedule.orders, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
@examples(6)
@given(size=SIZES, share=st.sampled_from([0.1, 0.4, 0.7]))
def test_pairs_of_any_family_are_proved_shorten_the_step_and_travel(name, size, share):
    costs, alone = COSTS.with_exchanges(share), built_nearby(name, *size)
    timeline = with_pairs(alone, costs)
    paired = timeline.schedule
    assert (timeline.makespan < simulate(alone, costs).makespan) is bool(paired.pairs) and ends(paired)
    assert timeline.makespan >= simulate(alone, costs.of_computing(alone.placement)).makespan - 1e-9
    if paired.placement.replicas == 1:
        cap, splits = [peak * (1 + 1e-9) for peak in timeline.peaks], paired.splits_backward
        bound = lower_bound(paired.placement, paired.num_microbatches, costs, cap, splits=splits, pairs=True)
        assert bound <= timeline.makespan * (1 + 1e-9)
    for single_queue in (False, True):
        program = lower(paired, single_queue=single_queue, costs=costs)
        validate_program(program, single_queue=single_queue)
    assert run_single_queues(program, costs).makespan >= timeline.makespan - 1e-9
    back = Schedule.from_csv(paired.to_csv(), name=name)
    assert (back.orders, back.pairs) == (paired.orders, paired.pairs)


@examples(150)
@given(name=st.sampled_from(FAMILIES), size=SIZES, data=st.data())
def test_any_pairs_that_wait_in_a_circle_are_refused_and_no_others(name, size, data):
    schedule = built_nearby(name, *size)
    neighbours = [both for order in schedule.orders for both in pairwise(order)]
    fit = [a for a, b in neighbours if a.kind is Kind.F and b.kind in (Kind.I, Kind.B) and a[1:] != b[1:]]
    chosen = replace(schedule, pairs=frozenset(action for action in fit if data.draw(st.integers(0, 3))))
    if ends(chosen):
        validate_program(lower(chosen))
    else:
        with refused("deadlock", kind=ScheduleError):
            validate(chosen)


def test_documented_gains():
    """The page's table without pairs, and with 40 % in exchanges."""
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|([^\n]+)\|$", page, re.MULTILINE)
    costs = Costs().with_exchanges(0.4)
    for name, cells in rows:
        alone_peak, peak, without, _, _, _, with_40, _ = cells.replace("no pairs", "nan").split("|")
        alone = build_schedule(name, num_devices=8, num_microbatches=32, costs=costs)
        single, paired = simulate(alone, costs), with_pairs(alone, costs)
        assert (round(single.makespan, 1), round(paired.makespan, 1)) == (float(without), float(with_40)), name
        assert single.peak == pytest.approx(float(alone_peak), abs=0.006)
        if paired.schedule.pairs:
            assert paired.peak == pytest.approx(float(peak), abs=0.006)
    assert len(rows) == 8


def test_a_pair_takes_between_the_longer_action_and_the_sum():
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    for forward, backward, seconds in [(0, 0, 8), (2, 1, 5), (3, 3, 6), (0.25, 0.25, 7.5), (4, 0, 4)]:
        timeline = simulate(schedule, Costs(4, 3, 1, forward_exchange=forward, backward_exchange=backward))
        ((_, first, second, last),) = timeline.spans
        assert (second[1] - first[0], last[0]) == (seconds, second[1])
        # The last B is alone, and one of its two exchanges hides half of its W.
        assert timeline.ideal == timeline.makespan == 8 + seconds - min(backward, 1) / 2


@pytest.mark.parametrize(
    "text",
    [OWN_BACKWARD, "# slices=2\n0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "0F0,0F1,0B0,0B1\n"],
    ids=["own", "slices", "gone"],
)
def test_other_pairs_are_refused(text):
    schedule = Schedule.from_csv(text)
    with refused("bad-pair", kind=ScheduleError):
        validate(schedule if schedule.pairs else replace(schedule, pairs=frozenset({Action(Kind.F, 0, 7)})))


def test_a_program_may_put_nothing_between_the_actions_of_a_pair():
    program = lower(with_pairs(built("dualpipe-v", 4, 8), COSTS).schedule)
    (first, *_) = program.schedule.pairs
    device = program.placement.devices[first.stage]
    order = list(program.actions[device])
    at = order.index(first)
    order[at + 1], order[at + 2] = order[at + 2], order[at + 1]
    actions = (*program.actions[:device], tuple(order), *program.actions[device + 1 :])
    with refused("bad-pair", kind=ScheduleError):
        validate_program(Program(program.schedule, actions))


def test_a_choice_with_pairs_keeps_the_cap_and_assumes_exchanges_until_they_are_known():
    shape = Shape(4, None, 12)
    free = choose(make_request("zb-h2", pairs=True), shape, Knowledge())
    capped = choose(make_request("zb-h2", memory_cap=1.75, pairs=True), shape, Knowledge())
    assert free.schedule.pairs and free.costs.have_exchanges
    assert max(capped.timeline.peaks) <= 1.75
    with refused("conflicting-features"):
        make_request("zbv", pairs=True, offload="half")
    with refused("bad-pair", kind=ScheduleError):
        validate(with_recompute(free.schedule, {0: Kind.R}))


@pytest.mark.parametrize("cap", [1.2, 1.5])
def test_auto_is_as_fast_as_any_family_with_pairs_in_the_same_memory(cap):
    """Whatever their placement. Without pairs, a V is faster than the families that have most room for them."""
    asked = make_request("auto", memory_cap=cap, options={"seconds": 0.2}, pairs=True)
    chosen = choose(asked, Shape(4, 2, 12), Knowledge(COSTS)).timeline
    others = [with_pairs(built(name, 4, 12), COSTS) for name in ("interleaved", "zbv", "dualpipe-v")]
    fit = [timeline.makespan for timeline in others if timeline.peak <= cap]
    assert chosen.schedule.pairs and chosen.peak <= cap
    assert len(fit) == (3 if cap == 1.5 else 1) and chosen.makespan <= min(fit) + 1e-9


def test_exchanges_that_were_measured_as_none_make_no_pairs():
    costs = replace(COSTS, forward_exchange=(0.0,) * 8, backward_exchange=(0.0,) * 8)
    assert not choose(make_request("dualpipe-v", pairs=True), Shape(4, None, 12), Knowledge(costs)).schedule.pairs


def test_pictures_mark_pairs(capsys):
    timeline = with_pairs(built("dualpipe-v", 4, 8), COSTS)
    drawn = DrawnRun(timeline)
    assert len(drawn.pairs) == len(timeline.schedule.pairs) > 0
    assert all(first.end == second.start for first, second in drawn.pairs)
    from rich.console import Console

    console = Console(width=200, force_terminal=True)
    with console.capture() as seen:
        console.print(TerminalTimeline(timeline))
    assert "underlined: a pair" in seen.get() and "\x1b[4;" in seen.get()


def pieces(forward: float, backward: float, share: float, attention: float, layers: int) -> float:
    """Seconds of a pair in Megatron's order of pieces (``TransformerLayerSchedulePlan.run``), on two streams."""
    free = {"compute": 0.0, "exchange": 0.0}
    ready = {"F": 0.0, "B": 0.0}
    seconds = {
        (of, piece): whole * part / layers
        for of, whole in (("F", forward), ("B", backward))
        for piece, part in (
            ("exchange", share / 2), ("attention", (1 - share) * attention), ("experts", (1 - share) * (1 - attention)),
        )
    }  # fmt: skip
    order = "B exchange, F attention, B experts, F exchange, B exchange, F experts, F exchange, B attention"
    for of, piece in layers * [words.split() for words in order.split(", ")]:
        stream = "exchange" if piece == "exchange" else "compute"
        free[stream] = ready[of] = max(free[stream], ready[of]) + seconds[of, piece]
    return max(ready.values())


@given(st.floats(0, 0.6), st.floats(0.3, 0.6), st.floats(1, 2), st.integers(1, 8))
def test_the_price_of_a_pair_is_that_of_megatrons_order_of_pieces(share, attention, backward, layers):
    schedule = Schedule.from_csv("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1\n")
    costs = Costs(1, backward, 1).with_exchanges(share)
    (spans,) = simulate(schedule, costs).spans
    assert 1 - 1e-9 <= pieces(1, backward, share, attention, layers) / (spans[2][1] - spans[1][0]) <= 1.2 + 1e-9


SEARCH = """
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.search.two_lanes import improved
costs = Costs(1, 1.5, 0.5, p2p=0.02).with_exchanges(0.4)
start = with_pairs(build_schedule("dualpipe-v", num_devices=3, num_microbatches=6), costs).schedule
print(improved(start, costs, None, 60, effort=0.01).to_csv())
"""


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipe-v"])
def test_a_search_moves_actions_within_the_cap_as_the_simulator_prices_them(name):
    start = with_pairs(built(name, 3, 6), COSTS)
    result = improved(start.schedule, COSTS, start.peaks, 60, effort=0.03)
    timeline = simulate(result, COSTS)
    assert timeline.makespan < start.makespan and ends(result)
    assert all(peak <= cap * (1 + 1e-9) for peak, cap in zip(timeline.peaks, start.peaks, strict=True))
    lanes, turns = lanes_of(result, COSTS, start.peaks), turns_of(result)
    seconds = simulated(lanes, 6, turns, TurnTimes.of(turns, 6 * result.placement.num_stages))
    assert seconds == pytest.approx(timeline.makespan)
    for single_queue in (False, True):
        validate_program(lower(result, single_queue=single_queue, costs=COSTS), single_queue=single_queue)


def test_a_search_of_pairs_without_numba_finds_the_same():
    words = [sys.executable, "-c", SEARCH]
    rows = [
        subprocess.run(words, env=os.environ | {"NUMBA_DISABLE_JIT": off}, check=True, capture_output=True).stdout
        for off in "01"
    ]
    assert rows[0] == rows[1] and b"OVERLAP_F_B" in rows[0]
