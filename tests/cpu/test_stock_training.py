"""Ranks that fail, with and without a launcher. Training on CPU ranks: test_quiet.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lanes import nightly, rest_nightly
from launching import REPOSITORY, TOY_MODEL, launch, run_ranks
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_pipemem import ranks
from megatron_pipemem.ranks import first_cause
from megatron_pipemem.runtime import first_failure
from megatron_pipemem.tools.cpu.ranks import start_ranks

Torchrun = Callable[..., subprocess.CompletedProcess[str]]

# A rank fails in the middle of a step, in its own computation, while its neighbours wait for what it would have sent.
FAILING_SCRIPT = f"""
import os, runpy, sys
from megatron.core.pipeline_parallel import schedules

forward_step, calls = schedules.forward_step, 0

def failing_forward_step(*arguments, **options):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 7:
        raise ArithmeticError("this rank cannot go on")
    return forward_step(*arguments, **options)

schedules.forward_step = failing_forward_step
sys.path[0] = {str(REPOSITORY / "scripts")!r}
sys.argv[0] = sys.path[0] + "/pretrain_gpt.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@nightly("the first cause below; end_to_end/test_plain_loop.py fails in the middle of a step")
def test_a_failing_rank_ends_all_ranks_with_its_error(torchrun: Torchrun, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING_SCRIPT)
    # Should the peers wait for their time-out, the test would be stuck.
    result = torchrun(2, script, *TOY_MODEL, "--mock-data", "--vocab-size", "99", "--distributed-timeout-minutes", "60")
    assert result.returncode != 0
    told = re.findall(
        r"rank (\d+) failed: (.*)", result.stdout
    )  # when it happens, and in torchrun's summary at the end
    assert told == [("1", "ArithmeticError: this rank cannot go on")] * 2
    root_cause = result.stdout.split("Root Cause")[1]
    assert "local_rank: 1" in root_cause and "ArithmeticError: this rank cannot go on" in root_cause
    assert "failing_forward_step" in root_cause  # the traceback


# Ranks without torchrun, waiting in the ways that training waits. One rank fails; only the guard can end the others.
WAITING_SCRIPT = """
import os, sys, time
import torch.distributed as dist
rank, place, failing = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
if place == "late rendezvous" and rank == 0:
    time.sleep(6)  # rank 1 has failed before there is a store
elif place in ("collective", "computation"):
    dist.init_process_group("gloo")
    dist.barrier()
if rank == failing:
    time.sleep(1)
    raise ArithmeticError("this rank cannot go on")
if "rendezvous" in place:
    dist.init_process_group("gloo")
elif place == "collective":
    dist.barrier()
elif place == "computation":
    time.sleep(36000)
"""


@pytest.mark.parametrize(
    ("place", "failing"),
    rest_nightly(
        [("late rendezvous", 1), ("rendezvous", 0), ("rendezvous", 1), ("collective", 1), ("computation", 1)],
        [("late rendezvous", 1), ("rendezvous", 0), ("computation", 1)],
        "the late rendezvous, and the rank that is killed while others are in a collective",
    ),
)
def test_ranks_end_together_without_torchrun(tmp_path: Path, place: str, failing: int) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING_SCRIPT)
    codes, errors = run_ranks(2, script, place, str(failing))
    assert codes == [1, 1]
    assert "Traceback" in errors[failing]
    *_, cause, advice = errors[failing].splitlines()
    assert cause == f"rank {failing} failed: ArithmeticError: this rank cannot go on"
    assert advice.startswith("what to do: ")
    waiting = errors[1 - failing]
    # torch itself may warn of the store's closed connection on a slow machine; errors of ours are told once.
    assert not any(f"rank {rank} failed" in waiting for rank in range(2)) and "Traceback" not in waiting


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_told_as_such(tmp_path: Path, killed: int) -> None:
    """Rank 0 takes the store with it, so nobody can say who tells it, and nobody waits for the store."""
    script = tmp_path / "killed.py"
    script.write_text(WAITING_SCRIPT.replace("raise ArithmeticError", "os.kill(os.getpid(), 9)  #"))
    began = time.monotonic()
    codes, errors = run_ranks(3, script, "collective", str(killed))
    assert time.monotonic() - began < first_failure._KEEPER_SECONDS
    assert codes == [-9 if rank == killed else 1 for rank in range(3)]
    assert sum("ended without a message" in error for error in errors) == (2 if killed == 0 else 1)


