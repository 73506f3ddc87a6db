"""The command reads scripts, command lines and run files, and prints a line that leads to the proposed run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import pipemem as call
from refusals import check_refusal

pytest.importorskip("megatron.training")

from megatron_pipemem.tools.advise.advice import SAME_MEMORY
from megatron_pipemem.tools.config.cluster import GIB
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run

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


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advise") / "train.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def written(script: Path) -> Path:
    """The run file that ``advise --write`` makes of the script. Its answer is in ``advice.json`` beside the file."""
    path = script.with_name("run.yaml")
    told = call("advise", script, "--env", "NNODES=2", "--write", path, "--json")
    assert told.exit_code == 0, told.stderr
    path.with_name("advice.json").write_text(told.stdout)
    return path


@pytest.fixture(scope="module")
def advice(written: Path) -> dict:
    return json.loads(written.with_name("advice.json").read_text())


@pytest.fixture(scope="module")
def shown(script: Path) -> list[str]:
    """The lines that the command prints of the script, into a file: pytest-xdist gives its workers a terminal's width."""
    return call("advise", script, "--env", "NNODES=2", env={"COLUMNS": None}).stdout.splitlines()


def test_a_script_under_1f1b_is_told_of_a_faster_schedule_in_its_memory(advice):
    assert {"pp": 8, "dp": 2, "global_batch": 32}.items() <= advice["run"].items()
    today, best = advice["ways"]["today"], advice["ways"]["same memory, chunks"]
    assert (today["schedule"], best["schedule"]) == ("1f1b", "gis")
    assert best["seconds"] == pytest.approx(today["seconds"] * (1 - best["gain"])) and best["gain"] > 0.05
    assert best["idle_rate"] < today["idle_rate"]
    assert max(best["peak_bytes"]) < (1 + SAME_MEMORY) * max(today["peak_bytes"])
    assert best["add"][:2] == ["--pipemem-schedule", "gis"]


def test_the_printed_line_is_that_of_the_answer(advice, shown):
    ways = {kind: way for kind, way in advice["ways"].items() if way is not None}
    best = ways[advice["best"]]
    assert ways["same memory"]["schedule"] == "zb-h1" and best["gain"] == max(way["gain"] for way in ways.values())
    assert shown[0].startswith("answer") and "pretrain_gpt.py" in shown[0]
    assert shown[1] == shlex.join(best["add"]), "a line of its own, to copy"
    assert len(shown) <= 23, "with two lines for the cut vocabulary that is proposed"
    assert f"{best['gain']:.1%} shorter than today's" in shown[0]


def test_a_run_that_exceeds_its_devices_is_told_so_first(script, advice, tmp_path):
    peak = max(advice["ways"]["today"]["peak_bytes"]) / GIB
    small = tmp_path / "small.yaml"
    small.write_text(f"base: h100-80g\nmemory_gib: {peak / 4 + 3:.1f}\nreserved_gib: 3\n")
    answer, *rest = call(
        "advise", script, "--env", "NNODES=2", "--cluster", small, env={"COLUMNS": None}
    ).stdout.splitlines()
    assert re.findall(r"\d+\.\d+", answer)[:2] == [f"{peak:.1f}", f"{peak / 4:.1f}"]
    assert any("(3 GiB of it reserved)" in line for line in rest)


def test_a_command_line_means_the_same_as_the_script(pipemem_json, advice):
    words = shlex.split(SCRIPT.split("torchrun")[1].replace("\\\n", " ").replace("${NNODES}", "2"))
    model = SCRIPT.split("(\n")[1].split(")\n")[0].split()
    place = words.index("${MODEL_ARGS[@]}")
    command = ["torchrun", *words[:place], *model, *words[place + 1 :]]
    by_command = pipemem_json("advise", "--json", "--", *command[:-2])
    assert by_command["ways"] == advice["ways"]


def test_a_run_file_takes_no_patch(refuses):
    run = "configs/runs/llama3-8b-8xh100.yaml"
    check_refusal(refuses("advise", run, "--diff"), "no-patch", f"{run} is not a launch script")


def test_what_a_script_leaves_open_is_assumed_or_named(pipemem_json, script, tmp_path, refuses):
    first = pipemem_json("advise", script, "--json")
    assert any("NNODES" in sentence for sentence in first["assumed"]) and first["run"]["pp"] == 8
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--num-layers 32", "--num-layers $1").replace("4096 --ffn", "$2 --ffn"))
    assert pipemem_json("advise", path, 32, 4096)["ways"] == first["ways"]
    line = refuses("advise", path)
    assert "argument 1" in line and "argument 2" in line and line.endswith("[unknown-size]")


