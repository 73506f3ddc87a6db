"""The explorer's answers: the numbers of the command line, or one sentence with a code."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from commands import pipemem

from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.tools.cli.explore import schedule_groups
from megatron_pipemem.tools.explore.answers import CONTROLS, explore_data, explore_json
from megatron_pipemem.tools.explore.serving import _package


def facts_of(query: dict[str, str]) -> list[dict]:
    return explore_data(query)["facts"]


@pytest.mark.parametrize(
    "query",
    [
        {"a": "v-half", "b": ""},
        {"a": "interleaved", "b": "po-h", "p": "4", "m": "8", "v": "3", "c": ".2", "f": "0.7", "w": "1.3"},
        {"a": "auto", "b": "zb-auto", "p": "4", "m": "8", "cap": "0.75", "i": "1.5", "w": ".5"},
    ],
)
def test_the_command_beside_an_answer_prints_the_same_numbers(query):
    answers = facts_of(query)
    assert len(answers) == 1 + bool(query["b"])
    for told in answers:
        words = shlex.split(told["command"])
        assert words[0] == "pipemem"
        printed = json.loads(pipemem(*words[1:], "--json").stdout)
        expected = (printed["makespan"], printed["bubble_rate"], printed["peak_activation"], printed["messages"])
        assert (told["makespan"], told["bubble"], told["peak"], told["messages"]) == pytest.approx(expected)
        assert told["chunks"] == printed["chunks"]


@pytest.mark.parametrize(
    ("query", "codes"),
    [
        ({"p": "0"}, ["bad-number"]),
        ({"m": "2.5"}, ["bad-number"]),
        ({"m": "many"}, ["bad-number"]),
        ({"c": "-1"}, ["bad-number"]),
        ({"i": "nan"}, ["bad-number"]),
        ({"cap": "0"}, ["bad-number"]),
        ({"f": "0", "i": "0", "w": "0"}, ["no-time"]),
        ({"a": "v-hlaf"}, ["unknown-schedule", None]),
        ({"a": "../setup.py"}, ["unknown-schedule", None]),
        ({"cap": ".7"}, ["over-cap", None]),
        ({"a": "dualpipe", "p": "5"}, ["needs-devices", None]),
        ({"a": "hanayo", "v": "3"}, ["needs-chunks", None]),
        ({"a": "interleaved", "v": "100000"}, ["too-large", None]),
        ({"p": "64", "m": "5000"}, ["too-large", "too-large"]),
    ],
)
def test_a_value_that_does_not_work_is_told_with_its_code(query, codes):
    """And the other schedule is drawn all the same."""
    answer = explore_data(query)
    error_codes = [told.get("error", "").rpartition("[")[2].rstrip("]") or None for told in answer["facts"]]
    assert error_codes == codes
    offers = [told.get("instead", "") for told in answer["facts"]]
    assert offers == ["auto" if code == "over-cap" else "" for code in codes]
    assert [run["name"] for run in answer["runs"]] == ["v-half"] * codes.count(None)


def test_the_dashed_line_is_the_cap_if_it_is_near():
    def limit(cap: str) -> float:
        (run,) = explore_data({"a": "v-half", "b": "", "p": "4", "m": "8", "cap": cap})["runs"]
        assert run["top"] > run["limit"]
        return run["limit"]

    assert [limit(cap) for cap in ("", "0.8", "1000")] == [1, 0.8, 1]


def test_a_schedules_file_is_asked_for_by_its_name():
    schedule = build_schedule("interleaved", num_devices=4, num_microbatches=8, chunks=3)
    assert json.loads(explore_json("csv=interleaved&p=4&m=8&v=3&a=1f1b")) == schedule.to_csv()
    assert json.loads(explore_json("csv=nope")).endswith("[unknown-schedule]")
    assert json.loads(explore_json("csv=1f1b&m=x")).endswith("[bad-number]")


def test_every_control_and_both_schedules_have_a_default():
    assert explore_json("") == explore_json("&".join(f"{control.key}=" for control in CONTROLS))
    assert [told["schedule"] for told in facts_of({})] == ["1f1b", "v-half"]


def test_an_exported_page_holds_all_that_its_schedules_need(tmp_path):
    """The archive alone answers, without any other package."""
    archive = tmp_path / "package.zip"
    archive.write_bytes(_package())
    assert _package() == archive.read_bytes()
    names = [name for group in schedule_groups().values() for name in group]
    code = f"""
import sys
sys.path.insert(0, {str(archive)!r})
from megatron_pipemem.tools.explore.answers import explore_data
for name in {names!r}:
    for told in explore_data({{"a": name, "b": "", "p": "4", "m": "8"}})["facts"]:
        print(name, told.get("error", "").rpartition("[")[2])
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ") for line in done.stdout.splitlines())
    assert list(told) == names
    assert set(told.values()) == {""}
