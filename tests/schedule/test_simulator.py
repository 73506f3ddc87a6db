"""When actions run, which activations are held, and which orders never end."""

from __future__ import annotations

from weakref import ref

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import NEVER, Dependencies, Graph, Times, needs_of
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate

SPLIT = Schedule.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")


def test_every_action_starts_as_soon_as_it_can() -> None:
    timeline = simulate(SPLIT, Costs(1, 2, 4, p2p=0.5))
    assert timeline.spans == (((0, 1), (5.0, 7.0), (7.0, 11.0)), ((1.5, 2.5), (2.5, 4.5), (4.5, 8.5)))
    assert timeline.makespan == 11
    assert timeline.work == (7, 7)
    assert timeline.ideal == 7
    assert timeline.bubble_rate == pytest.approx(1 - 7 / 11)
    assert timeline.messages == 2


def test_dependencies_of_the_last_schedules_are_kept_while_these_live() -> None:
    first, *others = (Schedule.from_csv("0F0,0B0\n") for _ in range(3))
    dependencies = Dependencies.of_schedule(first)
    assert Dependencies.of_schedule(first) is dependencies and Dependencies.of_schedule(others[0]) is not dependencies
    assert Dependencies.of_schedule(first, already={SPLIT.orders[0][0]}) is not dependencies
    gone = ref(dependencies)
    del first, dependencies
    assert gone() is None


def test_an_input_gradient_may_come_from_a_fused_or_a_split_backward() -> None:
    mixed = Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1B0,1F1,1I1,1W1\n")
    fused = {action for order in mixed.orders for action in order if action.kind is Kind.B}
    needs = {str(a): [str(n) for n in needs_of(a, mixed.placement, fused)] for order in mixed.orders for a in order}
    assert needs["0I0"] == ["0F0", "1B0"]
    assert needs["0I1"] == ["0F1", "1I1"]
    assert needs["1B0"] == ["1F0"]
    assert needs["0W0"] == ["0I0"]
    assert simulate(mixed).makespan == oracle.makespan(mixed, 1, 1, 1)


@examples(200)
@given(
    schedule=random_schedules() | random_schedules(max_replicas=2, max_slices=3, ragged=True),
    f=st.floats(0, 9),
    i=st.floats(0, 9),
    w=st.floats(0, 9),
    p2p=st.floats(0, 9),
)
def test_any_order_as_the_oracle_runs_it(schedule: Schedule, f: float, i: float, w: float, p2p: float) -> None:
    timeline = simulate(schedule, Costs(f, i, w, p2p))
    assert timeline.makespan == pytest.approx(oracle.makespan(schedule, f, i, w, p2p))
    assert timeline.peaks == pytest.approx([float(peak) for peak in oracle.peak(schedule)])
    assert timeline.bubble_rate >= -1e-9


def test_peaks_in_bytes_see_partial_release() -> None:
    bytes_of = Costs(memory={Kind.F: 100, Kind.I: -60, Kind.W: -40})
    early = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    late = Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n")
    assert simulate(early, bytes_of).peak == 140
    assert simulate(late, bytes_of).peak == 200


def test_an_order_that_waits_for_ever_is_named() -> None:
    stuck = Schedule.from_csv("0F0,0B0\n1B0,1F0\n")
    with refused("unmet-need", kind=ScheduleError) as raised:
        simulate(stuck)
    assert (raised.value.device, raised.value.position, raised.value.action) in ((0, 1, "0B0"), (1, 0, "1B0"))
    assert [(wait.device, str(wait.action), str(wait.needed)) for wait in raised.value.cycle] == [(1, "1B0", "1F0")]


Waits = list[list[tuple[int, int]]]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], Waits]:
    """Up to eight nodes in up to three lanes, with waits that may go round in circles, or for what never comes."""
    nodes = draw(st.permutations(range(draw(st.integers(1, 8)))))
    cuts = sorted(draw(st.lists(st.integers(0, len(nodes)), min_size=2, max_size=2)))
    lanes = [nodes[: cuts[0]], nodes[cuts[0] : cuts[1]], nodes[cuts[1] :]]
    needed = st.integers(0, len(nodes) - 1) | st.sampled_from([NEVER, 0])
    return lanes, [[(draw(needed), draw(st.integers(0, 1))) for _ in range(draw(st.integers(0, 2)))] for _ in nodes]


def plainly(lanes: list[list[int]], waits: Waits) -> set[int]:
    """The nodes that run: each when those before it in its lane, and all that it waits for, have."""
    ran: set[int] = set()
    for _ in waits:
        for lane in lanes:
            for at, node in enumerate(lane):
                if set(lane[:at]) | {needed for needed, _ in waits[node]} <= ran:
                    ran.add(node)
    return ran


@examples(60)
@given(graphs(), st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_a_walk_runs_what_can_run_and_nothing_before_what_it_waits_for(graph, seconds):
    lanes, waits = graph
    lags = [0, 3]
    graph = Graph(lanes, waits, range(len(waits)))
    nodes, reached, depths = graph.walk()
    assert set(nodes) == plainly(lanes, waits) and len(set(nodes)) == len(nodes)
    assert [lane[:count] for lane, count in zip(lanes, reached, strict=True)] == [
        [node for node in lane if node in nodes] for lane in lanes
    ]
    places = Times(graph, [1] * len(waits), [0, 0], zero=0)
    places.run(graph.steps(nodes))
    assert depths == places.ends
    place = {node: at for at, node in enumerate(nodes)}
    assert all(place[needed] < place[node] for node in nodes for needed, _ in waits[node])
    times = Times(graph, seconds, lags, zero=0)
    times.run(graph.steps(nodes))
    for lane in lanes:
        for before, node in zip([None, *lane], lane, strict=False):
            if node in place:
                free = [] if before is None else [times.ends[before]]
                assert times.starts[node] == max([0, *free, *(times.ends[n] + lags[link] for n, link in waits[node])])
                assert times.ends[node] == times.starts[node] + seconds[node]
    again = Times(graph, seconds, lags, zero=0)
    in_turn = []
    again.run((in_turn.append(step[0]), step)[1] for step in graph.steps(graph.by_urgency(again.start_of)))
    assert set(in_turn) == set(nodes) and again.starts == times.starts
    assert [again.starts[node] for node in in_turn] == sorted(again.starts[node] for node in in_turn)
