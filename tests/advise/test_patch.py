"""The answer of ``advise`` as a patch of a launch script: the patched script starts the command that the line makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from refusals import refused

from megatron_pipemem.tools.advise.patch import patch
from megatron_pipemem.tools.advise.shell import training_command

SCRIPT = """\
#!/bin/bash
# torchrun pretrain_gpt.py --num-layers 8
SIZES=(
    --num-layers 8
    --num-layers-per-virtual-pipeline-stage 2
    --micro-batch-size=1
)
torchrun --nproc-per-node 4 $ROOT/pretrain_gpt.py ${SIZES[@]} \\
    --pipeline-model-parallel-layout "Et*4|t*4L" \\
    --bf16
"""


def words_of(text: str) -> list[str]:
    return training_command(text, {"ROOT": "/m"}).words


def patched(folder: Path, text: str, added: list[str], gone: list[str], starts_ours: bool = True) -> list[str]:
    """The words that a script starts when its patch is applied."""
    difference = patch("train.sh", text, words_of(text), (added, gone), starts_ours, words_of)
    (folder / "train.sh").write_text(text, encoding="utf-8")
    subprocess.run(["git", "apply"], input=difference, text=True, cwd=folder, check=True)
    return words_of((folder / "train.sh").read_text(encoding="utf-8"))


START = ["torchrun", "--nproc-per-node", "4"]
LAYERS, STAGES, BATCH = (
    ["--num-layers", "8"],
    ["--num-layers-per-virtual-pipeline-stage", "2"],
    ["--micro-batch-size=1"],
)
LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("added", "gone", "words"),
    [
        (["--pipemem-schedule", "zb-h1"], [], [*LAYERS, *STAGES, *BATCH, LAYOUT, "Et*4|t*4L", "--bf16"]),
        (["--pipemem-schedule", "zbv"], [*STAGES, "--bf16"], [*LAYERS, *BATCH, LAYOUT, "Et*4|t*4L"]),
        (["--pipemem-schedule", "zbv"], [LAYOUT, "Et*4|t*4L"], [*LAYERS, *STAGES, *BATCH, "--bf16"]),
    ],
)
def test_words_are_added_and_taken_out(tmp_path, added, gone, words):
    run = [*START, "-m", "megatron_pipemem", "run", "/m/pretrain_gpt.py", *added]
    assert patched(tmp_path, SCRIPT, added, gone) == [*run, *words]


def test_a_value_is_replaced_where_it_stands(tmp_path):
    words = patched(tmp_path, SCRIPT, [LAYOUT, "E|t*8|L"], [], starts_ours=False)
    assert words == [*START, "/m/pretrain_gpt.py", *LAYERS, *STAGES, *BATCH, LAYOUT, "E|t*8|L", "--bf16"]


@pytest.mark.parametrize(
    "text",
    [
        SCRIPT.replace("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage\n    2"),
        SCRIPT.replace("--num-layers-per-virtual-pipeline-stage 2", "$FLAG 2").replace(
            "SIZES=", "FLAG=--num-layers-per-virtual-pipeline-stage\nSIZES=", 1
        ),
        SCRIPT.replace("torchrun", "echo pretrain_gpt.py\ntorchrun", 2),
    ],
    ids=["its value on another line", "made by a variable", "another mention of the program"],
)
def test_words_that_the_script_makes_are_refused(text):
    with refused("no-patch"):
        patch("train.sh", text, words_of(text), (["--pipemem-schedule", "zbv"], STAGES), True, words_of)
