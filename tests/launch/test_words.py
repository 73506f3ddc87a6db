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
from megatron_pipemem.tools.launch.command import Nodes, command, min_nodes, script_flags
from megatron_pipemem.tools.launch.grid import points

ROOT = Path(__file__).parents[2] / "configs"
WORDS = json.loads(Path(__file__).with_name("words_of_runs.json").read_text())
"""The flags of every shipped run, as they were when its file had other keys."""


def tiny(*overrides: str) -> Run:
    return load(ROOT / "runs" / "tiny-cpu.yaml", Run, overrides)


def flags(run: Run) -> list[str]:
    """Every flag of a run with its values, in the order of the alphabet. A flag that comes twice is an error."""
    lines: list[str] = []
    for word in script_flags(run):
        lines.append(word if word.startswith("--") else f"{lines.pop()} {word}")
    assert len({line.split()[0] for line in lines}) == len(lines)
    return sorted(lines)


def words(run: Run) -> str:
    return " ".join(flags(run))


def test_every_shipped_run_has_its_words():
    assert {path.stem: words(load(path, Run)) for path in (ROOT / "runs").glob("*.yaml")} == WORDS


@pytest.mark.parametrize(
    ("overrides", "connections"),
    [
        ((), "1"),
        (("cluster.base=b200",), None),
        (("tp=1", "sequence_parallel=false"), None),
        (("tp=1", "sequence_parallel=false", "cp=2"), "1"),
        (("environment={CUDA_DEVICE_MAX_CONNECTIONS: 8}",), "8"),
    ],
)
def test_ranks_have_the_environment_without_which_megatron_stops(overrides, connections):
    run = load(ROOT / "runs" / "llama3-70b-64xh100.yaml", Run, overrides)
    nodes = Nodes(min_nodes(run), 0, "first")
    assert command(run, nodes).environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


ADDED = """
dp=3 tp=2 pp=2 micro_batch=2 sequence_parallel=true | --tensor-model-parallel-size 2, --pipeline-model-parallel-size 2, \
--micro-batch-size 2, --sequence-parallel
global_batch=24 ep=2 etp=1 cp=2 | --global-batch-size 24, --expert-model-parallel-size 2, --expert-tensor-parallel-size 1, \
--context-parallel-size 2
schedule=interleaved chunks=2 pipemem_costs=profile pipemem_rng=layerwise pipemem_microbatch_costs=FLOPs | \
--pipemem-schedule interleaved, --pipemem-option=chunks=2, --pipemem-costs profile, --pipemem-rng layerwise, \
--pipemem-microbatch-costs FLOPs
schedule=seq1f1b slices=4 pipemem_memory_cap=0.9 pipemem_vocab_cut=2 | --pipemem-schedule seq1f1b, \
--pipemem-option=slices=4, --pipemem-memory-cap 0.9, --pipemem-vocab-cut 2
schedule=stock chunks=2 | --pipemem-schedule stock, --num-virtual-stages-per-pipeline-rank 2
pipemem_offload=off pipemem_vocab_cut='off' |
pipemem_offload=false pipemem_vocab_cut=false |
cluster.switches=[[0,1],[2,3]] |
cluster.switches=[[0,1],[2,3]] pipemem_offload=half | --pipemem-offload half, \
--pipemem-offload-option=switches=[[0,1],[2,3]]
recompute_granularity=none recompute_modules=[core_attn,layernorm] |
recompute_granularity=selective recompute_modules=[core_attn,layernorm] | --recompute-granularity selective, \
--recompute-modules core_attn layernorm
recompute_granularity=full | --recompute-granularity full, --recompute-method uniform, --recompute-num-layers 1
recompute_granularity=full recompute_method=block recompute_num_layers=2 | --recompute-granularity full, \
--recompute-method block, --recompute-num-layers 2
pipemem_overlap_steps=true | --pipemem-overlap-steps, --log-interval 10, --rerun-mode disabled
pipemem_overlap_steps=true log_interval=5 | --pipemem-overlap-steps, --log-interval 5, --rerun-mode disabled
save_interval=5 load=pretrained output=here | --save here/checkpoints, --save-interval 5, --load here/checkpoints, \
--pretrained-checkpoint pretrained, --exit-signal-handler, --exit-signal SIGUSR1, --pipemem-report here/report.json
load=pretrained data_cache_path=c | --load pretrained, --data-cache-path c
data_path='.3_a' | --data-path .3_a
bf16=true | --bf16
lr=0.5 eval_iters=3 log_throughput=true seed=null split=[1,2] | --lr 0.5, --eval-iters 3, --log-throughput, --split 1 2
trace=true | --pipemem-trace out/runs/tiny-cpu/timelines
"""
"""Changes of the tiny run, and the flags that they add to its command or change there."""


@pytest.mark.parametrize("row", ADDED.split("\n")[1:-1])
def test_keys_become_flags(row):
    changes, expected = row.split("|")
    changed = set(flags(tiny(*changes.split()))) - set(flags(tiny()))
    assert changed == {flag.strip() for flag in expected.split(", ") if flag.strip()}


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
        ("schedule: {vocab_parallel: 2}", "old-key", ("schedule.vocab_parallel", "pipemem_vocab_cut")),
        ("pipemem_random: layerwise", "old-key", ("pipemem_random", "pipemem_rng")),
        ("schedule: {name: zbv}", "old-key", ("schedule.name",)),
        ("training: {iterations: 3}", "old-key", ("training.iterations", "train_iters")),
        ("megatron: {clip-grad: 1}", "old-key", ("megatron.clip-grad", "clip_grad")),
        ("precision: bf16", "old-key", ("precision", "bf16")),
        ("tp: 2\ntensor_model_parallel_size: 2", "given-twice", ("tensor_model_parallel_size",)),
        ("globl_batch: 2", "unknown-key", ("globl_batch", "global_batch")),
        ("colour_of_the_hat: 2", "unknown-key", ("colour_of_the_hat", "script")),
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
