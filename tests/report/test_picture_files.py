"""PNG, SVG, HTML and Perfetto files hold the whole run."""

from __future__ import annotations

import json
import re
import struct
import sys
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace
from itertools import batched, pairwise
from pathlib import Path

import pytest
from refusals import refused

from megatron_pipemem.errors import OutputError, UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.tools.report import save_comparison, save_timeline
from megatron_pipemem.tools.report.browser import trace

SVG = "{http://www.w3.org/2000/svg}"


def actions_of(timeline) -> list[str]:
    return sorted(str(action) for order in timeline.schedule.orders for action in order)


def image(path: Path):
    return pytest.importorskip("PIL.Image").open(path).convert("RGB")


def texts_of(path: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ET.parse(path).iter(f"{SVG}text")]


def test_peaks_in_bytes_are_written_as_bytes(run, tmp_path):
    timeline = run("1f1b", 4, 8, Costs(memory={Kind.F: 3 * 2**30, Kind.B: -3 * 2**30}))
    texts = texts_of(save_timeline(timeline, tmp_path / "a.svg"))
    assert [text for text in texts if re.fullmatch(r"\d+ GiB", text)] == ["12 GiB", "9 GiB", "6 GiB", "3 GiB"]
    assert "held memory" in texts and not any("1F1B's peak" in text for text in texts)


def test_bubbles_say_what_their_device_waits_for(run, tmp_path):
    texts = texts_of(save_timeline(run("1f1b", 4, 8), tmp_path / "run.svg"))
    assert "waits for 1B0 of device 1" in texts  # device 0 after its four forwards
    assert texts.count("waits for 2B0") == 1
    assert not {"0F0", "1F0"} & set(texts)  # the start of devices 1 and 2 is too narrow, and a footnote says so
    assert [text for text in texts if text.startswith("Left out")] == [
        "Left out for lack of room: waits of narrow bubbles. The .html page has everything."
    ]


def test_labels_are_left_out_where_a_step_is_crowded_and_time_is_not(run, tmp_path):
    timeline = run("zb-h1", 4, 256)
    texts = texts_of(save_timeline(timeline, tmp_path / "run.svg"))
    (note,) = [text for text in texts if text.startswith("Left out for lack of room")]
    assert "microbatch numbers" in note and "waits of narrow bubbles" in note
    ticks = sorted(float(text) for text in texts if re.fullmatch(r"\d+", text))
    assert ticks[0] == 0 and ticks[-1] > 0.8 * timeline.makespan
    assert max(later - earlier for earlier, later in pairwise(ticks)) < 0.3 * timeline.makespan, (
        "nothing between is cut out"
    )


def test_files_are_the_same_every_time(run, tmp_path):
    timeline = run("zbv", 2, 4)
    for suffix in ("svg", "png", "html", "json"):
        first = save_timeline(timeline, tmp_path / f"a.{suffix}").read_bytes()
        assert save_timeline(timeline, tmp_path / f"b.{suffix}").read_bytes() == first


