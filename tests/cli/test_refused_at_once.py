"""What a command refuses before it computes anything, in one sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_pipemem.cli.app import load_commands
from megatron_pipemem.schedule.core.simulator import simulate
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.size import estimated, is_fitted

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "runs" / "tiny-cpu.yaml"
SMALL = ("1f1b", "-p", 4, "-m", 8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("simulate", *SMALL, "--offload-ratio", 1), "--offload-ratio 1 says how fast"),
        (("simulate", "auto", "-p", 4, "-m", 8, "--offload-ratio", 1), "give --offload too"),
        (("show", *SMALL, "--offload-ratio", 1), "give --offload too"),
        (("simulate", *SMALL, "--host-memory", 1), "--host-memory 1 bounds what --offload sends"),
        (("simulate", *SMALL, "--layers", 3), "--layers 3: the schedule cuts the model into 4 stages"),
        (("simulate", "v-half", "-p", 4, "-m", 8, "--layers", 7), "into 8 stages"),
        (("simulate", *SMALL, "--costs", "1e308,1,1"), "forward is 1e+308; give numbers of at most 1e+30"),
        (("simulate", *SMALL, "--p2p", "1e308"), "p2p is 1e+308; give numbers"),
        (("simulate", *SMALL, "--head-cost", "1e308"), "give a number from 0 to 1e+30"),
        (("simulate", *SMALL, "--memory-cap", "1e308"), "memory cap '1e308'"),
        (("simulate", "auto", "-p", 4, "-m", 8, "--memory-cap", "6gb"), "for 6gb take 6GiB, if that was meant"),
        (("pareto", "-p", 2, "-m", 4, "--seconds", -1), "--seconds -1: give a number of seconds"),
        (("pareto", "-p", 2, "-m", 4, "--seconds", "nan"), "--seconds nan"),
        (("pareto", "-p", 4, "-m", 4, "--layers", 3), "--layers 3"),
        (("pareto", "-p", 8, "-m", 64, "--output", "x.html"), "end it in .png or .svg"),
        (("report", ROOT, "--output", "x.html"), "end it in .png or .svg"),
        (("plan", TINY, "--output", "x.csv"), "end it in .yaml or .yml"),
        (("plan", TINY, "--memory", "60gb"), "--memory '60gb': give a number of bytes, as in 60GiB"),
        (("plan", TINY, "--search-seconds", "inf"), "--search-seconds inf"),
        (("launch", TINY, "--nodes", 0), "--nodes 0: give at least 1"),
        (("launch", TINY, "--master-port", 0), "--master-port 0: give a port"),
        (("launch", TINY, "--master-port", 65536), "--master-port 65536: give a port"),
        (("launch", TINY, "--set", "cluster.tflops=.inf"), "key cluster.tflops: is inf; give at most"),
        (("launch", TINY, "--set", "parallelism.tp=1000000000000"), "give a whole number of at most 1,000,000"),
        (("grid", ROOT / "configs" / "grids" / "tiny-cpu.yaml", "--sbatch=-p"), "--sbatch=-p is for --launcher slurm"),
        (("profile", TINY, "--formulas", "--tp", 2), "--tp is said by the run"),
        (("check", ROOT), "Is a directory"),
        (("trace", "nope.json"), "from nope.json: there is no such file or folder"),
        (("report", "nope.json"), "from nope.json: there is no such file or folder"),
        (("plan", "nope.sh"), "there is no file nope.sh; give the path of a YAML file"),
        (("plan", "nope.yaml"), "there is no file nope.yaml; give the path of a YAML file"),
        (("plan", ROOT / "scripts" / "setup.sh"), "setup.sh is there, and not YAML by its name"),
        (("plan", ROOT / "configs"), "configs is a folder"),
        (("plan", TINY, "--output", "/mistyped/out.yaml"), "there is no folder /mistyped"),
    ],
)
def test_what_makes_no_sense(refuses, arguments, says):
    assert says in refuses(*arguments)


@pytest.mark.parametrize("name", [*load_commands()])
def test_no_command_takes_sizes_of_0(refuses, name):
    """Whatever else it wants: options are looked at first."""
    options = {option for parameter in load_commands()[name].params for option in parameter.opts}
    for option in {"--devices", "--microbatches"} & options:
        assert f"{option} must be at least 1, not 0" in refuses(name, "x", option, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("simulate", "1f1b", "-p", 4, "-m", 100_000_000),
            "1,200,000,000 actions, about 559 GiB of memory and 20 hours",
        ),
        (("simulate", "1f1b", "-p", 100_000, "-m", 4), "--devices 100000 and --microbatches 4 make"),
        (("simulate", "auto", "-p", 4, "-m", 100_000_000), "actions"),
        (("simulate", "interleaved", "-p", 4, "-m", 8, "-v", 1_000_000), "and 1000000 chunks or slices make"),
        (("simulate", "seq1f1b", "-p", 4, "-m", 8, "-o", "slices=1000000"), "actions"),
        (("show", "1f1b", "-p", 4, "-m", 100_000_000), "actions"),
        (("convert", "1f1b", "x.csv", "-p", 4, "-m", 100_000_000), "actions"),
        (("pareto", "-p", 4, "-m", 100_000_000), "actions"),
        (("check", "FILE", "-m", 100_000_000), "actions"),
        (("launch", TINY, "--set", "parallelism.global_batch=100000000"), "a global batch of 100000000 on 4"),
    ],
)
def test_what_takes_long_is_asked_about(refuses, tmp_path, arguments, says):
    file = tmp_path / "two.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    began = time.process_time()
    line = refuses(*(file if each == "FILE" else each for each in arguments))
    assert says in line and line.endswith(" [too-large]"), line
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
        ("convert", *SMALL[:1], file / "x.csv", *SMALL[1:]),
        ("show", *SMALL, "--output", "/proc/x.png"),
        ("pareto", "-p", 2, "-m", 4, "--output", "/proc/x.png"),
    ):
        assert refuses(*arguments).startswith("error: cannot write "), arguments
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
