"""The words of a training command are those that bash makes of the same script."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import pytest

from megatron_pipemem.tools.advise.shell import training_command
from megatron_pipemem.tools.config.arguments import UNKNOWN
from tests.watching.refusals import refused


def words(text: str, *arguments, **settings) -> list[str]:
    return training_command(text, *arguments, **settings).words


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
    assert words(script, {"PWD_OF_RUN": "/data"}) == done.stdout.split("\0")[:-1]


def test_a_command_within_a_command_is_found():
    text = 'run="python -u a/pretrain_gpt.py --x 1"\nsrun --label sh -c "${run} --y $Z" > log'
    python = ["python", "-u", "a/pretrain_gpt.py", "--x", "1", "--y", "3"]
    assert words(text, {"Z": "3"}) == ["srun", "--label", *python]


def test_slurms_lines_give_sizes_that_the_launcher_does_not():
    text = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH -p gpu --gpus-per-node 8\ntorchrun a.py --x"
    assert words(text) == ["--nodes=4", "torchrun", "a.py", "--x"]
    assert words(text.replace("-p gpu ", ""))[:2] == ["--nodes=4", "--gpus-per-node=8"]


def test_variables_that_are_given_come_before_those_of_the_script():
    assert words("TP=2\ntorchrun a.py --tp $TP", {"TP": "8"})[-1] == "8"


def test_an_unknown_value_keeps_the_name_of_its_variable():
    command = words("torchrun a.py --tp $TP --path $(whoami)/x --next $((TP * 2))")
    assert command[3::2] == [f"{UNKNOWN}TP{UNKNOWN}", f"{UNKNOWN}$(whoami){UNKNOWN}/x", f"{UNKNOWN}TP{UNKNOWN}"]


def test_a_command_s_output_is_asked_for_by_its_variable():
    command = words("GPUS=`python -c 'print(8)'`\nA=$(ls)\ntorchrun --nproc_per_node $GPUS --x $A train.py --lr 1")
    assert command[2:5] == [f"{UNKNOWN}GPUS{UNKNOWN}", "--x", f"{UNKNOWN}A{UNKNOWN}"]


def test_a_script_is_read_with_its_arguments(tmp_path: Path):
    (tmp_path / "train.sh").write_text(
        'SIZE=$1\nif [ $SIZE = 8B ]; then L=36; else L=2; fi\npython t.py --layers $L "$@"\n'
    )
    command = words("bash train.sh 8B '--name=a b'", folder=tmp_path)
    assert command == ["python", "t.py", "--layers", "36", "8B", "--name=a b"]


def test_the_command_that_runs_counts_and_not_the_one_that_is_shown():
    text = """ARGS="--freq '([0]*3+[1]*5)'"\ncmd="python t.py $ARGS"\necho $cmd\neval $cmd 2>&1"""
    assert words(text)[:4] == ["python", "t.py", "--freq", "([0]*3+[1]*5)"]


def test_a_variable_that_is_not_set_is_unset_in_tests_and_named():
    text = """
