"""Long commands tell where they stand, and interrupted ones how to go on."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from megatron_pipemem import Costs, search_schedule
from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.exits import INTERRUPTED
from megatron_pipemem.request import Request
from megatron_pipemem.schedule import display as told
from megatron_pipemem.schedule.costs import Channel
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.tools.cli import check, plan, profile, simulate
from megatron_pipemem.tools.cli import common as progress
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import Command
from megatron_pipemem.tools.launch.grid import local
from megatron_pipemem.tools.planner.pareto import choices
from megatron_pipemem.tools.planner.planning import plan as make_plan

RUN = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"
OFFLOADING = Request("auto", MemoryCap(0.6, False), options={"seconds": 3}, offload="auto")
COSTS = Costs(1, 1.5, 0.5, channel=Channel(0.5))


def what_is_told(monkeypatch, work) -> str:
    """All that is told during ``work``, however short it is."""
    monkeypatch.setattr(told, "_SECONDS_BETWEEN", 0.0)
    lines: list[str] = []
    with told.listening(lines.append):
        work()
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (
            lambda: search_schedule(num_devices=4, num_microbatches=6, costs=COSTS, seconds=0.6, memory_cap=0.75),
            ("orders of families on 3 more placements; best makespan so far ", "improving", "lower bound "),
        ),
        (
            lambda: choices(2, 4, COSTS, [0.5, 1.0], 0.2, barriers=(0, 1)),
            (
                "families; 4 searches in all",
                "memory cap 0.5, search 1 of 4: ",
                "memory cap 0.5, search 3 of 4",
                "search 4 of 4",
            ),
        ),
        (
            lambda: choose(OFFLOADING, Shape(2, None, 4), Knowledge(COSTS)),
            ("orders left; no plan", "orders left; makespan", " times the cap, search 1 of "),
        ),
        (
            lambda: make_plan(load(RUN, Run), top=2, search_seconds=0.1),
            ("0 of 2 plans found", "combinations looked at", "searching an order for p = ", "search 1 of "),
        ),
    ],
    ids=["search", "pareto", "offload", "plan"],
)
def test_what_takes_long_tells_what_it_does_and_what_is_left(monkeypatch, work, words):
    lines = what_is_told(monkeypatch, work)
    for word in words:
        assert word in lines


def test_a_listener_is_told_now_and_then_only():
    lines: list[str] = []
    with told.listening(lines.append), told.doing("outer"), told.doing("inner"):
        for number in range(1000):
            told.tell(lambda at=number: f"{at}")
    assert lines[:3] == ["outer", "outer: inner", "outer: inner: 0"] and len(lines) < 100


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_stderr(monkeypatch, is_terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=80)
    monkeypatch.setattr(progress, "Console", lambda **options: console if options["stderr"] else None)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_FIRST_LINE_SECONDS", 0.02)
    monkeypatch.setattr(told, "_SECONDS_BETWEEN", 0.0)

    def is_shown(words: str) -> None:
        while words not in out.getvalue():
            time.sleep(0.01)

    with progress.showing("first words"):
        is_shown("first words [0 s]")
        told.tell(lambda: "3 of 7 [done]")
        is_shown("3 of 7 [done] [")
        with progress.showing("inner"):
            told.tell(lambda: "words")
            is_shown("inner: words [")
    assert ("\x1b" in out.getvalue()) == is_terminal


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        (simulate, "load_and_simulate", "simulate 1f1b -p 4 -m 8"),
        (check, "read_file", "check x.csv"),
        (simulate, "choices", "pareto -p 4 -m 8"),
        (plan, "plan", f"plan {RUN}"),
        (profile, "from_formulas", "profile --model tiny-gpt --formulas"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_interrupt_is_one_sentence_and_exit_code_130(pipemem, monkeypatch, module, function, arguments):
    def interrupted(*_, **__):
        assert told.has_listener(), "its progress is shown"
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupted)
    result = pipemem(*arguments.split())
    assert result.exit_code == INTERRUPTED == 130 and result.stdout == ""
    name = arguments.split()[0]
    assert result.stderr.splitlines() == [f"error: pipemem {name} was interrupted and wrote nothing"]


def test_an_interrupt_of_a_real_process(tmp_path):
    words = "simulate auto -p 16 -m 64 --costs 1,1.5,.5 --memory-cap .625 -o seconds=60".split()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
from megatron_pipemem.tools.cli import simulate
from megatron_pipemem.tools.cli.app import app
load = simulate.load_and_simulate
simulate.load_and_simulate = lambda *each, **named: print("up", flush=True) or load(*each, **named)
app({words})
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130 and out == ""
    assert err == "error: pipemem simulate was interrupted and wrote nothing\n"


@pytest.fixture
def grid_file(tmp_path) -> Path:
    file = tmp_path / "three.yaml"
    names = {"schedule": ["1f1b", "v-half", "zbv"]}
    file.write_text(yaml.safe_dump({"run": str(RUN), "product": names}))
    return file


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_grid_says_how_to_go_on(pipemem, monkeypatch, request, grid_file, tmp_path, number, code):
    def training(store, index) -> Command:
        """The second one ends the whole grid."""
        script = f"import os, time; os.kill({os.getpid()}, {int(number)}); time.sleep(60)" if index == 1 else ""
        return Command((sys.executable, "-c", script), {})

    monkeypatch.setattr(local, "_on_this_node", training)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    folder = tmp_path / "a folder"
    options = ["--output", folder, "--set", "train_iters=3"]
    result = pipemem("grid", grid_file, "--max-parallel", 1, *options)
    assert result.exit_code == code and result.stdout == ""
    lines = result.stderr.splitlines()
    assert "0 of 3 points have ended, now schedule=1f1b" in lines
    assert any(line.startswith("1 of 3 points have ended, now schedule=v-half, about ") for line in lines)
    assert "ending 1 running points" in lines
    first, command = lines[-1].split("; continue with: ")
    assert first == "error: interrupted with 3 of 3 points not finished or failed"
    words = shlex.split(command)
    assert words == ["pipemem", "grid", str(grid_file), "--max-parallel", "1", *map(str, options), "--resume"]
    monkeypatch.setattr(local, "_on_this_node", lambda *_: Command((sys.executable, "-c", ""), {}))
    resumed = pipemem(*words[1:])
    assert "points have ended, now schedule=v-half" in resumed.stderr and "schedule=zbv: " in resumed.stderr
