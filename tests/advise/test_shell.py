"""The words of a training command are those that bash makes of the same script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_pipemem.tools.advise.shell import UNKNOWN, training_command
from tests.watching.refusals import refused

SCRIPTS = {
    "arrays": """
GPUS=8
NODES=${NODES:-4} # a comment with 'one quote
DIST=(
    --nproc_per_node $GPUS # of a node
    --nnodes "$NODES"
)
MODEL=(--num-layers 32 --name 'two words' --path "$PWD_OF_RUN/my data")
MODEL+=(--world $((GPUS * NODES)))
torchrun "${DIST[@]}" pretrain_gpt.py "${MODEL[@]}" ${DIST[@]} 2>&1 | tee log.txt
""",
    "strings": """
OPTS=" \\
  --one 1 \\
  --two ${TWO:-2} "
OPTS+="--three"
OPTS="$OPTS --four \\"quoted\\""
torchrun pretrain_gpt.py $OPTS --lr 1.0e-4 --empty "" --last=x\\ y
""",
    "tests": """
TP=2
if [ "$TP" -gt 1 ]; then EXTRA="--sequence-parallel"; else EXTRA=""; fi
if [[ $TP == 4 ]]; then
    A=(--four)
elif [ $TP -eq 2 ]; then
    A=(--two)
    if [ -n "$EXTRA" ]; then A+=(--deep); fi
else
    A=(--other)
fi
if [ -z "${UNSET_OF_RUN:-}" ]; then A+=(--empty); fi
torchrun pretrain_gpt.py ${A[@]} $EXTRA
""",
    "heredoc": """
cat > /dev/null <<EOF
python other.py --a --b --c --d
EOF
export NAME="x-${SIZE:-8}b"
torchrun pretrain_gpt.py --name ${NAME} --more "${NAME}"/y --even ${MISSING_OF_RUN:+--no} > /dev/null
""",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(script, tmp_path):
    record = "torchrun() { printf '%s\\0' torchrun \"$@\" >&3; }\nPWD_OF_RUN=/data\n"
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&1 >/dev/null\n{record}{script}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert training_command(script, {"PWD_OF_RUN": "/data"}) == done.stdout.split("\0")[:-1]


def test_a_command_within_a_command_is_found():
    text = 'run="python -u a/pretrain_gpt.py --x 1"\nsrun --label sh -c "${run} --y $Z" > log'
    assert training_command(text, {"Z": "3"}) == ["python", "-u", "a/pretrain_gpt.py", "--x", "1", "--y", "3"]


def test_slurms_lines_give_sizes_that_the_launcher_does_not():
    text = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH -p gpu --gpus-per-node 8\ntorchrun a.py --x"
    assert training_command(text) == ["--nodes=4", "torchrun", "a.py", "--x"]
    assert training_command(text.replace("-p gpu ", ""))[:2] == ["--nodes=4", "--gpus-per-node=8"]


def test_variables_that_are_given_come_before_those_of_the_script():
    assert training_command("TP=2\ntorchrun a.py --tp $TP", {"TP": "8"})[-1] == "8"


def test_an_unknown_value_keeps_the_name_of_its_variable():
    words = training_command("torchrun a.py --tp $TP --path $(pwd)")
    assert words[3] == f"{UNKNOWN}TP{UNKNOWN}" and UNKNOWN in words[5]


def test_a_command_s_output_is_asked_for_by_its_variable():
    words = training_command(
        "GPUS=`python -c 'print(8)'`\nA=$(ls)\ntorchrun --nproc_per_node $GPUS --x $A train.py --lr 1"
    )
    assert words[2:5] == [f"{UNKNOWN}GPUS{UNKNOWN}", "--x", f"{UNKNOWN}A{UNKNOWN}"]


def test_a_script_is_read_with_its_arguments(tmp_path: Path):
    (tmp_path / "train.sh").write_text(
        'SIZE=$1\nif [ $SIZE = 8B ]; then L=36; else L=2; fi\npython t.py --layers $L "$@"\n'
    )
    words = training_command("bash train.sh 8B '--name=a b'", folder=tmp_path)
    assert words == ["python", "t.py", "--layers", "36", "8B", "--name=a b"]


def test_the_command_that_runs_counts_and_not_the_one_that_is_shown():
    text = """ARGS="--freq '([0]*3+[1]*5)'"\ncmd="python t.py $ARGS"\necho $cmd\neval $cmd 2>&1"""
    assert training_command(text)[:4] == ["python", "t.py", "--freq", "([0]*3+[1]*5)"]


def test_an_undecided_test_takes_the_first_branch_and_keeps_what_is_known():
    text = "A=1\nif [ $ASKED = 1 ]; then A=2; B=2; C+=(--c); else B=3; fi\ntorchrun a.py --a $A --b $B ${C[@]}"
    assert training_command(text)[3:6:2] == ["1", "2"]


def test_nothing_is_executed(tmp_path: Path):
    mark = tmp_path / "mark"
    training_command(f"touch {mark}\nX=$(touch {mark})\ntorchrun a.py --x $X `touch {mark}`")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["${HERE}/model.sh", "model.sh", "{folder}/model.sh"])
def test_a_sourced_file_is_read(tmp_path: Path, name: str):
    (tmp_path / "model.sh").write_text("MODEL=(--num-layers 4)\n", encoding="utf-8")
    text = f'source "{name.replace("{folder}", str(tmp_path))}"\ntorchrun a.py ${{MODEL[@]}}'
    assert training_command(text, folder=tmp_path)[-2:] == ["--num-layers", "4"]


@pytest.mark.parametrize(("text", "code"), [("echo hello", "no-command"), ("torchrun a.py --x 'open", "bad-syntax")])
def test_what_cannot_be_read_is_refused(text, code):
    with refused(code):
        training_command(text)
