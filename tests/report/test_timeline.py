"""What all pictures share: geometry, memory curves, messages, colours."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pipemem.schedule.action import COMPUTE, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.stream import draw_steps
from megatron_pipemem.tools.report.page import page_data
from megatron_pipemem.tools.report.timeline import DrawnRun, colour, held_steps, ink, outline

NAMES = ["gpipe", "1f1b", "1f1b-eager", "interleaved", "zb-h1", "zb-h2", "zbv"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8)])
def test_every_action_has_one_box_at_its_time(run, name, p, m):
    timeline = run(name, p, m)
    for device, row in enumerate(DrawnRun(timeline).rows):
        assert [box.action for box in row] == list(timeline.schedule.orders[device])
        assert [(box.start, box.end) for box in row] == list(timeline.spans[device])
        stages = timeline.schedule.placement.stages[device]
        assert all(stages[box.chunk] == box.action.stage and box.device == device for box in row)


def test_a_measured_run_starts_at_zero(run):
    simulated = run("1f1b", 2, 2)
    measured = Timeline(
        simulated.schedule,
        simulated.costs,
        tuple(tuple((start + 100.5, end + 100.5) for start, end in spans) for spans in simulated.spans),
        simulated.peaks,
        simulated.messages,
    )
    assert DrawnRun(measured).rows == DrawnRun(simulated).rows


@given(name=st.sampled_from(NAMES), p=st.integers(2, 6), m=st.integers(1, 14))
def test_memory_curves_reach_the_peak_and_end_empty(name, p, m):
    timeline = simulate(build_schedule(name, num_devices=p, num_microbatches=m))
    for row, peak in zip(DrawnRun(timeline).rows, timeline.peaks, strict=True):
        steps = held_steps(row)
        assert max(held for _, held in steps) == pytest.approx(peak)
        assert steps[-1][1] == 0
        assert [time for time, _ in steps] == sorted(time for time, _ in steps)
        assert all(a[1] != b[1] for a, b in pairwise(steps))


def test_memory_handed_straight_on_makes_no_notch():
    timeline = simulate(Schedule.from_csv("0F0,0B0,0F1,0B1"))
    assert held_steps(DrawnRun(timeline).rows[0]) == [(0, 0), (0, 1), (6, 0)]


@pytest.mark.parametrize("name", NAMES)
def test_messages_are_those_the_simulator_counts(run, name):
    timeline = run(name, 4, 6, Costs(p2p=0.5))
    messages = list(DrawnRun(timeline).messages)
    assert len(messages) == timeline.messages
    assert all(m.consumer.start >= m.producer.end + 0.5 for m in messages)
    assert all(m.consumer.device != m.producer.device for m in messages)


@given(
    name=st.sampled_from(NAMES), p=st.integers(2, 6), m=st.integers(1, 14), p2p=st.sampled_from([0, 0.25, 2]),
    w=st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_bubbles_fill_the_time_between_actions(name, p, m, p2p, w):
    """With the actions they cover the makespan, and one that another device causes ends when its message arrives."""
    timeline = simulate(build_schedule(name, num_devices=p, num_microbatches=m), Costs(1, 1, w, p2p=p2p))
    rows = DrawnRun(timeline).rows
    for row, idle in zip(rows, DrawnRun(timeline).bubbles, strict=True):
        spans = sorted([(b.start, b.end) for b in row if b.seconds] + [(b.start, b.end) for b in idle])
        assert spans[0][0] == 0 and spans[-1][1] == pytest.approx(timeline.makespan)
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(spans))
        for bubble in idle:
            if bubble.consumer is None:
                assert bubble.end == pytest.approx(timeline.makespan) and bubble.producer is None
            else:  # nothing but a message holds an action up
                assert bubble.consumer.start == bubble.end
                assert bubble.producer.end + p2p == pytest.approx(bubble.end)


def test_legend_names_what_occurs(run):
    assert DrawnRun(run("1f1b", 2, 2)).legend == [(Kind.F, 0), (Kind.B, 0)]
    kinds = [Kind.F, Kind.I, Kind.W]
    assert DrawnRun(run("zbv", 2, 4)).legend == [(kind, chunk) for kind in kinds for chunk in (0, 1)]
    assert DrawnRun(run("zbv", 2, 4)).legend_name(Kind.I, 1) == "I input gradient, chunk 1"
    assert DrawnRun(run("1f1b", 2, 2)).legend_name(Kind.I, 0) == "I input gradient"


def _linear(shade: str) -> list[float]:
    parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


# Machado, Oliveira and Fernandes 2009, severity 1.0.
VISION = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def _lab(linear: list[float]) -> tuple[float, float, float]:
    r, g, b = (min(1.0, max(0.0, part)) for part in linear)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _distance(vision: str, *shades: str) -> float:
    """The distance of two colours as people with this vision see them."""
    seen = [
        _lab([sum(f * c for f, c in zip(row, _linear(shade), strict=True)) for row in VISION[vision]])
        for shade in shades
    ]
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


@pytest.mark.parametrize("vision", VISION)
def test_kinds_and_chunks_stay_apart_under_colour_blindness(vision):
    """Later chunks differ from first ones by their edge, which has the full colour of their kind."""
    for pair in combinations(COMPUTE, 2):
        assert _distance(vision, *(colour(kind) for kind in pair)) > 20, pair
        assert {outline(kind, 1) for kind in pair} == {colour(kind) for kind in pair} and outline(pair[0], 0) == ""
    for kind in (Kind.F, Kind.I, Kind.W, Kind.B):  # the others have no chunks, or are rare
        assert _distance(vision, colour(kind), colour(kind, 1, 2)) > 10, "the edge is seen on its own box"


@pytest.mark.parametrize("kind", list(COMPUTE))
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_chunks_of_a_kind_get_paler_and_labels_stay_readable(kind, chunks):
    shades = [colour(kind, chunk, chunks) for chunk in range(chunks)]
    lightness = [sum(_linear(shade)) for shade in shades]
    assert lightness == sorted(set(lightness))
    for shade in shades:
        light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (_linear(shade), _linear(ink(shade)))]
        assert (max(light) + 0.05) / (min(light) + 0.05) >= 3


@pytest.mark.parametrize(("held", "text"), [(3 * 2**30, "3 GiB"), (5.5 * 2**20, "5.5 MiB"), (0, "0 MiB")])
def test_bytes_are_written_as_bytes(run, held, text):
    timeline = run("1f1b", 2, 2, Costs(memory={Kind.F: 2**20, Kind.B: -(2**20)}))
    assert DrawnRun(timeline).memory_text(held) == text
    assert DrawnRun(timeline).headline.endswith("peak 2 MiB (1 of 1F1B's)")


@pytest.mark.parametrize(("name", "is_apart"), [("zbv", True), ("1f1b", True), ("pipedream-2bw", False)])
def test_lines_stand_where_a_device_starts_its_next_step(name, is_apart):
    timeline = draw_steps(simulate(build_schedule(name, num_devices=3, num_microbatches=5)), 3)
    run = DrawnRun(timeline)
    assert ": p=3, m=5, " in run.headline
    expected = [
        [min(box.start for box in row if box.action.microbatch // 5 == step) for step in (1, 2)] for row in run.rows
    ]
    assert [[*starts] for starts in run.step_starts] == (expected if is_apart else [[], [], []])
    (data,) = page_data([timeline])["runs"]
    assert [row["steps"] for row in data["rows"]] == [*run.step_starts]


def test_one_step_has_no_lines(run):
    assert DrawnRun(run("zbv", 3, 5)).step_starts == ((), (), ())
