"""The plugin's flags on a Megatron command line."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("megatron.core")

from megatron_pipemem.errors import PipememError, ScheduleFormatError, UnknownScheduleError, UnsupportedError
from megatron_pipemem.mcore.flags import add_virtual_stages, take_flags
from megatron_pipemem.mcore.launch import enable_from_command_line
from megatron_pipemem.schedule.registry import build_schedule

MEGATRON = ["--num-layers", "8", "--bf16", "--lr", "1e-4"]


def test_takes_our_flags_and_leaves_megatrons_in_order():
    settings, others = take_flags(
        [
            "--num-layers",
            "8",
            "--pipemem-schedule",
            "v-half",
            "--bf16",
            "--pipemem-memory-cap=0.75",
            "--pipemem-report",
            "out/report.json",
            "--lr",
            "1e-4",
        ]
    )
    assert others == MEGATRON
    assert (settings.schedule, settings.memory_cap, settings.report) == ("v-half", 0.75, "out/report.json")


def test_takes_a_search_for_bytes_and_measured_costs():
    settings, others = take_flags(
        [*MEGATRON, "--pipemem-schedule", "auto", "--pipemem-memory-cap", "6GiB", "--pipemem-costs", "profile"]
    )
    assert others == MEGATRON
    assert (settings.schedule, settings.memory_cap, settings.costs) == ("auto", "6GiB", "profile")


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


def test_options_become_numbers_where_they_are():
    settings, _ = take_flags(
        ["--pipemem-schedule", "interleaved", "--pipemem-option", "group_size=6", "--pipemem-option", "chunks=3"]
    )
    assert settings.options == {"group_size": 6, "chunks": 3}


def test_fractions_are_numbers_too():
    settings, _ = take_flags(["--pipemem-schedule", "po-h", "--pipemem-option", "k=0.5"])
    assert settings.options == {"k": 0.5}


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
        ("v-half", ["--pipeline-model-parallel-layout", "Et|t|t|tL"], []),
        ("v-half", ["--num-virtual-stages-per-pipeline-rank=2"], []),
        ("interleaved", ["--num-layers-per-virtual-pipeline-stage", "1"], []),
    ],
)
def test_asks_megatron_for_the_chunks_the_schedule_needs(schedule, given, added):
    settings, others = take_flags([*MEGATRON, *given, "--pipemem-schedule", schedule])
    assert add_virtual_stages(settings, others) == [*MEGATRON, *given, *added]
