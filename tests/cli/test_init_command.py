"""A run file to begin with: it is complete, it is what was asked for, and nothing is overwritten."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from lanes import rest_nightly

from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import SHIPPED, load, settings_of
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.feasibility import feasible

MODELS = sorted(path.stem for path in (SHIPPED / "models").glob("*.yaml"))


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_what_was_asked_for(pipemem, empty):
    asked = ("-p", 4, "--tp", 8, "--dp", 2, "--schedule", "zbv", "--cluster", "h200-141g")
    assert pipemem("init", "llama3-70b", *asked).stdout == "llama3-70b.yaml\n"
    run = load("llama3-70b.yaml", Run)
    cut = run.parallelism
    assert (cut.tp, cut.pp, cut.dp, cut.ranks) == (8, 4, 2, 64) and cut.sequence_parallel
    assert (run.schedule.name, run.cluster.nodes) == ("zbv", 8)
    assert replace(run.cluster, nodes=1) == replace(load("h200-141g", Cluster), nodes=1)
    assert run.flags["use-distributed-optimizer"] is True and run.output == "out/runs/llama3-70b"
    assert feasible(run) is None and "pipemem plan llama3-70b.yaml" in Path("llama3-70b.yaml").read_text()


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        MODELS,
        ("llama3-8b", "deepseek-v3", "nemotron-h-8b", "gemma2-9b", "tiny-gpt", "zb-6.2b"),
        "advise/test_reading.py and scripts/test_launch.py, which read every model",
    ),
)
def test_every_shipped_model_has_a_beginning(pipemem, empty, name):
    """What stands in the way of a run is at most its size, or a layer for which the training script has no flag."""
    told = json.loads(pipemem("init", name, "--json").stdout)
    assert told["output"] == f"{name}.yaml"
    run = load(told["output"], Run)
    assert json.loads(json.dumps(settings_of(run))) == told["run"] and (run.parallelism.pp, run.cluster.nodes) == (4, 1)
    assert told["reason"] is None or "GiB of" in told["reason"] or "geglu" in told["reason"], told["reason"]


@pytest.mark.parametrize(("sizes", "static", "plans"), [(("-p", 2), True, False), (("-p", 2, "--tp", 8), False, True)])
def test_remedies_are_those_that_help(pipemem, empty, sizes, static, plans):
    told = " ".join(pipemem("init", "llama3-70b", *sizes).stderr.split())
    assert ("alone need 609.0 GiB of its device's 76.6 GiB; take more tensor" in told) == static
    assert ("recompute" in told) == (not static) and ("no parallel sizes fit on 8 devices" in told) == (not plans)
    assert "pipemem plan llama3-70b.yaml" in told


def test_layers_that_do_not_divide_get_a_layout(pipemem, empty):
    told = pipemem("init", "deepseek-v3", "-p", 16, "--dp", 64, "--ep", 64)
    assert told.exit_code == 0 and {"81.5", "76.6"} <= set(told.stderr.split())
    said = yaml.safe_load(Path("deepseek-v3.yaml").read_text())
    assert said["pipeline_model_parallel_layout"] == "Et|(t*2|)*29t|tmL"
    assert said["cluster"] == {"base": "h100-80g", "nodes": 128} and said["ep"] == 64


def test_cpu_ranks_and_one_pipeline_rank(pipemem, empty):
    pipemem("init", "tiny-gpt", "--cluster", "cpu", "--output", "a/b.yaml")
    run = load("a/b.yaml", Run)
    assert run.precision == "fp32" and "use-distributed-optimizer" not in run.flags and feasible(run) is None
    pipemem("init", "tiny-gpt", "-p", 1)
    assert load("tiny-gpt.yaml", Run).schedule.name == "stock" and feasible(load("tiny-gpt.yaml", Run)) is None


def test_a_model_of_the_users_own(pipemem, empty):
    Path("models").mkdir()
    Path("models/mine.yaml").write_text("base: llama3-8b\nnum_layers: 16\n")
    assert pipemem("init", "models/mine.yaml", "--output", "runs/first.yaml").exit_code == 0
    assert yaml.safe_load(Path("runs/first.yaml").read_text())["model"] == "../models/mine.yaml"
    assert load("runs/first.yaml", Run).model.layers == 16
    assert pipemem("init", "models/mine.yaml").stdout == "mine.yaml\n"
