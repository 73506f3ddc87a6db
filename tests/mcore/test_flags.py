"""The plugin's flags on a Megatron command line."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import yaml
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from refusals import refused

from megatron_pipemem.errors import PipememError, ScheduleFormatError, UnknownScheduleError, UnsupportedError
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
    found = settings.schedule, settings.memory_cap, settings.report
    assert found == ("v-half", MemoryCap(0.75, False), "out/report.json")


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


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--pipemem-schedule", "v-halff"], UnknownScheduleError, "v-half"),
        (["--pipemem-report", "x.json"], UnsupportedError, "--pipemem-schedule is missing"),
        (["--pipemem-schedule", "v-half", "--pipemem-colour", "red"], UnsupportedError, "--pipemem-colour"),
        (["--pipemem-schedule"], UnsupportedError, "expected one argument"),
        (["--pipemem-schedule", "v-half", "--pipemem-memory-cap", "lots"], UnsupportedError, "'lots'"),
        (["--pipemem-schedule", "v-half", "--pipemem-memory-cap", "6GiB"], UnsupportedError, "auto"),
        (["--pipemem-schedule", "auto", "--pipemem-option", "placement=w"], UnsupportedError, "interleaved"),
        (["--pipemem-schedule", "none.csv"], ScheduleFormatError, "none.csv"),
        (["--pipemem-schedule", "interleaved", "--pipemem-option", "chunks"], UnsupportedError, "KEY=VALUE"),
        (["--pipemem-schedule", "interleaved", "--pipemem-option", "chunks="], UnsupportedError, "KEY=VALUE"),
        (["--pipemem-schedule", "po-h", "--pipemem-option", "chunks=abc"], UnsupportedError, "chunks must be a whole"),
        (["--pipemem-schedule", "auto", "--pipemem-option", "seed=--5"], UnsupportedError, "seed of a search"),
        (["--pipemem-schedule", "auto", "--pipemem-option", "chunks=2.5"], UnsupportedError, "chunks of a search"),
    ],
)
def test_bad_flags_are_refused_in_words(flags, error, words):
    with pytest.raises(error) as raised:
        take_flags([*MEGATRON, *flags])
    assert words in str(raised.value)
    assert isinstance(raised.value, PipememError)


@pytest.mark.parametrize(
    ("schedule", "given", "added"),
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
def test_asks_megatron_for_the_chunks_the_schedule_needs(schedule, given, added):
    settings, others = take_flags([*MEGATRON, *given, "--pipemem-schedule", schedule])
    assert add_virtual_stages(settings, others) == [*MEGATRON, *given, *added]


@pytest.fixture
def plan_file(tmp_path):
    """A run that ``pipemem plan`` could have written: a searched order of four chunks in a file."""
    order = tmp_path / "best.csv"
    order.write_text(build_schedule("gis", num_devices=2, num_microbatches=4, chunks=4).to_csv())
    model = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000, "seq_length": 64}
    model |= {"untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    parallelism = {"tp": 2, "pp": 2, "chunks": 4, "micro_batch": 2, "global_batch": 8}
    run = {"model": model, "cluster": "cpu", "parallelism": parallelism, "schedule": {"name": str(order)}}
    run["megatron"] = {"clip-grad": 0}
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


def test_a_plan_that_is_not_there_is_named(tmp_path):
    with refused("no-file", "nothere.yaml"):
        take_flags(["--pipemem-plan", "nothere.yaml"])


@pytest.mark.parametrize(
    "pipeline", [[], ["--pipeline-model-parallel-size", "1"], ["--pipeline-model-parallel-size=1"]]
)
@pytest.mark.parametrize("schedule", ["1f1b", "v-half", "auto"])
def test_without_a_pipeline_there_is_nothing_to_schedule(schedule, pipeline):
    settings, others = take_flags(["--num-layers", "8", *pipeline, "--pipemem-schedule", schedule])
    with refused("no-pipeline", "--pipeline-model-parallel-size", 2, kind=UnsupportedError):
        add_virtual_stages(settings, others)
    settings, others = take_flags([*pipeline, "--pipemem-schedule", "stock"])
    assert add_virtual_stages(settings, others) == pipeline


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
        *rest, found = add_virtual_stages(settings, others)
    assert rest == ["--pipeline-model-parallel-size", "4", "--mtp-num-layers", "1", *flags.split()[:2], "--bf16"]
    text = found.removeprefix("--pipeline-model-parallel-layout=")
    stages = PipelineParallelLayerLayout.from_str(text, 4).layout
    by_stage = [stages[stage % 4][stage // 4] for stage in range(len(layers))]
    assert [each.count(LayerType.decoder) for each in by_stage] == layers
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
        ("zb-h1 --pipemem-vocab-parallel auto", LAYERS, 4),
        ("pipedream-2bw", LAYERS, 4),
        ("seq1f1b --pipemem-option slices=4", LAYERS, 4),
    ],
)
def test_layout_auto_replaces_the_cut(schedule, flags, stages, caplog):
    given, ours = flags.split(), f"--pipemem-schedule {schedule} --pipemem-layout auto"
    settings, others = take_flags([*SIZES.split(), *given, *ours.split()])
    with caplog.at_level("INFO"):
        *rest, found = add_virtual_stages(settings, others)
    name, text = found.removeprefix("--").split("=")
    of_layout = name in ("hybrid-override-pattern", "pipeline-model-parallel-layout")
    assert of_layout and rest == [*SIZES.split(), *([] if "pattern" in name else given[: 4 if "mtp" in flags else 2])]
    counts = [len(each) for each in text.split("|")] if "pattern" in name else read(text)
    assert len(counts) == stages and sum(counts) == (24 if "pattern" in name else 31 if "mtp" in flags else 30)
    assert counts[-1] < max(counts), "the head takes as long as some layers"
    assert found.removeprefix("--").replace("=", " '") in caplog.text and "% longer" in caplog.text


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


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--sft",), None),
        (("--sft", "--context-parallel-size", "2"), None),
        (("--sft", "--micro-batch-size", "2"), "--micro-batch-size"),
        (("--dataloader-inter-document-masking", "--micro-batch-size", "2"), "--micro-batch-size"),
        (("--dataloader-inter-document-masking", "--context-parallel-size", "2"), "--context-parallel-size"),
        (("--recompute-granularity", "selective", "--recompute-modules", "mlp"), "--disable-bias-linear"),
        (("--recompute-granularity", "selective", "--recompute-modules", "mlp", "--disable-bias-linear"), None),
    ],
)
def test_what_megatron_trains_wrongly_is_refused(flags, remedy):
    words = [*SIZES.split(), *LAYERS.split(), *flags, "--pipemem-schedule", "zb-h1"]
    with refused("unsupported-setting", remedy, kind=UnsupportedError) if remedy else nullcontext():
        add_virtual_stages(*take_flags(words))


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--num-layers eight", "bad-number"),
        ("--num-layers 8.0", "bad-number"),
        ("--pipeline-model-parallel-size", "bad-number"),
        ("--num-distributed-optimizer-instances two", "bad-number"),
        ("--sft --micro-batch-size x", "bad-number"),
        ("--cuda-graph-impl full_iteration --cuda-graph-warmup-steps x", "bad-number"),
        ("--rerun-mode disabled --pipemem-overlap-steps --clip-grad x", "bad-number"),
        ("--pipemem-vocab-piece-tokens x", "bad-number"),
        ("--pipemem-layout auto --tensor-model-parallel-size x", "bad-number"),
        ("--pipemem-single-queue=3", "bad-syntax"),
        ("--pipemem-report", "bad-syntax"),
        ("--pipemem-colour red", "unknown-flag"),
    ],
)
def test_a_wrong_value_is_no_unknown_flag(flags, code):
    with refused(code):
        add_virtual_stages(*take_flags([*MEGATRON, "--pipemem-schedule", "zb-h1", *flags.split()]))


def test_fewer_layers_than_stages_are_refused():
    words = ["--pipeline-model-parallel-size", "4", "--num-layers"]
    settings, others = take_flags([*words, "6", "--pipemem-schedule", "v-half"])
    with refused("too-few-layers", 6, 8, kind=UnsupportedError):
        add_virtual_stages(settings, others)
    settings, others = take_flags(
        [*words, "9", "--decoder-last-pipeline-num-layers", "6", "--pipemem-schedule", "v-half"]
    )
    with refused("too-few-layers", 9, 8, kind=UnsupportedError):
        add_virtual_stages(settings, others)
    settings, others = take_flags(
        [*words, "13", "--decoder-first-pipeline-num-layers", "1", "--pipemem-schedule", "interleaved"]
    )
    with refused("does-not-divide", 1, 2, kind=UnsupportedError):
        add_virtual_stages(settings, others)


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


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["stock", "--pipemem-overlap-steps"], ("not-for-stock",)),
        (["pipedream", "--pipemem-overlap-steps"], ("conflicting-features",)),
        (
            ["zbv", "--pipemem-overlap-steps", "--pipemem-vocab-parallel", "1"],
            ("no-overlap", "--pipemem-vocab-parallel"),
        ),
        (["zbv", "--pipemem-overlap-steps", "--pipemem-offload", "full"], ("no-overlap", "--pipemem-offload")),
        (["chimera", "--pipemem-overlap-steps"], ("no-overlap", "chimera")),
        (
            ["zbv", "--pipemem-overlap-steps", "--pipemem-microbatch-costs", "tokens"],
            ("no-overlap", "--pipemem-microbatch-costs"),
        ),
    ],
)
def test_what_cannot_overlap_is_refused(flags, sentence):
    with refused(*sentence, kind=UnsupportedError):
        take_flags([*MEGATRON, "--pipemem-schedule", *flags])


def test_what_needs_a_barrier_is_refused_before_the_model_is_built():
    ours = ["--pipemem-schedule", "zb-h2", "--pipemem-overlap-steps"]
    sizes = ["--pipeline-model-parallel-size", "4", "--num-layers", "8"]
    free = [*sizes, "--rerun-mode", "disabled"]
    settings, _ = take_flags(ours)
    assert add_virtual_stages(settings, free) == free
    add_virtual_stages(settings, [*free, "--qk-clip", "--clip-grad", "0"])
    for flags, words in (
        (sizes, ("unsupported-setting", "--rerun-mode")),
        ([*free, "--fp16"], ("unsupported-setting", "fp16")),
        ([*free, "--qk-clip"], ("unsupported-setting", "--qk-clip")),
        ([*free, "--fp8-format", "hybrid"], ("fp8-delayed-scaling", "--fp8-recipe", "--clip-grad", 0)),
    ):
        with refused(*words, kind=UnsupportedError):
            add_virtual_stages(settings, flags)


def test_how_sequences_are_cut_comes_from_the_command_line():
    sliced = [*MEGATRON, "--pipemem-schedule", "seq1f1b", "--pipemem-slice-cut"]
    assert take_flags([*sliced, "flops"])[0].slice_cut == "flops"
    with refused("bad-choice", "--pipemem-slice-cut", "time", kind=UnsupportedError):
        take_flags([*sliced, "time"])
    for whole in ("1f1b", "stock", "auto"):
        with refused("no-slices", "--pipemem-option", 4, kind=UnsupportedError):
            take_flags([*MEGATRON, "--pipemem-schedule", whole, "--pipemem-slice-cut", "flops"])
    take_flags(
        [*MEGATRON, "--pipemem-schedule", "v-half", "--pipemem-slice-cut", "flops", "--pipemem-option", "slices=2"]
    )
