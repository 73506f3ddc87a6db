"""The plugin's flags on a Megatron command line."""

from __future__ import annotations

import sys

import pytest
import yaml
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from refusals import refused

from megatron_pipemem.errors import UnknownScheduleError, UnsupportedError
from megatron_pipemem.mcore.launch import add_virtual_stages, enable_from_command_line, take_flags
from megatron_pipemem.mcore.plugin import enable
from megatron_pipemem.model.layout import read
from megatron_pipemem.schedule import registry
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.registry import build_schedule

MEGATRON = ["--num-layers", "8", "--bf16", "--lr", "1e-4", "--pipeline-model-parallel-size", "4"]


def test_takes_our_flags_and_leaves_megatrons_in_order():
    first = "--num-layers 8 --pipemem-schedule v-half --bf16 --pipemem-memory-cap=0.75 --pipemem-report out/report.json"
    settings, others = take_flags([*first.split(), *MEGATRON[3:]])
    assert others == MEGATRON
    assert (settings.schedule, settings.memory_cap, settings.report) == (
        "v-half",
        MemoryCap(0.75, False),
        "out/report.json",
    )


def test_takes_a_schedule_file(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(build_schedule("v-min", num_devices=4, num_microbatches=8).to_csv())
    settings, others = take_flags([*MEGATRON, "--pipemem-schedule", str(path)])
    assert settings.schedule == str(path)
    assert add_virtual_stages(settings, others) == [*MEGATRON, "--num-virtual-stages-per-pipeline-rank", "2"]


def test_without_our_flags_nothing_happens():
    assert take_flags(MEGATRON) == (None, MEGATRON)
    assert enable_from_command_line(MEGATRON) == MEGATRON


def test_changes_the_processs_own_command_line_in_place(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *MEGATRON])
    assert enable_from_command_line() == MEGATRON
    assert sys.argv == ["pretrain_gpt.py", *MEGATRON]


def test_a_module_adds_the_schedule_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    path = tmp_path / "deep.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from megatron_pipemem.families.v_shape import ZBV\n"
        "FAMILY = replace(ZBV, name='deep')\n"
    )
    with pytest.raises(UnknownScheduleError):
        take_flags(["--pipemem-schedule", "deep"])
    settings, others = take_flags([*MEGATRON, "--pipemem-schedule", "deep", "--pipemem-schedule-module", str(path)])
    assert settings.schedule_module == str(path)
    assert add_virtual_stages(settings, others) == [*MEGATRON, "--num-virtual-stages-per-pipeline-rank", "2"]
    with refused("cannot-import", "gone.py", kind=UnsupportedError):
        take_flags(["--pipemem-schedule", "deep", "--pipemem-schedule-module", "gone.py"])


@pytest.mark.parametrize("schedule", ["v-half", "stock"])
def test_a_report_that_no_step_will_fill_is_said_at_the_start(schedule, caplog):
    asked = [*MEGATRON, "--pipemem-schedule", schedule, "--pipemem-report", "out.json", "--pipemem-trace", "drawn"]
    for flags, warns in (([], False), (["--skip-train"], True)):
        caplog.clear()
        add_virtual_stages(*take_flags([*asked, *flags]))
        assert [record.levelname for record in caplog.records if "out.json" in record.getMessage()] == [
            "WARNING"
        ] * warns