def page_data(text: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved"])
def test_html_holds_the_whole_run_and_loads_nothing(run, tmp_path, name):
    timeline = run(name, 4, 8, Costs(1, 2, 0.5, p2p=0.25))
    page = save_timeline(timeline, tmp_path / "run.html").read_text()
    (drawn,) = page_data(page)["runs"]
    names, starts, ends = [], [], []
    for device, row in enumerate(drawn["rows"]):
        names += [
            drawn["passes"][kind][0] + str(microbatch) for kind, microbatch in zip(row["pass"], row["mb"], strict=True)
        ]
        numbers, count = b64decode(row["numbers"]), len(row["mb"])
        start, end, held = batched(struct.unpack(f"<{3 * count}d", numbers), count)
        assert tuple(zip(start, end, strict=True)) == timeline.spans[device]
        assert max(held) == timeline.peaks[device] and held[-1] == 0
        starts += start
        ends += end
    assert names == [str(action) for order in timeline.schedule.orders for action in order]
    sources = [source for row in drawn["rows"] for source in row["from"]]
    for name, start, source in zip(names, starts, sources, strict=True):
        assert source < 0 or (names[source].lstrip("0123456789")[1:] == name.lstrip("0123456789")[1:])
        assert source < 0 or ends[source] + 0.25 <= start + 1e-9
    assert not re.search(r"(src|href)\s*=|https?:|url\(|@import", page), "the page loads nothing"
    assert not re.search(r"@[A-Z]+@", page) and timeline.schedule.name in page


def test_html_survives_any_name(run, tmp_path):
    timeline = run("1f1b", 2, 2)
    evil = replace(timeline, schedule=replace(timeline.schedule, name="</script><b>@DATA@&\u2028"))
    page = save_timeline(evil, tmp_path / "run.html").read_text()
    assert page_data(page)["runs"][0]["name"] == "</script><b>@DATA@&\u2028"
    assert "<b>@DATA@" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_perfetto_slices_counters_and_arrows(run, tmp_path, name):
    timeline = run(name, 4, 8, Costs(1, 2, 0.5, p2p=0.25))
    events = json.loads(save_timeline(timeline, tmp_path / "run.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(event["name"] for event in slices) == [f"PP:{action}" for action in actions_of(timeline)]
    placement = timeline.schedule.placement
    assert all(event["tid"] == placement.devices[event["args"]["stage"]] for event in slices)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.makespan * 1e6)
    for device, peak in enumerate(timeline.peaks):
        counter = [event["args"]["units"] for event in events if event["name"] == f"held by device {device}"]
        assert max(counter) == pytest.approx(peak) and counter[-1] == 0
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == timeline.messages and starts.keys() == ends.keys()
    for arrow in (*starts.values(), *ends.values()):
        around = [e for e in slices if e["tid"] == arrow["tid"] and e["ts"] < arrow["ts"] < e["ts"] + e["dur"]]
        assert len(around) == 1
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {f"device {device}" for device in range(4)}


def test_perfetto_counts_bytes_as_bytes(run):
    events = trace([run("1f1b", 2, 2, Costs(memory={Kind.F: 4096, Kind.B: -4096}))])["traceEvents"]
    assert max(event["args"]["bytes"] for event in events if event["ph"] == "C") == 8192


@pytest.mark.parametrize("suffix", ["png", "svg", "html", "json"])
def test_comparison_holds_every_run(run, tmp_path, suffix):
    timelines = [run(name, 2, 4) for name in ("1f1b", "interleaved", "zbv")]
    path = save_comparison(timelines, tmp_path / "new" / f"all.{suffix}")
    assert path.stat().st_size > 5000
    if suffix == "png":
        assert image(path).height > 700
    elif suffix == "json":
        events = json.loads(path.read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1, 2}
    else:
        assert all(f"{name}: p=2, m=4" in path.read_text() for name in ("1f1b", "interleaved", "zbv"))


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_large_runs_can_be_drawn(run, tmp_path, suffix):
    assert save_timeline(run("zbv", 16, 64), tmp_path / f"large.{suffix}").stat().st_size > 50_000


@pytest.mark.parametrize("name", ["run.pdf", "run", "png"])
def test_other_suffixes_are_refused_by_naming_the_known(run, tmp_path, name):
    with refused("bad-choice", kind=UnsupportedError):
        save_timeline(run("1f1b", 1, 1), tmp_path / name)


def test_unwritable_target(run, tmp_path):
    (tmp_path / "file").write_text("")
    with refused("cannot-write", kind=OutputError):
        save_timeline(run("1f1b", 1, 1), tmp_path / "file" / "run.html")


def test_missing_matplotlib_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused("not-installed", kind=UnsupportedError):
        save_timeline(run("1f1b", 1, 1), tmp_path / "run.png")