if [ "$DEBUG" = 1 ]; then A=2; else A=3; fi
if [[ -z $NODES ]]; then NODES=4; fi
B=$TP
case $B in 2) C=two ;; *) C=other ;; esac
torchrun a.py --a $A --n $NODES --b $B --c $C --d ${D:-5} ${E[@]} ${F:+x}
"""
    command = training_command(text)
    assert command.words[2:] == shlex.split(f"--a 3 --n 4 --b {UNKNOWN}TP{UNKNOWN} --c other --d 5")
    (sentence,) = command.not_read
    assert all(name in sentence for name in ("DEBUG (line 2)", "NODES (line 3)", "TP (line 5)"))


@pytest.mark.parametrize("end", ["", "\\ "])  # a blank after a backslash ends the command, too
def test_flags_after_a_line_without_a_backslash_are_lost_and_told(end):
    command = training_command(f"torchrun a.py --one 1 {end}\n  --two 2 \\\n  --three 3")
    assert "--two" not in command.words and command.words[:4] == ["torchrun", "a.py", "--one", "1"]
    (sentence,) = command.not_read
    assert "--two" in sentence and "--three" not in sentence


def test_arguments_are_the_script_s():
    text = 'A=$1\nB=${2:-7}\nshift\ntorchrun a.py --a $A --b $B "$@"'
    assert words(text, arguments=["4", "5", "6 7"])[2:] == ["--a", "4", "--b", "5", "5", "6 7"]
    assert words(text)[2:] == ["--a", f"{UNKNOWN}1{UNKNOWN}", "--b", "7"]
    many = "T=${10}\ntorchrun a.py $T $10 ${11:-x}"
    assert words(many)[2:] == [f"{UNKNOWN}10{UNKNOWN}", f"{UNKNOWN}1{UNKNOWN}0", "x"]
    assert words(many, arguments=[*"abcdefghij"])[2:] == ["j", "a0", "x"]


def test_a_script_that_ends_for_want_of_a_file_is_read_on():
    text = "if [ ! -f /no/data ]; then\necho none\nexit 1\nfi\ntorchrun a.py --x\nexit 0\ntorchrun b.py --x --y"
    command = training_command(text)
    assert command.words == ["torchrun", "a.py", "--x"] and "(line 3)" in command.not_read[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/opt/bin/torchrun a.py --x 1 > log 2>&1 &", "/opt/bin/torchrun a.py --x 1"),
        ("P=$CONDA/bin\n$P/python a.py --x 1", f"{UNKNOWN}CONDA{UNKNOWN}/bin/python a.py --x 1"),
        ("nohup env A=1 torchrun a.py --x 1 | tee log", "nohup env A=1 torchrun a.py --x 1"),
        ("ssh -p 22 host 'cd job && torchrun a.py --x 1'", "torchrun a.py --x 1"),
        ("pdsh -w n[0-3] torchrun a.py --x 1", "torchrun a.py --x 1"),
        ("N=3\nsrun -N 2 bash <<EOF\ntorchrun a.py --x $N\nEOF", "srun -N 2 torchrun a.py --x 3"),
        ("if ! torchrun a.py --x 1; then exit 1; fi", "torchrun a.py --x 1"),
        ('run() { torchrun "$@" >&3; }\nexec 3>&1\nrun a.py --x 1', "torchrun a.py --x 1"),
        ("exec torchrun a.py --x 1", "torchrun a.py --x 1"),
        ("T='torchrun a.py'\nsbatch -N 4 <<EOF\nsrun bash -x -c \"$T --x 1\"\nEOF", "srun torchrun a.py --x 1"),
        ("D=0,1,2\ntorchrun a.py --x $(echo $D | tr ',' '\\n' | wc -l)", "torchrun a.py --x 3"),
        ("torchrun a.py --x $(expr 2 + 3) --y $(basename -- /a/b.sh .sh)", "torchrun a.py --x 5 --y b"),
        ('D=$(cd -- "$(dirname -- "/usr/x")" &>/dev/null && pwd)\ntorchrun a.py $D', "torchrun a.py /usr"),
        ("for i in $(seq 2 3); do A+=($i); done\ntorchrun a.py ${A[*]}", "torchrun a.py 2 3"),
        ("torchrun a.py --x $(echo a:b | cut -d: -f2) $(echo Ab | tr A-Z a-z)", "torchrun a.py --x b ab"),
    ],
)  # fmt: skip
def test_a_command_is_read_wherever_it_stands(text, expected):
    assert words(text) == expected.split(" ")


def test_nothing_is_executed(tmp_path: Path):
    mark = tmp_path / "mark"
    words(f"touch {mark}\nX=$(touch {mark})\ntorchrun a.py --x $X `touch {mark}`")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["${HERE}/model.sh", "model.sh", "{folder}/model.sh"])
def test_a_sourced_file_is_read(tmp_path: Path, name: str):
    (tmp_path / "model.sh").write_text("MODEL=(--num-layers 4)\n", encoding="utf-8")
    text = f'source "{name.replace("{folder}", str(tmp_path))}"\ntorchrun a.py ${{MODEL[@]}}'
    assert words(text, folder=tmp_path)[-2:] == ["--num-layers", "4"]


@pytest.mark.parametrize(
    ("text", "code"),
    [("echo hello", "no-command"), ("torchrun a.py --x 'open", "bad-syntax"), ("while :; do :; done", "no-end")],
)
def test_what_cannot_be_read_is_refused(text, code):
    with refused(code):
        words(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("CHECKPOINT=<Specify path>\ntorchrun a.py", "bad-syntax"),
        ('OPTIONS="--vocab-file <PATH TO vocab.json> --fp16"\nsrun sh -c "python a.py $OPTIONS"', "no-command"),
    ],
)
def test_a_placeholder_is_named_with_its_remedy(text, code):
    placeholder = text[text.index("<") : text.index(">") + 1]
    with refused(code, placeholder) as refusal:
        words(text)
    assert "line -" not in str(refusal.value)


def seconds_of_the_processor() -> float:
    return sum(sum(getrusage(of)[:2]) for of in (RUSAGE_SELF, RUSAGE_CHILDREN))


def test_a_script_of_300_lines_takes_less_than_3_seconds_of_the_processor():
    block = """
if [ "$MODE_{n}" = fast ]; then SIZE_{n}=1; else SIZE_{n}=$((SIZE_{p} + 1)); fi
case $SIZE_{n} in 1) LIST+=(--a-{n} 1) ;; *) LIST+=(--b-{n} "$(basename /x/y/${{SIZE_{n}}}.txt)") ;; esac
add_{n}() {{
    local value=${{1:-3}}
    for ((i = 0; i < 3; i++)); do TOTAL=$((TOTAL + value)); done
}}
add_{n} $SIZE_{n}
"""
    text = "SIZE_0=0\nTOTAL=0\nLIST=()" + "".join(block.format(n=n, p=n - 1) for n in range(1, 43))
    text += 'torchrun a.py "${LIST[@]}" --total $TOTAL\n'
    assert text.count("\n") > 300
    begin = seconds_of_the_processor()
    command = words(text)
    assert seconds_of_the_processor() - begin < 3
    assert command[-2:] == ["--total", str(3 * sum(range(1, 43)))]
