"""What a command refuses before it computes anything, in one sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from refusals import check_refusal

from megatron_pipemem.cli.app import load_commands
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.size import estimated, is_fitted

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "runs" / "tiny-cpu.yaml"
SMALL = ("1f1b", "-p", 4, "-m", 8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("simulate", *SMALL, "--offload-ratio", 1), ("needs-option", "--offload-ratio", 1)),
        (
            ("simulate", "auto", "-p", 4, "-m", 8, "--offload-ratio", 1),
            ("needs-option", "--offload-ratio", 1, "--offload"),
        ),
        (("show", *SMALL, "--offload-ratio", 1), ("needs-option", "--offload-ratio", 1, "--offload")),
        (("simulate", *SMALL, "--host-memory", 1), ("needs-option", "--host-memory", 1, "--offload")),
        (("simulate", *SMALL, "--layers", 3), ("too-few-layers", "--layers", 3, 4)),
        (("simulate", "v-half", "-p", 4, "-m", 8, "--layers", 7), ("too-few-layers", "--layers", 7, 8)),
        (("simulate", *SMALL, "--costs", "1e308,1,1"), ("bad-type", "forward", "1e+308", "1e+30")),
        (("simulate", *SMALL, "--p2p", "1e308"), ("bad-type", "p2p", "1e+308")),
        (("simulate", *SMALL, "--head-cost", "1e308"), ("bad-number", "--head-cost", "1e308", "1e+30")),
        (("simulate", *SMALL, "--memory-cap", "1e308"), ("bad-number", "memory cap", "1e308")),
        (("simulate", "auto", "-p", 4, "-m", 8, "--memory-cap", "6gb"), ("bad-number", "memory cap", "6gb", "6GiB")),
        (("pareto", "-p", 2, "-m", 4, "--seconds", -1), ("bad-number", "--seconds", -1)),
        (("pareto", "-p", 2, "-m", 4, "--seconds", "nan"), ("bad-number", "--seconds", "nan")),
        (("pareto", "-p", 4, "-m", 4, "--layers", 3), ("too-few-layers", "--layers", 3)),
        (("pareto", "-p", 8, "-m", 64, "--output", "x.html"), ("bad-choice", "x.html", ".png", ".svg")),
        (("report", ROOT, "--output", "x.html"), ("bad-choice", "x.html", ".png", ".svg")),
        (("plan", TINY, "--output", "x.csv"), ("bad-choice", "x.csv", ".yaml")),
        (("plan", TINY, "--memory", "60gb"), ("bad-number", "--memory", "60gb")),
        (("plan", TINY, "--search-seconds", "inf"), ("bad-number", "--search-seconds", "inf")),
        (("launch", TINY, "--nodes", 0), ("bad-number", "--nodes", 0)),
        (("launch", TINY, "--master-port", 0), ("bad-number", "--master-port", 0)),
        (("launch", TINY, "--master-port", 65536), ("bad-number", "--master-port", 65536)),
        (("launch", TINY, "--set", "cluster.tflops=.inf"), ("bad-number", "cluster.tflops", "inf")),
        (
            ("launch", TINY, "--set", "parallelism.tp=1000000000000"),
            ("bad-number", "parallelism.tp", 1000000000000, "1,000,000"),
        ),
        (
            ("grid", ROOT / "configs" / "grids" / "tiny-cpu.yaml", "--sbatch=-p"),
            ("conflicting-options", "--sbatch", "-p", "--launcher"),
        ),
        (("profile", TINY, "--formulas", "--tp", 2), ("conflicting-options", "--tp")),
        (("check", ROOT), ("cannot-read", ROOT)),
        (("trace", "nope.json"), ("no-file", "nope.json")),
        (("report", "nope.json"), ("no-file", "nope.json")),
        (("plan", "nope.sh"), ("no-file", "nope.sh")),
        (("plan", "nope.yaml"), ("no-file", "nope.yaml")),
        (("plan", ROOT / "scripts" / "setup.sh"), ("no-file", "setup.sh")),
        (("plan", ROOT / "configs"), ("no-file", ROOT / "configs")),
        (("plan", TINY, "--output", "/mistyped/out.yaml"), ("cannot-write", "/mistyped")),
    ],
)
def test_what_makes_no_sense(refuses, arguments, says):
    check_refusal(refuses(*arguments), *says)


@pytest.mark.parametrize("name", [*load_commands()])
def test_no_command_takes_sizes_of_0(refuses, name):
    """Whatever else it wants: options are looked at first."""
    options = {option for parameter in load_commands()[name].params for option in parameter.opts}
    for option in {"--devices", "--microbatches"} & options:
        check_refusal(refuses(name, "x", option, 0), "bad-number", option, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("simulate", "1f1b", "-p", 4, "-m", 100_000_000),
            ("1,200,000,000", "559 GiB", "20 hours"),
        ),
        (("simulate", "1f1b", "-p", 100_000, "-m", 4), (100_000, 4)),
        (("simulate", "auto", "-p", 4, "-m", 100_000_000), (100_000_000,)),
        (("simulate", "interleaved", "-p", 4, "-m", 8, "-v", 1_000_000), (4, 1_000_000)),
        (("simulate", "seq1f1b", "-p", 4, "-m", 8, "-o", "slices=1000000"), (4, 1_000_000)),
        (("show", "1f1b", "-p", 4, "-m", 100_000_000), (100_000_000,)),
        (("check", "1f1b", "--write", "x.csv", "-p", 4, "-m", 100_000_000), (100_000_000,)),
        (("pareto", "-p", 4, "-m", 100_000_000), (100_000_000,)),
        (("check", "FILE", "-m", 100_000_000), (100_000_000,)),
        (("launch", TINY, "--set", "parallelism.global_batch=100000000"), (100_000_000, 4)),
    ],
)
def test_what_takes_long_is_asked_about(refuses, tmp_path, arguments, says):
    file = tmp_path / "two.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    began = time.process_time()
    line = refuses(*(file if each == "FILE" else each for each in arguments))
    check_refusal(line, "too-large", *says)
    assert time.process_time() - began < 20


def test_a_plan_is_never_too_large(pipemem):
    limits = ("--only", "tp=1", "--only", "pp=4", "--only", "micro_batch=1", "--search-seconds", 0, "--json")
    done = pipemem("plan", TINY, "--set", "parallelism.global_batch=100000000", *limits)
    assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)["plans"][0]
    assert best["microbatches"] == 50_000_000 and best["bubble_rate"] < 1e-6


def test_with_yes_it_goes_on(pipemem, monkeypatch):
    monkeypatch.setattr("megatron_pipemem.schedule.size.LARGE_SECONDS", 0)
    assert pipemem("simulate", *SMALL).exit_code == 2
    assert pipemem("simulate", *SMALL, "--yes").exit_code == 0


def test_sizes_that_people_train_with_are_not_asked_about():
    for p, m, v in ((16, 1024, 2), (64, 512, 2), (128, 128, 2), (8, 4096, 2)):
        assert not estimated(p, m, v).is_large, (p, m, v)


def test_only_orders_that_are_fitted_take_the_cube_of_the_devices():
    fitted = {each.name for each in families() if is_fitted(each.name)}
    assert {"v-half", "v-min", "1f1b-v", "hanayo"} <= fitted and is_fitted("auto")
    assert not fitted & {"1f1b", "interleaved", "gis", "zb-h1"} and not is_fitted("some.csv")
    assert estimated(500, 8, 1).is_large and not estimated(500, 8, 1, fitted=False).is_large
    began = time.process_time()
    simulate(build_schedule("1f1b", num_devices=500, num_microbatches=8))
    assert time.process_time() - began < 3 * estimated(500, 8, 1, fitted=False).seconds


def test_folders_and_full_disks(refuses, tmp_path):
    folder, file = tmp_path / "folder.yaml", tmp_path / "file"
    folder.mkdir()
    file.write_text("kept")
    for arguments in (
        ("plan", TINY, "--output", folder),
        ("plan", TINY, "--output", "/proc/x.yaml"),
        ("plan", TINY, "--output", file / "x.yaml"),
        ("profile", "--model", "tiny-gpt", "--formulas", "--output", tmp_path),
        ("profile", "--model", "tiny-gpt", "--formulas", "--output", "/proc/x.json"),
        ("grid", ROOT / "configs" / "grids" / "tiny-cpu.yaml", "--output", file),
        ("check", *SMALL, "--write", file / "x.csv"),
        ("show", *SMALL, "--output", "/proc/x.png"),
        ("pareto", "-p", 2, "-m", 4, "--output", "/proc/x.png"),
    ):
        check_refusal(refuses(*arguments), "cannot-write")
    assert file.read_text() == "kept" and not list(folder.iterdir())


def test_json_is_json(pipemem, tmp_path):
    """The largest prices there may be."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": 1e30, "backward_input": 1e30, "backward_weight": 0, "p2p": 1e30}))
    for name in ("1f1b", "v-half", "zb-auto"):
        done = pipemem("simulate", name, "-p", 4, "-m", 8, "--costs", costs, "--json")
        assert done.exit_code == 0, done.output

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        assert json.loads(done.stdout, parse_constant=refuse)["makespan"] > 1e31