REFUSED = r"""
--pipemem-schedule v-halff | unknown-schedule 'v-half'
--pipemem-report x.json | unknown-flag --pipemem-schedule
--pipemem-schedule | bad-syntax
--pipemem-schedule none.csv | no-file none.csv
v-half --pipemem-colour red | unknown-flag --pipemem-colour
v-half --pipemem-vocab-parallel=2 | old-key --pipemem-vocab-cut
zb-h1 --pipemem-early-weights none | old-key --pipemem-early-wgrad
v-half --pipemem-memory-cap lots | bad-number 'lots'
v-half --pipemem-memory-cap 6GiB | unit-mismatch 6.00GiB auto
v-half --pipemem-slice-cut flops | no-slices --pipemem-option 4
1f1b --pipemem-slice-cut flops | no-slices
stock --pipemem-slice-cut flops | no-slices
auto --pipemem-slice-cut flops | no-slices
seq1f1b --pipemem-slice-cut time | bad-choice --pipemem-slice-cut time
auto --pipemem-option placement=w | bad-choice interleaved
auto --pipemem-option seed=--5 | bad-number seed
auto --pipemem-option chunks=2.5 | bad-number chunks
interleaved --pipemem-option chunks | bad-syntax KEY=VALUE
interleaved --pipemem-option chunks= | bad-syntax KEY=VALUE
po-h --pipemem-option chunks=abc | bad-number chunks
1f1b --pipemem-vocab-cut 3 | bad-choice 1 2
1f1b --pipemem-vocab-piece-tokens 16 | needs-option --pipemem-vocab-cut 1 2
1f1b --pipemem-vocab-piece-tokens 0 --pipemem-vocab-cut 2 | bad-number 1
1f1b --pipemem-vocab-piece-tokens x | bad-number
stock --pipemem-overlap-steps | not-for-stock
stock --pipemem-microbatch-costs tokens | not-for-stock
pipedream --pipemem-overlap-steps | conflicting-features
pipedream-2bw --pipemem-microbatch-costs tokens | conflicting-features
pipedream-2bw --pipemem-offload full | conflicting-features --pipemem-offload
pipedream-2bw --pipemem-vocab-cut 1 | conflicting-features --pipemem-vocab-cut
pipedream-2bw --pipemem-costs profile | conflicting-features --pipemem-costs
pipedream-2bw --pipemem-option update_every=8 | has-own-flag --global-batch-size
zbv --pipemem-overlap-steps --pipemem-vocab-cut 1 | no-overlap --pipemem-vocab-cut
zbv --pipemem-overlap-steps --pipemem-offload full | no-overlap --pipemem-offload
zbv --pipemem-overlap-steps --pipemem-microbatch-costs tokens | no-overlap --pipemem-microbatch-costs
chimera --pipemem-overlap-steps | no-overlap chimera
1f1b --pipeline-model-parallel-size 1 | no-pipeline --pipeline-model-parallel-size 2
v-half --pipeline-model-parallel-size=1 | no-pipeline
auto --pipeline-model-parallel-size 1 | no-pipeline
zb-h1 --num-layers eight | bad-number
zb-h1 --num-layers 8.0 | bad-number
zb-h1 --pipeline-model-parallel-size | bad-number
zb-h1 --num-distributed-optimizer-instances two | bad-number
zb-h1 --sft --micro-batch-size x | bad-number
zb-h1 --cuda-graph-impl full_iteration --cuda-graph-warmup-steps x | bad-number
zb-h1 --rerun-mode disabled --pipemem-overlap-steps --clip-grad x | bad-number
zb-h1 --pipemem-layout auto --tensor-model-parallel-size x | bad-number
zb-h1 --pipemem-single-queue=3 | bad-syntax
zb-h1 --pipemem-report | bad-syntax
v-half --num-layers 6 | too-few-layers 6 8
v-half --num-layers 9 --decoder-last-pipeline-num-layers 6 | too-few-layers 9 8
interleaved --num-layers 13 --decoder-first-pipeline-num-layers 1 | does-not-divide 1 2
"""
"""Flags after those of MEGATRON, then the code of the error and the values that its message names."""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_wrong_flags_are_refused(row):
    flags, _, expected = row.partition(" | ")
    code, *values = expected.split()
    words = flags.split() if flags.startswith("--") else ["--pipemem-schedule", *flags.split()]
    with refused(code, *values):
        add_virtual_stages(*take_flags([*MEGATRON, *words]))


