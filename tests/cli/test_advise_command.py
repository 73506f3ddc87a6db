"""The command reads scripts, command lines and run files, and prints a line that leads to the proposed run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from refusals import check_refusal

pytest.importorskip("megatron.training")

from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run

SCRIPT = """
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
)
torchrun --nproc_per_node 8 --nnodes ${NNODES} pretrain_gpt.py ${MODEL_ARGS[@]} --bf16 \\
    --pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 32 --use-distributed-optimizer \\
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --data-path $DATA
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_a_script_under_1f1b_is_told_of_the_zero_bubble(pipemem_json, script):
    found = pipemem_json("advise", script, "--env", "NNODES=2")
    assert found["run"]["parallelism"] == {"pp": 8, "dp": 2, "global_batch": 32}
    today, best = found["ways"]["today"], found["ways"]["same memory"]
    assert (today["schedule"], best["schedule"]) == ("1f1b", "zb-h1")
    assert best["seconds"] == pytest.approx(today["seconds"] * (1 - best["gain"])) and best["gain"] > 0.05
    assert best["idle_rate"] < today["idle_rate"]
    assert best["add"][:2] == ["--pipemem-schedule", "zb-h1"]


def test_the_printed_line_is_that_of_the_answer(pipemem, pipemem_json, script):
    added = pipemem_json("advise", script, "--env", "NNODES=2")["ways"]["same memory"]["add"]
    shown = pipemem("advise", script, "--env", "NNODES=2")
    (answer,) = [line for line in shown.stdout.splitlines() if line.startswith("answer")]
    assert answer.endswith(shlex.join(added)) and "pretrain_gpt.py" in answer
    assert len(shown.stdout.splitlines()) <= 12


def test_a_command_line_means_the_same_as_the_script(pipemem_json, script):
    words = shlex.split(SCRIPT.split("torchrun")[1].replace("\\\n", " ").replace("${NNODES}", "2"))
    model = SCRIPT.split("(\n")[1].split(")\n")[0].split()
    place = words.index("${MODEL_ARGS[@]}")
    command = ["torchrun", *words[:place], *model, *words[place + 1 :]]
    by_command = pipemem_json("advise", "--json", "--", *command[:-2])
    assert by_command["ways"] == pipemem_json("advise", script, "--env", "NNODES=2")["ways"]


def test_overrides_stand_after_a_file(pipemem_json, script, tmp_path):
    out = tmp_path / "run.yaml"
    pipemem_json("advise", script, "--env", "NNODES=2", "--write", out)
    assert pipemem_json("advise", out, "parallelism.global_batch=64")["run"]["parallelism"]["global_batch"] == 64


def test_the_run_is_written_as_a_run_file(pipemem, script, tmp_path):
    out = tmp_path / "run.yaml"
    assert pipemem("advise", script, "--env", "NNODES=2", "--write", out).exit_code == 0
    run = load(out, Run)
    assert (run.model.layers, run.parallelism.pp, run.schedule.name) == (32, 8, "stock")
    assert run.flags["use-distributed-optimizer"] is True


def test_plans_are_compared_with_the_run_as_it_stands(pipemem, pipemem_json, script, tmp_path):
    out = tmp_path / "run.yaml"
    pipemem("advise", script, "--env", "NNODES=2", "--write", out)
    only = [
        word
        for each in ("pp=8", "tp=1", "schedule=zb-h1", "recompute=none", "variant=plain")
        for word in ("--only", each)
    ]
    words = ("plan", out, "--search-seconds", 0, *only)
    found, ways = pipemem_json(*words), pipemem_json("advise", out)["ways"]
    assert found["today"]["seconds"] == ways["today"]["seconds"] and found["today"]["schedule"] == "1f1b"
    assert ways["same memory"]["seconds"] in [each["seconds"] for each in found["plans"]]
    shown = pipemem(*words).stdout
    assert "today: stock 1f1b" in shown and f"{ways['same memory']['gain']:.1%}" in shown
    assert pipemem_json(*words, "--set", "cluster.nodes=4")["today"] is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nope.sh"], "no-file"),
        (["{script}"], "unknown-size"),
        (["{script}", "--env", "NNODES"], "bad-syntax"),
        (["{script}", "--env", "NNODES=2", "--cluster", "nope"], "no-file"),
    ],
)
def test_bad_input_is_named(refuses, script, arguments, code):
    line = refuses("advise", *(each.format(script=script) for each in arguments))
    assert line.endswith(f"[{code}]")


def test_a_launch_checks_itself_and_leaves(pipemem, script, tmp_path, monkeypatch):
    program = tmp_path / "pretrain_gpt.py"
    program.write_text("raise SystemExit('it trains')", encoding="utf-8")
    flags = shlex.split(SCRIPT.split(".py ${MODEL_ARGS[@]}")[1].replace("\\\n", " "))[:-2]
    model = SCRIPT.split("(\n")[1].split(")\n")[0].split()
    start = ("run", str(program), *model, *flags)
    shown = pipemem(*start, "--pipemem-check=16", "--vocab-size", "128256").stdout
    assert shown.splitlines()[-2:] == pipemem("advise", script, "--env", "NNODES=2").stdout.splitlines()[-2:]
    uneven = ("--num-layers", "30", "--pipemem-schedule", "zb-h1", "--vocab-size", "128256", "--pipemem-check=16")
    even, auto = (pipemem(*start, *uneven, *more).stdout for more in ((), ("--pipemem-layout", "auto")))
    assert _seconds_today(auto) < 0.95 * _seconds_today(even)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "0")
    assert pipemem(*start, "--pipemem-check", "--vocab-size", "128256").stdout == shown
    monkeypatch.setenv("RANK", "3")
    assert pipemem(*start, "--pipemem-check", "--vocab-size", "128256").stdout == ""


def _seconds_today(shown: str) -> float:
    return float(shown.split("zb-h1: ")[1].split(" s a step")[0])


@pytest.mark.parametrize(
    ("added", "code", "told"),
    [
        (["--pipemem-check=many"], "bad-number", ("many",)),
        (["--pipemem-check", "--pipemem-schedule", "v-hlaf"], "unknown-schedule", ("v-half",)),
        (["--pipemem-check"], "unknown-size", ()),
    ],
)
def test_a_launch_that_cannot_be_checked_says_so(refuses, tmp_path, added, code, told):
    program = tmp_path / "pretrain_gpt.py"
    program.write_text("raise SystemExit('it trains')", encoding="utf-8")
    check_refusal(refuses("run", program, "--num-layers", 8, *added), code, *told)
