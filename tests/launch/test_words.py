"""The keys of a run's file, and the command that each of them leads to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.tools.config.keys import SHORT
from megatron_pipemem.tools.config.loading import load, settings_of, typed
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import script_flags
from megatron_pipemem.tools.launch.grid import points

ROOT = Path(__file__).parents[2] / "configs"
WORDS = json.loads(Path(__file__).with_name("words_of_runs.json").read_text())
"""The flags of every shipped run, as they were when its file had other keys."""


def words(run: Run) -> str:
    flags: list[str] = []
    for word in script_flags(run):
        flags.append(word) if word.startswith("--") else flags.append(f"{flags.pop()} {word}")
    return " ".join(sorted(flags))


def test_every_shipped_run_has_its_words():
    assert {path.stem: words(load(path, Run)) for path in (ROOT / "runs").glob("*.yaml")} == WORDS


@pytest.mark.parametrize("grid", ["tiny-cpu", "pipeoffload-figure-11", "controllable-memory-table-3"])
def test_a_written_run_is_read_as_it_was(grid, monkeypatch):
    monkeypatch.setattr(points, "feasible", lambda run, any_size: None)
    for point in points.load_points(ROOT / "grids" / f"{grid}.yaml", any_size=True):
        assert typed(settings_of(point.run), Run) == point.run


def test_an_argument_says_what_its_short_key_says():
    values = {"schedule": "interleaved"}
    short = {key: values.get(key, 2) for key in SHORT}
    run = typed({"model": "tiny-gpt", "cluster": "cpu", **short}, Run)
    assert (
        typed({"model": "tiny-gpt", "cluster": "cpu"} | {SHORT[key]: value for key, value in short.items()}, Run) == run
    )
    assert settings_of(run).items() >= short.items()


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        (["disable_bias_linear=true"], ["model.add_bias_linear=false"]),
        (["swiglu=true", "num_layers=4"], ["model.swiglu=true", "model.num_layers=4"]),
        (["apply_rope_fusion=false"], ["no_rope_fusion=true"]),
        (["apply_rope_fusion=true"], []),
        (["recompute_activations=true"], ["recompute_granularity=selective"]),
        (
            ["pipemem_recompute=selective"],
            ["recompute_granularity=selective", "recompute_modules=[core_attn, layernorm, activation]"],
        ),
        (["pipemem_recompute=selective", "recompute_granularity=full"], ["recompute_granularity=full"]),
        (["tensor_model_parallel_size=2", "tp=4"], ["tp=4"]),
        (["fp16=true"], ["bf16=false", "fp16=true"]),
    ],
)
def test_other_ways_to_say_the_same(changes, same):
    def tiny(*overrides: str) -> Run:
        return load(ROOT / "runs" / "tiny-cpu.yaml", Run, overrides)

    assert words(tiny(*changes)) == words(tiny(*same)) and tiny(*changes).model == tiny(*same).model


def test_a_file_changes_arguments_of_its_base(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: tiny-cpu\nglobal_batch_size: 16\nnum_layers: 4\nlr: null\n")
    run = load(tmp_path / "mine.yaml", Run)
    assert (run.parallelism.global_batch, run.parallelism.pp, run.model.layers, run.model.hidden) == (16, 4, 4, 64)
    assert run.flags["lr"] is None and run.flags["seed"] == 1234


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("parallelism: {tp: 2}", "old-key", ("parallelism.tp", "tp")),
        ("schedule: {vocab_parallel: 2}", "old-key", ("schedule.vocab_parallel", "pipemem_vocab_parallel")),
        ("schedule: {name: zbv}", "old-key", ("schedule.name",)),
        ("training: {iterations: 3}", "old-key", ("training.iterations", "train_iters")),
        ("megatron: {clip-grad: 1}", "old-key", ("megatron.clip-grad", "clip_grad")),
        ("precision: bf16", "old-key", ("precision", "bf16")),
        ("tp: 2\ntensor_model_parallel_size: 2", "given-twice", ("tensor_model_parallel_size",)),
        ("globl_batch: 2", "unknown-key", ("globl_batch", "global_batch")),
        ("pp: 0", "bad-number", ("pp",)),
        ("pipemem_memory_cap: [1]", "bad-type", ("pipemem_memory_cap",)),
        ("disable_bias_linear: 1", "bad-type", ("disable_bias_linear",)),
        ("apply_rope_fusion: 1", "bad-type", ("apply_rope_fusion",)),
        ("cluster.nodes: 2", "unknown-key", ("cluster.nodes",)),
        ("--lr: 2", "bad-syntax", ("--lr", "lr")),
        ("swiglu: 3", "bad-type", ("model.swiglu",)),
    ],
)
def test_a_wrong_key_is_named(tmp_path, text, code, values):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: tiny-cpu\n{text}\n")
    with refused(code, *values, kind=ConfigError) as raised:
        load(path, Run)
    assert raised.value.file == str(path)
    section, _, inner = text.partition(": {")
    if code == "old-key" and inner:
        with refused(code, *values, kind=ConfigError):
            load("tiny-cpu", Run, [f"{section}.{inner.strip('}').replace(': ', '=')}"])
