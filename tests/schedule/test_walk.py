"""The walk along given orders, against the plainest way to do the same."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from megatron_pipemem.schedule.dependencies import NEVER, Graph, Times

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


@settings(max_examples=60, deadline=None)
@given(graphs(), st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_a_walk_runs_what_can_run_and_nothing_before_what_it_waits_for(graph, seconds):
    lanes, waits = graph
    lags = [0, 3]
    found = Graph(lanes, waits, range(len(waits)))
    nodes, reached = found.walk()
    assert set(nodes) == plainly(lanes, waits) and len(set(nodes)) == len(nodes)
    assert [lane[:count] for lane, count in zip(lanes, reached, strict=True)] == [
        [node for node in lane if node in nodes] for lane in lanes
    ]
    place = {node: at for at, node in enumerate(nodes)}
    assert all(place[needed] < place[node] for node in nodes for needed, _ in waits[node])
    times = Times(found, seconds, lags, zero=0)
    times.run(found.steps(nodes))
    for lane in lanes:
        for before, node in zip([None, *lane], lane, strict=False):
            if node in place:
                free = [] if before is None else [times.ends[before]]
                assert times.starts[node] == max([0, *free, *(times.ends[n] + lags[link] for n, link in waits[node])])
                assert times.ends[node] == times.starts[node] + seconds[node]
    again = Times(found, seconds, lags, zero=0)
    in_turn = []
    again.run((in_turn.append(step[0]), step)[1] for step in found.steps(found.by_urgency(again.start_of)))
    assert set(in_turn) == set(nodes) and again.starts == times.starts
    assert [again.starts[node] for node in in_turn] == sorted(again.starts[node] for node in in_turn)
