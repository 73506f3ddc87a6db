"""What ``pipemem run`` refuses before torch and Megatron are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import check_refusal

from megatron_pipemem.schedule.registry import build_schedule

pytest.importorskip("megatron.core")

# Runs the script once for each list of flags, in one process, and tells what has been imported so far.
CODE = """
import json, sys
from typer.testing import CliRunner
from megatron_pipemem.tools.cli.app import app
for flags in json.load(sys.stdin):
    done = CliRunner().invoke(app, ["run", "--cpu", "script.py", *flags], prog_name="pipemem")
    slow = sorted({"torch", "megatron.core"} & set(sys.modules))
    print(json.dumps([done.exit_code, done.stdout, done.stderr, slow]))
"""
ALONE = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
SIZES = "--num-layers 8 --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8".split()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("run")
    path = tmp_path / "script.py"
    path.write_text("raise AssertionError('the script has started')")
    (tmp_path / "two.csv").write_text(build_schedule("1f1b", num_devices=2, num_microbatches=8).to_csv())
    (tmp_path / "cut.csv").write_text("0F0,0B0\n1B0,1F0\n")
    (tmp_path / "costs.json").write_text('{"forward": "slow"}')
    (tmp_path / "weights.json").write_text("[[1, -2]]")
    (tmp_path / "plan.yaml").write_text("model: [")
    return path


def start(script: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """Start a rank in the folder of the script, or a process of its own."""
    command = [sys.executable, "-m", "megatron_pipemem", "run", "--cpu", script.name, *SIZES, *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=script.parent, env=ALONE | environment, stdout=pipe, stderr=pipe, text=True)


REFUSED = {
    "--pipmem-schedule v-half": ("unknown-flag", "--pipmem-schedule", "--pipemem-schedule"),
    "--pipemem-chek --pipemem-schedule v-half": ("unknown-flag", "--pipemem-chek", "--pipemem-check"),
    "--pipemem-schedule v-hlaf": ("unknown-schedule", "v-half"),
    "--pipemem-schedule v-half --pipemem-memory-cap 0.5": ("over-cap", "v-half", "0.75"),
    "--pipemem-schedule v-half --pipemem-costs costs.json": ("bad-type", "costs.json"),
    "--pipemem-schedule v-half --pipemem-microbatch-costs weights.json": ("wrong-file", "weights.json"),
    "--pipemem-plan plan.yaml": ("not-yaml", "plan.yaml"),
    "--pipemem-schedule two.csv": ("other-size", "two.csv", 2, 4),
    "--pipemem-schedule cut.csv": ("wrong-order", "device 1"),
    "--pipemem-schedule v-half --pipemem-report two.csv/report.json": ("cannot-write", "two.csv"),
    # The values of all other flags are read in the same place (mcore/test_flags.py).
    "--pipemem-schedule v-half --pipemem-offload most": ("bad-choice", "most"),
}


def test_what_is_wrong_is_the_only_line_and_nothing_slow_is_imported(script: Path) -> None:
    one_node = ALONE | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    flags = json.dumps([[*SIZES, *row.split()] for row in REFUSED])
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=script.parent, env=one_node, input=flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for refused, told in zip(REFUSED.values(), map(json.loads, done.stdout.splitlines()), strict=True):
        exit_code, printed, line, slow = told
        assert exit_code in (1, 2) and printed == "" and slow == []
        assert line.startswith("error: ") and line.count("\n") == 1
        check_refusal(line, *refused)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--cpuu", "train.py"), "did you mean --cpu?"),
        (("--pipemem-schedule", "zbv", "train.py"), "give the script first"),
    ],
)
def test_an_option_before_the_script_is_no_script(pipemem, options, says):
    result = pipemem("run", *options)
    assert result.exit_code == 2 and f"no option {options[0]}; {says}" in result.stderr


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_of_several_ranks_one_says_what_is_wrong(script: Path, tmp_path: Path, by_torchrun: bool) -> None:
    ranks = []
    for rank in range(2):
        job = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        if by_torchrun:
            job["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / f"error-{rank}.json")
        ranks.append(start(script, "--pipemem-shedule", "v-half", **job))
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    sentence = "error: unknown flag --pipemem-shedule; did you mean --pipemem-schedule? [unknown-flag]"
    assert said == ["" if by_torchrun else f"{sentence}\n", ""], "torchrun prints what stands in the file"
    files = sorted(tmp_path.glob("error-*.json"))
    assert [file.name for file in files] == (["error-0.json"] if by_torchrun else [])
    for file in files:
        assert json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] == sentence


def test_ranks_of_several_nodes_find_out_by_themselves(script: Path) -> None:
    """A file may be there on one node alone, so that a rank of each other node must say what it misses."""
    job = {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    process = start(script, "--pipemem-schedule", "none.csv", RANK="0", **job)
    line = process.communicate()[1]
    assert process.returncode == 1 and "none.csv" in line.splitlines()[-1]
