"""The scripts of examples/ are what the pages say: the line of ``pipemem advise`` is the difference of two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import nightly
from launching import free_port

pytest.importorskip("megatron.training")

from megatron_pipemem.tools.advise.shell import training_command

EXAMPLES = Path(__file__).parents[2] / "examples"
BEFORE, AFTER, JOB = (EXAMPLES / name for name in ("launch_before.sh", "launch_after.sh", "slurm_job.sh"))
MOVE = EXAMPLES / "move_job.sh"


def test_the_line_of_advise_makes_one_launch_script_the_other():
    command = [sys.executable, "-m", "megatron_pipemem", "advise", str(BEFORE), "--json"]
    advice = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    before, after = (training_command(path.read_text(encoding="utf-8")).words for path in (BEFORE, AFTER))
    place = before.index("pretrain_gpt.py")
    added = next(way["add"] for kind, way in advice["ways"].items() if kind not in ("today", "stock"))
    assert [*before[:place], "-m", "megatron_pipemem", "run", *before[place:], *added] == after


@pytest.mark.skipif(os.name != "posix", reason="runs bash")
def test_the_slurm_job_starts_the_launch_script_on_every_node(tmp_path):
    commands = {
        "scontrol": "printf 'first\\nsecond\\n'",
        "srun": 'shift; SLURM_NODEID=1 "$@"',
        "torchrun": 'printf "%s\\n" torchrun "$@"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    of_slurm = {"SLURM_SUBMIT_DIR": str(EXAMPLES.parent), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment = os.environ | of_slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(JOB), "checkpoints", "tokenizer", "data"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"}
    command = training_command(AFTER.read_text(encoding="utf-8"), variables, None, ("checkpoints", "tokenizer", "data"))
    assert done.stdout.split("\n")[:-1] == command.words


@nightly("end_to_end/test_checkpoints.py and mcore/test_files_of_ranks.py")
@pytest.mark.skipif(os.name != "posix", reason="runs bash")
def test_a_job_moves_from_stock_to_a_v_and_back(tmp_path):
    ranks = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": ranks, "MASTER_PORT": str(free_port())}
    subprocess.run(["bash", str(MOVE), str(tmp_path)], env=environment, capture_output=True, check=True)
    losses = {part.stem: json.loads(part.read_text(encoding="utf-8"))["losses"] for part in tmp_path.glob("*.json")}
    whole = losses.pop("whole")
    assert len({*whole}) == 6
    assert losses == {"before": whole[:2], "convert": whole[2:3], "v-half": whole[3:5], "back": whole[5:]}