def test_a_rank_that_finishes_finishes_quietly(environment: dict[str, str], tmp_path: Path) -> None:
    """A new interpreter, whose end would abort it if the guard's thread were inside C++ code."""
    script = tmp_path / "fine.py"
    script.write_text("import time; time.sleep(1)")
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "megatron_pipemem", "run", str(script)]
    done = subprocess.run(command, env=environment | job, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_our_own_errors_come_without_traceback(tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(
        "from megatron_pipemem.errors import UnsupportedError\n"
        "raise UnsupportedError('not-on-cpu', 'cannot [do] this; do that')"
    )
    codes, (printed,) = run_ranks(1, script)
    assert (codes, printed) == ([1], "rank 0 failed: UnsupportedError: cannot [do] this; do that [not-on-cpu]\n")
    script.with_name("rank-0.log").unlink()
    _, (printed,) = run_ranks(1, script, environment={"PIPEMEM_TRACEBACK": "1"})
    assert printed.startswith("Traceback")


def test_the_script_decides_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert [run_ranks(1, script, code)[0] for code in ("0", "3")] == [[0], [3]]


def test_a_misspelt_flag_of_the_script_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "parsing.py"
    script.write_text(
        "import argparse\nparser = argparse.ArgumentParser(prog='parsing')\n"
        "parser.add_argument('--num-layers', type=int)\nparser.parse_args()"
    )
    codes, (printed,) = run_ranks(1, script, "--num-layrs=8")
    said = "parsing: error: unrecognized arguments: --num-layrs=8"
    assert (codes, printed) == ([2], f"{said}\nrank 0 failed: {said}; did you mean --num-layers?\n")


@pytest.mark.parametrize("flags", ["True, script, []", "False, script, ['--pipemem-schedule', 'v-half']"])
def test_without_megatron_it_says_what_to_install(environment: dict[str, str], tmp_path: Path, flags: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    code = (
        "import sys; from pathlib import Path; from megatron_pipemem.run import run\n"
        f"sys.modules['megatron'] = None; script = Path({str(script)!r}); run({flags})"
    )
    first = environment | {"RANK": "0"}
    result = subprocess.run([sys.executable, "-c", code], env=first, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'megatron-pipemem[megatron]'" in result.stderr and result.stderr.count("\n") == 1


def test_the_script_sees_the_command_line_it_would_have(environment: dict[str, str], tmp_path: Path) -> None:
    """Its arguments without ours, its folder first on the import path, and itself as the main module."""
    (tmp_path / "beside.py").write_text("value = 42")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, beside\njson.dump([__name__, sys.argv, sys.path[0], beside.value], open(sys.argv[1], 'w'))"
    )
    output = tmp_path / "seen.json"
    command = [sys.executable, "-m", "megatron_pipemem", "run", str(script), str(output), "--lr", "1"]
    subprocess.run(command, env=environment, check=True)
    assert json.loads(output.read_text()) == ["__main__", [str(script), str(output), "--lr", "1"], str(tmp_path), 42]


def launched(ranks: int, script: Path, *arguments: str) -> list[str]:
    """Return the lines on the screen after ``pipemem launch`` has started ranks that fail."""
    log = script.with_name("screen.log")
    log.unlink(missing_ok=True)
    words = ("--nproc-per-node", str(ranks), "-m", "megatron_pipemem", "run", str(script), *arguments)
    (launcher,) = start_ranks(launch, [words], [log])
    launcher.join()
    assert launcher.exitcode == 1
    return log.read_text().splitlines()


def test_the_first_cause_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(WAITING_SCRIPT)
    *_, trace, cause, advice = launched(2, script, "collective", "1")
    assert trace == "ArithmeticError: this rank cannot go on"
    assert cause == "rank 1 failed: ArithmeticError: this rank cannot go on" and advice.startswith("what to do: read")
    script.write_text("import os; os.kill(os.getpid(), 9)")
    *_, cause, advice = launched(1, script)
    assert cause == "rank 0 failed: killed by SIGKILL" and "dmesg" in advice
    script.write_text("import argparse; argparse.ArgumentParser(prog='train').parse_args(['--lrr'])")
    assert launched(1, script)[-1] == "rank 0 failed: train: error: unrecognized arguments: --lrr"


def test_no_watcher_outlives_its_rank(monkeypatch) -> None:
    """The interpreter's exit aborts the process if the thread is inside C++ code."""
    watched = threading.Event()

    def follow(board: object, done: threading.Event, react: object) -> None:
        done.wait()
        time.sleep(0.2)
        watched.set()

    monkeypatch.setattr(ranks, "follow", follow)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with ranks.rank_guard():
        assert not watched.is_set()
    assert watched.is_set()


def test_of_several_failures_that_of_a_killed_rank_is_the_cause(tmp_path: Path) -> None:
    """Ranks that lose it report an error earlier than torchrun sees that it is gone. torchrun itself kills with SIGTERM."""
    report = tmp_path / "error.json"
    told = {"message": "lost", "extraInfo": {"py_callstack": "rank 0 failed: lost its peer", "timestamp": "1"}}
    report.write_text(json.dumps({"message": told}))
    lost = ProcessFailure(0, 10, 1, str(report))
    silent = ProcessFailure(2, 12, 3, "")
    assert first_cause({0: lost, 1: ProcessFailure(1, 11, -9, "")}).startswith("rank 1 failed: killed by SIGKILL\n")
    assert first_cause({0: lost, 1: ProcessFailure(1, 11, -15, ""), 2: silent}) == "rank 0 failed: lost its peer"
    assert first_cause({2: silent}).startswith("rank 2 failed: exit code 3\n")
