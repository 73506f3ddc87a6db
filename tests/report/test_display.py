"""Schedules, runs and results of searches show themselves in notebooks, in terminals and as data frames."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from html import unescape

import pytest
from refusals import refused
from rich.console import Console

from megatron_pipemem import Costs, UnsupportedError, build_schedule, search_schedule, simulate
from megatron_pipemem.schedule import display as hook
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.report import browser as display
from megatron_pipemem.tools.report.page import page

COSTS = Costs(1, 1.5, 0.5, p2p=0.1)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return build_schedule("v-half", num_devices=2, num_microbatches=4)


@pytest.fixture(scope="module")
def search_result():
    return search_schedule(num_devices=2, num_microbatches=4, costs=COSTS, max_chunks=2, seconds=0.5)


def pages(html: str) -> list[str]:
    return [unescape(frame) for frame in re.findall(r"srcdoc='([^']*)'", html)]


def test_a_notebook_shows_the_page_that_is_written_to_files(schedule, search_result) -> None:
    unit, priced = simulate(schedule), simulate(schedule, COSTS)
    assert pages(schedule._repr_html_()) == [page([unit])]
    assert pages(priced._repr_html_()) == [page([priced])] != [page([unit])]
    assert pages(search_result._repr_html_()) == [page([simulate(search_result.schedule, COSTS)])]


def test_what_cannot_run_says_why() -> None:
    backward_first = Schedule("<mine>", Placement.linear(1), 1, ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)),))
    told = backward_first._repr_html_()
    assert told.startswith("<pre>&lt;Schedule &lt;mine&gt;") and "device 0" in told and "<iframe" not in told


def test_a_terminal_shows_letters(schedule, search_result, monkeypatch) -> None:
    def shown(what) -> str:
        output = io.StringIO()
        monkeypatch.setattr(display, "Console", lambda: Console(file=output, width=100))
        what.show()
        return output.getvalue()

    assert "device 1|" in shown(schedule).replace(" ", "").replace("device1", "device 1")
    assert shown(schedule) == shown(simulate(schedule)) != shown(simulate(schedule, COSTS))
    assert "bound" in shown(search_result) and f"{simulate(search_result.schedule, COSTS).makespan:.6g}" in shown(
        search_result
    )


def test_a_data_frame_has_a_row_per_action(schedule) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas: pip install '.[test]'")
    run = simulate(schedule, COSTS)
    frame = run.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == sum(map(len, schedule.orders))
    by_device = frame.groupby("device")
    assert [by_device.get_group(device)["held"].max() for device in range(2)] == list(run.peaks)
    spans = zip(frame["start"], frame["end"], strict=True)
    assert list(spans) == [span for device in run.spans for span in device]
    assert list(frame["action"]) == [str(action) for order in schedule.orders for action in order]


def test_without_pandas_the_error_says_what_to_install(schedule, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused("not-installed", kind=UnsupportedError):
        simulate(schedule).to_dataframe()


def test_the_front_names_what_draws() -> None:
    """Nothing that draws is imported before something is shown."""
    code = """
import sys
from megatron_pipemem import build_schedule
schedule = build_schedule("1f1b", num_devices=2, num_microbatches=2)
assert not [name for name in sys.modules if name.startswith("megatron_pipemem.tools.report")]
schedule.show()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1f1b: p=2" in done.stdout, done.stderr


def test_without_the_front_the_error_says_what_to_import(schedule, monkeypatch) -> None:
    monkeypatch.setattr(hook, "_drawn_by", "")
    with refused("nothing-draws", "megatron_pipemem", kind=UnsupportedError):
        schedule.show()
