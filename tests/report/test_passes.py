"""Copies to the host, recomputed forwards, vocabulary passes and windows of a stream in pictures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import COLLECTIVES, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.stream import family_window, steady
from megatron_pipemem.schedule.vocabulary import VocabularyCosts
from megatron_pipemem.tools.report import save_timeline
from megatron_pipemem.tools.report.browser import trace
from megatron_pipemem.tools.report.page import page
from megatron_pipemem.tools.report.terminal import TerminalTimeline
from megatron_pipemem.tools.report.timeline import DrawnRun, held_steps

COSTS = replace(Costs(), channel=Channel(0.5))


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Device 0 offloads, device 1 recomputes."""
    base = with_recompute(build_schedule("1f1b", num_devices=4, num_microbatches=8), {1: Kind.R})
    return plan_offload(base, COSTS, [0]).timeline


def test_copies_count_from_the_start_of_the_run(timeline: Timeline) -> None:
    lanes = DrawnRun(timeline).host_transfers
    assert {copy.action.kind for copy in lanes[0]} == {Kind.OFFLOAD, Kind.RELOAD} and not any(lanes[1:])
    assert all(copy.end - copy.start == 0.5 for copy in lanes[0])


def test_held_memory_shows_what_is_away(timeline: Timeline) -> None:
    rows = DrawnRun(timeline).rows
    assert max(held for _, held in held_steps(rows[0])) == timeline.peaks[0] < 1
    assert max(held for _, held in held_steps(rows[1])) == timeline.peaks[1] == 0.25
    assert DrawnRun(timeline).legend[-1] == (Kind.R, 0)


def test_a_trace_has_a_track_per_channel(timeline: Timeline) -> None:
    events = trace([timeline])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[4] == "copies of device 0" and 5 not in names
    copies = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 4]
    assert copies == [str(copy.action) for copy in DrawnRun(timeline).host_transfers[0]]
    slices = [event for event in events if event["ph"] == "X"]
    assert not any("WAIT" in event["name"] for event in slices)
    assert any(event["cat"] == "recomputed forward" for event in slices)


def test_the_terminal_has_a_line_per_channel(timeline: Timeline) -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(TerminalTimeline(timeline))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("copies")]
    assert len(lines) == 1 and ">" in lines[0] and "<" in lines[0]


def test_the_page_and_pictures_have_them_too(timeline: Timeline, tmp_path) -> None:
    text = page([timeline])
    data = json.loads(text.split('id="data" type="application/json">')[1].split("</script>")[0])
    rows = data["runs"][0]["rows"]
    assert len(rows[0]["copies"]) == len(DrawnRun(timeline).host_transfers[0]) and rows[1]["copies"] == []
    assert [name for name, *_ in data["runs"][0]["legend"][-2:]] == ["copy to the host", "copy back"]
    pytest.importorskip("matplotlib")
    svg = save_timeline(timeline, tmp_path / "run.svg").read_text()
    assert "copy to the host" in svg and "recomputed forward" in svg


def timeline_of(name, embed):
    costs = Costs(vocabulary=VocabularyCosts(0.5, 0.5, embed, embed))
    return simulate(with_vocabulary(build_schedule(name, num_devices=2, num_microbatches=3), 2, costs), costs)


def test_what_takes_no_time_has_no_box():
    for embed, kinds in ((0.0, set()), (0.25, {Kind.EMBED_F, Kind.EMBED_B})):
        timeline = timeline_of("zbv", embed)
        drawn = {box.action.kind for row in DrawnRun(timeline).rows for box in row}
        assert drawn == {Kind.F, Kind.I, Kind.W, Kind.S, Kind.T} | kinds
        assert not drawn & COLLECTIVES
        assert set(dict(DrawnRun(timeline).legend)) == drawn
        work = [sum(box.seconds for box in row) for row in DrawnRun(timeline).rows]
        assert work == list(timeline.work)


def test_terminal_and_file_name_the_passes(tmp_path):
    timeline = timeline_of("1f1b", 0.25)
    console = Console(width=200, record=True, file=StringIO(), color_system=None)
    console.print(TerminalTimeline(timeline))
    text = console.export_text()
    assert DrawnRun(timeline).headline in text and "2 barriers" in text and "S head scores" in text and "S2" in text
    picture = save_timeline(timeline, tmp_path / "run.svg").read_text()
    assert "head scores" in picture and "embedding gradient" in picture


def test_a_window_shows_its_own_messages_and_bubbles():
    timeline = family_window("pipedream-2bw", 4, 8, steady(4, 8)).simulate()
    shown = {(str(m.producer.action), str(m.consumer.action)) for m in DrawnRun(timeline).messages}
    assert ("0F3", "1F3") in shown and ("1B0", "0B0") in shown
    assert not any(producer == "0F0" for producer, _ in shown)
    idle = [sum(cell.end - cell.start for cell in row) for row in DrawnRun(timeline).bubbles]
    assert idle == [timeline.makespan - work for work in timeline.work]
