"""Copies to the host and back, and recomputed forwards, in every picture."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.report import TerminalTimeline, save_timeline
from megatron_pipemem.report.browser import page, trace
from megatron_pipemem.report.timeline import DrawnRun, held_steps
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import Timeline

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
    found = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 4]
    assert found == [str(copy.action) for copy in DrawnRun(timeline).host_transfers[0]]
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
