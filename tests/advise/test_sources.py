"""Scripts and settings of many kinds: the run that bash and the program make of them is the run that is read."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from megatron_pipemem.tools.advise.reading import Reading
from megatron_pipemem.tools.cli.advise import _read
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER
from tests.watching.refusals import refused

CASES = Path(__file__).with_name("cases")


@pytest.fixture(autouse=True)
def in_folder(monkeypatch):
    monkeypatch.chdir(CASES)


def read(*source: str, **variables: str) -> Reading:
    return _read([*source], variables, DEFAULT_CLUSTER, None, None, None)


# layers, tp, pp, devices, global batch
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("case_of_sizes.sh", (48, 4, 8, 32, 64)),
        ("arithmetic.sh", (48, 2, 4, 8, 32)),
        ("defaults.sh", (24, 1, 4, 8, 32)),
        ("arguments.sh 32 4", (32, 1, 4, 8, 32)),
        ("job.sh", (16, 4, 2, 16, 32)),
        ("remote.sh", (16, 1, 2, 16, 32)),
        ("first_call.sh", (32, 1, 8, 64, 128)),
        ("fork.sh", (16, 1, 4, 8, 32)),
        ("swift.sh", (48, 4, 2, 8, 16)),
        ("primus.yaml", (16, 1, 4, 4, 32)),
        ("primus.yaml global_batch_size=64", (16, 1, 4, 4, 64)),
        ("flagscale.yaml", (16, 2, 4, 8, 32)),
        ("flagscale.yaml train.model.num_layers=8", (8, 2, 4, 8, 32)),
        ("-- torchrun --nproc-per-node 4 pretrain_gpt.py --yaml-cfg megatron.yaml", (16, 1, 4, 4, 32)),
        ("bash arguments.sh 32 4", (32, 1, 4, 8, 32)),
    ],
)
def test_sizes(source, expected):
    run = read(*source.removeprefix("-- ").split()).run
    cut = run.parallelism
    assert (run.model.layers, cut.tp, cut.pp, cut.ranks, cut.global_batch) == expected


def test_variables_of_the_user_come_first():
    assert read("case_of_sizes.sh", SIZE="small").run.model.layers == 8


def test_flags_that_a_condition_adds_are_in_the_run():
    assert read("arithmetic.sh").run.flags["tp-comm-overlap"] is True


def test_experts_of_swift_are_not_cut():
    cut = read("swift.sh").run.parallelism
    assert (cut.ep, cut.etp) == (4, 1)


def test_what_is_assumed_or_not_read_is_told():
    assert any("32,000" in sentence for sentence in read("first_call.sh").assumed)
    (sentence,) = read("fork.sh").not_read
    for name in ("--patch-size", "--gemm-gradient-accumulation-fusion", "--schedules-method (another schedule)"):
        assert name in sentence
    assert "--checkpoint-activations (recomputation)" in sentence and "--noop-layers (other layers" in sentence


@pytest.mark.parametrize(
    ("source", "code", "values"),
    [
        ("arguments.sh", "unknown-size", ["argument 1", "argument 2"]),
        ("small_batch.sh", "does-not-divide", [8, 16]),
        ("primus.yaml modules.pre_trainer.overrides.hidden_size=many", "bad-number", ["many"]),
    ],
)
def test_what_cannot_be_right_is_refused(source, code, values):
    with refused(code, *values):
        read(*source.split())


def test_settings_of_other_programs_are_refused_by_name(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text("gconfig: {n_samples: 4}\nactor: {backend: 'megatron:d4p2t1'}\n")
    with refused("wrong-file", "AReaL's"):
        read(str(path))
    path.write_text("modules: {pre_trainer: {model: nowhere.yaml, overrides: {seq_length: 1, micro_batch_size: 1}}}\n")
    with refused("no-file", "nowhere.yaml"):
        read(str(path))
    path.write_text("a: {num_layers: 4, hidden_size: 8}\nb: {num_layers: 5}\n")
    with refused("bad-choice", "num_layers=VALUE"):
        read(str(path))
