"""Every number and every length in a drawn timeline is the simulator's."""

from __future__ import annotations

import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.tools.report import figure
from megatron_pipemem.tools.report.timeline import IDLE, colour

COSTS = Costs(1, 1.5, 0.5, p2p=0.25)
HELD = "#c9d3df"


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def bars(axes) -> dict[str, list[tuple[int, float, float]]]:
    """Per colour ``(device, start, end)`` of the bars."""
    numbers = {}
    for shapes in axes.collections:
        if isinstance(shapes, PolyCollection):
            for path in shapes.get_paths():
                (left, bottom), (right, _) = path.vertices.min(0), path.vertices.max(0)
                numbers.setdefault(to_hex(shapes.get_facecolor()[0]), []).append(
                    (int(bottom), round(left, 9), round(right, 9))
                )
    return numbers


def simulated_bars(timeline: Timeline) -> dict[str, list[tuple[int, float, float]]]:
    placement, bars_of_actions = timeline.schedule.placement, {}
    for device, (order, spans) in enumerate(zip(timeline.schedule.orders, timeline.spans, strict=True)):
        for action, span in zip(order, spans, strict=True):
            chunk = placement.stages[device].index(action.stage)
            shade = colour(action.kind, chunk, placement.num_chunks)
            bars_of_actions.setdefault(shade, []).append((device, *(round(time, 9) for time in span)))
    return bars_of_actions


def held(timeline: Timeline, device: int, time: float) -> float:
    """Activation units in the middle of whatever runs then: a forward takes its stage's when it starts, W or B gives it back
    when it ends."""
    begun = ended = 0
    for action, (start, end) in zip(timeline.schedule.orders[device], timeline.spans[device], strict=True):
        begun += action.kind is Kind.F and start < time
        ended += action.kind in (Kind.W, Kind.B) and end < time
    return (begun - ended) / timeline.schedule.placement.num_stages


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half"])
def test_a_run(run, name):
    timeline = run(name, 4, 8, COSTS)
    drawn = figure.draw([timeline])
    (axes,) = drawn.axes
    assert axes.get_title("left") == f"{name}: p=4, m=8, bubble {timeline.bubble_rate:.1%}, peak {timeline.peak:.4g}"
    around = [text.get_text() for text in drawn.texts]
    assert (
        f"time (F of a device = 1; makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g})"
        in around
    )
    expected, drawn_bars = simulated_bars(timeline), bars(axes)
    assert {shade for shade in drawn_bars if shade not in (IDLE, HELD)} == set(expected)
    for shade, spans in expected.items():
        assert sorted(drawn_bars[shade]) == sorted(spans)
    assert axes.get_xlim() == (0, timeline.makespan)
    start = words(axes).index("device 0")
    assert words(axes)[start:-1:2] == [f"device {device}" for device in range(4)]
    assert words(axes)[start + 1 :: 2] == [f"{peak:.4g}" for peak in timeline.peaks]


def test_numbers_stand_in_their_boxes(run):
    timeline = run("v-half", 4, 8, COSTS)
    (axes,) = figure.draw([timeline]).axes
    places = {
        (int(text.get_position()[1]), round(text.get_position()[0], 6)): text.get_text()
        for text in axes.texts
        if text.get_text().isdigit()
    }
    for device, (order, spans) in enumerate(zip(timeline.schedule.orders, timeline.spans, strict=True)):
        for action, (start, end) in zip(order, spans, strict=True):
            assert places.pop((device, round((start + end) / 2, 6))) == str(action.microbatch)
    assert not places


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_curves_of_memory(run, name):
    timeline = run(name, 4, 8, COSTS)
    (axes,) = figure.draw([timeline]).axes
    curves, limits = (collection for collection in axes.collections if isinstance(collection, LineCollection))
    for device, (curve, limit) in enumerate(zip(curves.get_segments(), limits.get_segments(), strict=True)):
        floor, one = curve[-1][1], limit[0][1]  # a step ends empty
        for k in range(200):
            time = timeline.makespan * (k + 0.5) / 200 + 1e-6
            before = [height for x, height in curve if x <= time][-1]
            assert (floor - before) / (floor - one) == pytest.approx(held(timeline, device, time)), (device, time)


def test_comparisons_say_by_how_much(run):
    first, shorter, longer = runs = [run(name, 4, 8) for name in ("1f1b", "zbv", "gpipe")]
    titles = [axes.get_title("left") for axes in figure.draw(runs).axes]
    assert titles[1].endswith(f"{1 - shorter.makespan / first.makespan:.1%} shorter than 1f1b")
    assert longer.makespan == first.makespan and titles[2].endswith("as long as 1f1b")
    widths = {axes.get_xlim() for axes in figure.draw(runs).axes}
    assert widths == {(0, first.makespan)}, "one time axis"


def test_the_whole_of_every_run_is_drawn(run):
    """Also of one that is several times as long as the others, on one scale with them."""
    others, gems = [run("1f1b", 4, 24), run("zbv", 4, 24)], run("gems", 4, 24)
    assert gems.makespan > 2.5 * others[0].makespan
    drawn = figure.draw([others[0], gems, others[1]])
    assert {axes.get_xlim() for axes in drawn.axes} == {(0, gems.makespan)} and len(drawn.axes) == 3
    assert f"{gems.makespan / others[0].makespan:.1f} times as long as 1f1b" in drawn.axes[1].get_title("left")
    for axes, timeline in zip(drawn.axes, [others[0], gems, others[1]], strict=True):
        for shade, spans in simulated_bars(timeline).items():
            assert set(spans) <= set(bars(axes)[shade])


@pytest.mark.parametrize("cap", [0.75, 1.4])
def test_a_cap_is_drawn_at_its_height_on_every_device(run, cap):
    """The memory axis of a device begins at its floor. The line of 1F1B's peak, at 1, gives the scale."""
    timeline = run("v-half", 4, 8)
    drawn = figure.draw([timeline], MemoryCap(cap, in_bytes=False))
    (axes,) = drawn.axes
    one, of_cap = (
        sorted(segment[0][1] for segment in lines.get_segments())
        for lines in axes.collections
        if isinstance(lines, LineCollection)
        and {len(segment) for segment in lines.get_segments()} == {2}
        and all(segment[0][1] == segment[1][1] for segment in lines.get_segments())
    )
    floors = [device + figure._FLOOR for device in range(4)]
    heights = [[floor - level for floor, level in zip(floors, levels, strict=True)] for levels in (one, of_cap)]
    assert [high / unit for unit, high in zip(*heights, strict=True)] == pytest.approx([cap] * 4)
    assert all(level > device for device, level in enumerate(of_cap)), "within the row of its device"
    assert f"cap: {cap:g} activation units" in [text.get_text() for text in drawn.legends[0].get_texts()]
    texts = [text.get_text() for text in figure.draw([timeline]).legends[0].get_texts()]
    assert not any("cap" in text for text in texts)


def test_a_cap_in_bytes_is_not_drawn_over_activation_units(run):
    drawn = figure.draw([run("v-half", 4, 8)], MemoryCap(2.0**30, in_bytes=True))
    assert not any("cap" in text.get_text() for text in drawn.legends[0].get_texts())