def test_overrides_stand_after_a_file(pipemem_json, written):
    assert pipemem_json("advise", written, "global_batch=64")["run"]["global_batch"] == 64


def test_the_run_is_written_as_a_run_file(written):
    run = load(written, Run)
    assert (run.model.layers, run.parallelism.pp, run.schedule.name) == (32, 8, "stock")
    assert run.flags["use-distributed-optimizer"] is True


def test_plans_are_compared_with_the_run_as_it_stands(pipemem, pipemem_json, written):
    only = [
        word
        for setting in ("pp=8", "tp=1", "schedule=gis", "recompute=none", "variant=plain")
        for word in ("--only", setting)
    ]
    words = ("plan", written, "--search-seconds", 0, *only)
    answer, ways = pipemem_json(*words), pipemem_json("advise", written)["ways"]
    assert answer["today"]["seconds"] == ways["today"]["seconds"] and answer["today"]["schedule"] == "1f1b"
    assert ways["same memory, chunks"]["seconds"] in [row["seconds"] for row in answer["plans"]]
    printed = pipemem(*words).stdout
    assert "today: stock 1f1b" in printed and f"{ways['same memory, chunks']['gain']:.1%}" in printed
    other = pipemem_json(*words, "--set", "cluster.nodes=4", "--set", "timing_log_level=2")
    assert other["today"] is None and answer["one_queue"] is None and "--timing-log-level 2" in other["one_queue"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nope.sh"], "no-file"),
        (["{script}", "--env", "NNODES"], "bad-syntax"),
        (["{script}", "--env", "NNODES=2", "--cluster", "nope"], "no-file"),
    ],
)
def test_bad_input_is_named(refuses, script, arguments, code):
    line = refuses("advise", *(argument.format(script=script) for argument in arguments))
    assert line.endswith(f"[{code}]")


@pytest.mark.parametrize(
    ("flags", "replaced"),
    [
        ("--pipemem-schedule zb-h1", "--pipemem-schedule zb-h1"),
        ("--pipemem-schedule gis --pipemem-option=chunks=2", "--pipemem-option chunks=2 --pipemem-schedule gis"),
    ],
)
def test_flags_of_the_script_that_get_another_value_are_left_out(pipemem, tmp_path, flags, replaced):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--data-path $DATA", flags), encoding="utf-8")
    answer = pipemem("advise", path, "--env", "NNODES=2").stdout.splitlines()
    assert answer[1].startswith("--pipemem-schedule zbv")
    assert answer[2] == f"leave out: {replaced}"
    assert (
        "+    --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --pipemem-schedule zbv"
        in pipemem("advise", path, "--env", "NNODES=2", "--diff").stdout
    )


def test_a_launch_checks_itself_and_leaves(pipemem, shown, tmp_path, monkeypatch):
    program = tmp_path / "pretrain_gpt.py"
    program.write_text("raise SystemExit('it trains')", encoding="utf-8")
    flags = shlex.split(SCRIPT.split(".py ${MODEL_ARGS[@]}")[1].replace("\\\n", " "))[:-2]
    model = SCRIPT.split("(\n")[1].split(")\n")[0].split()
    start = ("run", str(program), *model, *flags)
    checked = pipemem(*start, "--pipemem-check=16", "--vocab-size", "128256").stdout
    assert [*checked.splitlines()[:2], checked.splitlines()[-1]] == [*shown[:2], shown[-1]]
    uneven = ("--num-layers", "30", "--pipemem-schedule", "zb-h1", "--vocab-size", "128256", "--pipemem-check=16")
    even, auto = (
        pipemem(*start, *uneven, *more).stdout for more in ((), ("--pipemem-layout", "auto", "--timing-log-level", "2"))
    )
    assert _seconds_today(auto) < 0.95 * _seconds_today(even)
    lines = [[line for line in text.splitlines() if line.startswith("one queue")] for text in (even, auto)]
    assert [len(line) for line in lines] == [0, 1] and "--timing-log-level 2" in lines[1][0]
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "0")
    assert pipemem(*start, "--pipemem-check", "--vocab-size", "128256").stdout == checked
    monkeypatch.setenv("RANK", "3")
    assert pipemem(*start, "--pipemem-check", "--vocab-size", "128256").stdout == ""


def _seconds_today(shown: str) -> float:
    return float(re.search(r"^ today +zb-h1.*? (\d\S*)", shown, re.MULTILINE)[1])


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