@pytest.mark.parametrize(
    ("schedule", "cut", "added"),
    [
        ("v-half", [], ["--num-virtual-stages-per-pipeline-rank", "2"]),
        ("interleaved", [], ["--num-virtual-stages-per-pipeline-rank", "2"]),
        ("zb-h1", [], []),
        ("stock", [], []),
        ("auto", [], ["--num-virtual-stages-per-pipeline-rank", "2"]),
        ("auto", ["--pipeline-model-parallel-layout", "Et|t|t|tL"], []),
        ("v-half", ["--pipeline-model-parallel-layout", "Et|(t|)*6tL"], []),
        ("v-half", ["--num-virtual-stages-per-pipeline-rank=2"], []),
        ("interleaved", ["--num-layers-per-virtual-pipeline-stage", "1"], []),
    ],
)
def test_asks_megatron_for_the_chunks_the_schedule_needs(schedule, cut, added):
    settings, others = take_flags([*MEGATRON, *cut, "--pipemem-schedule", schedule])
    assert add_virtual_stages(settings, others) == [*MEGATRON, *cut, *added]


@pytest.fixture
def plan_file(tmp_path):
    """A run that ``pipemem plan`` could have written: a searched order of four chunks in a file."""
    order = tmp_path / "best.csv"
    order.write_text(build_schedule("gis", num_devices=2, num_microbatches=4, chunks=4).to_csv())
    model = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000, "seq_length": 64}
    model |= {"untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    parallelism = {"tp": 2, "pp": 2, "chunks": 4, "micro_batch": 2, "global_batch": 8}
    run = {"model": model, "cluster": "cpu", **parallelism, "schedule": str(order), "clip_grad": 0}
    file = tmp_path / "best.yaml"
    file.write_text(yaml.safe_dump(run))
    return str(file)


def test_a_plan_adds_what_the_command_line_lacks(plan_file):
    settings, others = take_flags(
        ["--num-layers", "8", "--pipemem-plan", plan_file, "--train-iters", "3", "--clip-grad=0"]
    )
    assert settings.schedule.endswith("best.csv") and settings.options == {}
    assert others[:5] == ["--num-layers", "8", "--train-iters", "3", "--clip-grad=0"]
    words = " ".join(others)
    for flag in ("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--hidden-size 64"):
        assert words.count(flag) == 1
    assert words.count("--clip-grad") == words.count("--num-layers") == 1
    assert add_virtual_stages(settings, others)[-1] == "4"


def test_a_plan_holds_only_for_what_it_was_made_for(plan_file):
    with refused("plan-differs", "--num-layers", 9, 8, "best.yaml", kind=UnsupportedError):
        take_flags(["--pipemem-plan", plan_file, "--num-layers", "9"])
    with refused("plan-differs", "--pipemem-schedule", "v-half", kind=UnsupportedError):
        take_flags(["--pipemem-plan", plan_file, "--pipemem-schedule", "v-half"])
    with refused("no-file", "nothere.yaml"):
        take_flags(["--pipemem-plan", "nothere.yaml"])


@pytest.mark.parametrize(
    ("schedule", "flags", "layers"),
    [
        ("v-half", "--num-layers 10", [1, 2, 2, 1, 1, 1, 1, 1]),
        ("v-half", "--num-layers 10 --num-virtual-stages-per-pipeline-rank=2", [1, 2, 2, 1, 1, 1, 1, 1]),
        ("zb-h1", "--num-layers 10", [2, 3, 3, 2]),
        ("zb-h1", "--num-layers 10 --account-for-loss-in-pipeline-split", [2, 3, 3, 2]),
        ("v-half", "--num-layers 16 --decoder-first-pipeline-num-layers 2", [1, 2, 3, 2, 2, 2, 2, 2]),
        (
            "hanayo",
            "--num-layers 24 --decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 4",
            [2, 1, *[2] * 7, *[1] * 7],
        ),
    ],
)
def test_a_layout_replaces_a_cut_that_megatron_does_not_make(schedule, flags, layers, caplog):
    words = ["--pipeline-model-parallel-size", "4", "--mtp-num-layers", "1", *flags.split(), "--bf16"]
    settings, others = take_flags([*words, "--pipemem-schedule", schedule])
    with caplog.at_level("INFO"):
        *rest, layout = add_virtual_stages(settings, others)
    assert rest == ["--pipeline-model-parallel-size", "4", "--mtp-num-layers", "1", *flags.split()[:2], "--bf16"]
    text = layout.removeprefix("--pipeline-model-parallel-layout=")
    stages = PipelineParallelLayerLayout.from_str(text, 4).layout
    by_stage = [stages[stage % 4][stage // 4] for stage in range(len(layers))]
    assert [stage.count(LayerType.decoder) for stage in by_stage] == layers
    assert by_stage[-1].count(LayerType.mtp) == 1 and text in caplog.text


SIZES = (
    "--pipeline-model-parallel-size 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 128000 "
    "--micro-batch-size 1 --global-batch-size 16"
)
LAYERS = "--num-layers 30"


@pytest.mark.parametrize(
    ("schedule", "flags", "stages"),
    [
        ("stock", LAYERS, 4),
        ("stock", f"{LAYERS} --num-virtual-stages-per-pipeline-rank 2", 8),
        ("stock", f"{LAYERS} --mtp-num-layers 1 --pipeline-model-parallel-layout Et*7|t*8|t*8|t*7mL", 4),
        ("v-half", f"{LAYERS} --decoder-first-pipeline-num-layers 2", 8),
        ("interleaved", f"{LAYERS} --num-virtual-stages-per-pipeline-rank=3", 12),
        ("v-half", "--hybrid-override-pattern M*-M*-M*-M*-|M*-M*-M*-M*-", 8),
        ("auto", LAYERS, 8),
        ("auto --pipemem-option placement=linear --pipemem-option seconds=0 --pipemem-memory-cap 0.8", LAYERS, 4),
        ("zb-h1 --pipemem-vocab-cut auto", LAYERS, 4),
        ("pipedream-2bw", LAYERS, 4),
        ("seq1f1b --pipemem-option slices=4", LAYERS, 4),
    ],
)
def test_layout_auto_replaces_the_cut(schedule, flags, stages, caplog):
    given, ours = flags.split(), f"--pipemem-schedule {schedule} --pipemem-layout auto"
    settings, others = take_flags([*SIZES.split(), *given, *ours.split()])
    with caplog.at_level("INFO"):
        *rest, layout = add_virtual_stages(settings, others)
    name, text = layout.removeprefix("--").split("=")
    of_layout = name in ("hybrid-override-pattern", "pipeline-model-parallel-layout")
    assert of_layout and rest == [*SIZES.split(), *([] if "pattern" in name else given[: 4 if "mtp" in flags else 2])]
    counts = [len(segment) for segment in text.split("|")] if "pattern" in name else read(text)
    assert len(counts) == stages and sum(counts) == (24 if "pattern" in name else 31 if "mtp" in flags else 30)
    assert counts[-1] < max(counts), "the head takes as long as some layers"
    assert layout.removeprefix("--").replace("=", " '") in caplog.text and "% longer" in caplog.text


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--pipemem-schedule stock --pipeline-model-parallel-size 1", "no-pipeline"),
        ("--pipemem-schedule stock --tensor-model-parallel-size 5", "does-not-divide"),
    ],
)
def test_layout_auto_says_what_it_cannot_price(flags, code):
    settings, others = take_flags([*SIZES.split(), *LAYERS.split(), *flags.split(), "--pipemem-layout", "auto"])
    with refused(code):
        add_virtual_stages(settings, others)


def test_layout_auto_needs_a_command_line():
    with refused("unsupported-setting", "enable_from_command_line"):
        enable("v-half", layout="auto")


def test_steps_overlap_only_if_asked():
    asked = ["--pipemem-schedule", "zbv"]
    plain, _ = take_flags(asked)
    assert not plain.overlap_steps
    settings, others = take_flags([*MEGATRON, *asked, "--pipemem-overlap-steps"])
    assert others == MEGATRON and settings.overlap_steps
    searched, _ = take_flags(["--pipemem-schedule", "auto", "--pipemem-overlap-steps", "--pipemem-option", "seed=3"])
    assert searched.searches_period and searched.options == {"seed": 3}, (
        "the order whose steps follow each other soonest"
    )


def test_how_sequences_are_cut_comes_from_the_command_line():
    for schedule in (["seq1f1b"], ["v-half", "--pipemem-option", "slices=2"]):
        assert take_flags(["--pipemem-schedule", *schedule, "--pipemem-slice-cut", "flops"])[0].slice_cut == "flops"
