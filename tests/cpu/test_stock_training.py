"""Ranks that fail, with and without a launcher. Training on CPU ranks: test_quiet.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lanes import nightly, rest_nightly
from launching import REPOSITORY, TOY_MODEL, run_ranks

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


# Ranks without torchrun, waiting in the ways that training waits. Rank 1 fails; only the guard can end the others.
WAITING_SCRIPT = """
import os, sys, time
import torch.distributed as dist
rank, place = int(os.environ["RANK"]), sys.argv[1]
if place == "late rendezvous" and rank == 0:
    time.sleep(6)  # rank 1 has failed before there is a store
elif place in ("collective", "computation"):
    dist.init_process_group("gloo")
    dist.barrier()
if rank == 1:
    time.sleep(1)
    raise ArithmeticError("this rank cannot go on")
if "rendezvous" in place:
    dist.init_process_group("gloo")
elif place == "collective":
    dist.barrier()
elif place == "computation":
    time.sleep(36000)
"""

GUARDED = """
import sys
from pathlib import Path
from megatron_pipemem.cli.run import run
run(False, Path(sys.argv[1]), sys.argv[2:])
"""


def start_ranks(count: int, environment: dict[str, str], script: Path, *arguments: str) -> tuple[list[int], list[str]]:
    return run_ranks(count, [sys.executable, "-c", GUARDED, str(script), *arguments], environment)


@pytest.mark.parametrize(
    "place",
    rest_nightly(
        ["late rendezvous", "rendezvous", "collective", "computation"],
        ["late rendezvous", "computation"],
        "the late rendezvous, and the rank that is killed while others are in a collective",
    ),
)
def test_ranks_end_together_without_torchrun(environment: dict[str, str], tmp_path: Path, place: str) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING_SCRIPT)
    codes, errors = start_ranks(2, environment, script, place)
    assert codes == [1, 1]
    assert "Traceback" in errors[1]
    *_, cause, advice = errors[1].splitlines()
    assert cause == "rank 1 failed: ArithmeticError: this rank cannot go on" and advice.startswith("what to do: ")
    # torch itself may warn of the store's closed connection on a slow machine; errors of ours are told once.
    assert not any(f"rank {rank} failed" in errors[0] for rank in range(2)) and "Traceback" not in errors[0]


def test_a_killed_rank_is_told_as_such(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(WAITING_SCRIPT.replace("raise ArithmeticError", "os.kill(os.getpid(), 9)  #"))
    codes, errors = start_ranks(3, environment, script, "collective")
    assert codes == [1, -9, 1]
    assert sum("ended without a message" in error for error in errors) == 1


def test_ranks_that_finish_finish_quietly(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "fine.py"
    script.write_text("import os, time; time.sleep(int(os.environ['RANK']))")
    codes, errors = start_ranks(2, environment, script)
    assert codes == [0, 0]
    assert errors == ["", ""]


def test_our_own_errors_come_without_traceback(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(
        "from megatron_pipemem.errors import UnsupportedError\n"
        "raise UnsupportedError('not-on-cpu', 'cannot [do] this; do that')"
    )
    codes, errors = start_ranks(1, environment, script)
    assert (codes, errors) == ([1], ["rank 0 failed: UnsupportedError: cannot [do] this; do that [not-on-cpu]\n"])
    _, errors = start_ranks(1, environment | {"PIPEMEM_TRACEBACK": "1"}, script)
    assert errors[0].startswith("Traceback")


def test_the_script_decides_its_exit_code(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert [start_ranks(1, environment, script, code)[0] for code in ("0", "3")] == [[0], [3]]


def test_a_misspelt_flag_of_the_script_is_one_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "parsing.py"
    script.write_text(
        "import argparse\nparser = argparse.ArgumentParser(prog='parsing')\n"
        "parser.add_argument('--num-layers', type=int)\nparser.parse_args()"
    )
    codes, errors = start_ranks(1, environment, script, "--num-layrs=8")
    said = "parsing: error: unrecognized arguments: --num-layrs=8"
    assert (codes, errors) == ([2], [f"{said}\nrank 0 failed: {said}; did you mean --num-layers?\n"])


def test_a_missing_script_is_an_error(environment: dict[str, str], tmp_path: Path) -> None:
    codes, errors = start_ranks(1, environment, tmp_path / "nowhere.py")
    assert codes == [1]
    assert "rank 0 failed" in errors[0] and "there is no script" in errors[0] and "nowhere.py" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope.py"], "error: there is no script nope.py; give the path"),
        (
            [str(REPOSITORY / "scripts" / "pretrain_gpt.py"), "--pipemem-schedule", "v-hlaf"],
            "error: unknown schedule 'v-hlaf'",
        ),
    ],
)
def test_without_a_launcher_what_is_wrong_is_an_error_like_any_other(
    environment: dict[str, str], arguments: list[str], says: str
) -> None:
    alone = {name: value for name, value in environment.items() if name != "RANK"}
    command = [sys.executable, "-m", "megatron_pipemem", "run", *arguments]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(says)


@pytest.mark.parametrize("flags", ["True, script, []", "False, script, ['--pipemem-schedule', 'v-half']"])
def test_without_megatron_it_says_what_to_install(environment: dict[str, str], tmp_path: Path, flags: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    code = (
        "import sys; from pathlib import Path; from megatron_pipemem.cli.run import run\n"
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
    codes, errors = start_ranks(1, environment, script, str(output), "--lr", "1")
    assert codes == [0], errors
    assert json.loads(output.read_text()) == ["__main__", [str(script), str(output), "--lr", "1"], str(tmp_path), 42]


def launched(environment: dict[str, str], script: Path, *arguments: str) -> list[str]:
    """What two ranks under our launcher leave on the screen, as ``pipemem launch`` starts them."""
    start = [sys.executable, "-m", "megatron_pipemem.cli.ranks", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "-m", "megatron_pipemem", "run", str(script), *arguments]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 1
    return done.stdout.splitlines()


def test_the_first_cause_is_the_last_thing_on_the_screen(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(WAITING_SCRIPT)
    *_, trace, cause, advice = launched(environment, script, "collective")
    assert trace == "ArithmeticError: this rank cannot go on"
    assert cause == "rank 1 failed: ArithmeticError: this rank cannot go on" and advice.startswith("what to do: read")
    script.write_text(WAITING_SCRIPT.replace("raise ArithmeticError", "os.kill(os.getpid(), 9)  #"))
    *_, cause, advice = launched(environment, script, "collective")
    assert cause == "rank 1 failed: killed by SIGKILL" and "dmesg" in advice
    script.write_text("import argparse; argparse.ArgumentParser(prog='train').parse_args(['--lrr'])")
    assert re.fullmatch(
        r"rank \d failed: train: error: unrecognized arguments: --lrr", launched(environment, script)[-1]
    )
