"""Text of files and flags: it never controls the terminal, and messages repeat at most a part of it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import code_in
from rich.table import Table
from rich.text import Text

from megatron_pipemem.errors import ConfigError, PipememError, UnsupportedError, printable, readable
from megatron_pipemem.logs import _Lines
from megatron_pipemem.tools.console import Console

RED = "\x1b[31mred\x9b0m\x07\u202e"
SHOWN = r"\x1b[31mred\x9b0m\x07\u202e"
LONG = "a" * 5000
START = "torchrun --nproc-per-node 4 train.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


@pytest.mark.parametrize("text", [RED, LONG, "a b " * 1000])
def test_no_command_prints_what_a_user_gave_as_it_is(pipemem: Callable, tmp_path: Path, text: str) -> None:
    run, costs = tmp_path / "run.yaml", tmp_path / "costs.csv"
    run.write_text(
        f'model: llama3-8b\ncluster: cpu\npp: "{text.encode("unicode_escape").decode()}"\n', encoding="utf-8"
    )
    costs.write_text(f"0F0,{text}", encoding="utf-8")
    size = ("-p", "2", "-m", "2")
    for command in (
        ("plan", run),
        ("check", costs),
        ("check", text),
        ("advise", text),
        ("advise", "--", *START.split(), "--vocab-size", "99", "--num-experts", "4", "--moe-layer-freq", text),
        ("simulate", text, *size),
        ("simulate", "1f1b", *size, "--costs", text),
        ("simulate", "1f1b", *size, "-o", f"{text}=1"),
        ("simulate", "1f1b", *size, "--memory-cap", text),
        ("simulate", "1f1b", *size, "--schedule-module", text),
    ):
        result = pipemem(*command)
        assert result.exit_code in (1, 2), command
        assert code_in(result.stderr) is not None, result.output
        assert result.output.isascii() and result.output.replace("\n", "").isprintable(), command
        assert len(result.output) < 900, command


def test_the_console_prints_texts_and_its_own_colours() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    table = Table("column")
    table.add_row("\x1b[31mred")
    for shown in ("\x1b[31mred\x9b", Text("\x1b[31mred", style="green"), table):
        console.print(shown)
    assert out.getvalue().count(r"\x1b[31mred") == 2 and "column" in out.getvalue()
    assert "\x1b[32m" in out.getvalue() and not any(text in out.getvalue() for text in ("\x1b[31m", "\x9b"))


def test_the_log_of_a_run_is_printable() -> None:
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "layout %s\nsecond line", (RED,), None)
    assert _Lines().format(record) == f"pipemem: layout {SHOWN}\nsecond line"


def test_errors_keep_their_lines_and_lose_the_middle_of_long_words() -> None:
    assert str(PipememError("deadlock", f"{RED}\n\tgrün")) == f"{SHOWN}\n\tgrün"
    error = ConfigError("bad-type", "is wrong", key=LONG, file=f"/{LONG}.yaml")
    assert len(str(error)) < 450 and str(error).startswith("/aaa") and ".yaml, key aaa" in str(error)
    assert printable("\udc80") == r"\udc80"


@pytest.mark.parametrize(
    "error", [ValueError("x" * 900), RecursionError(), MemoryError(), OSError(36, "too long"), KeyError(1)]
)
def test_what_python_raises_in_a_reading_is_a_sentence(error: Exception) -> None:
    with pytest.raises(UnsupportedError) as refusal, readable("the file a.yaml", UnsupportedError):
        raise error
    assert refusal.value.code == "cannot-read" and refusal.value.__cause__ is error
    assert str(refusal.value).startswith("the file a.yaml cannot be read (") and len(str(refusal.value)) < 300
    with pytest.raises(AssertionError), readable("the file a.yaml"):
        raise AssertionError("a bug")
    with pytest.raises(ConfigError) as kept, readable("the file a.yaml"):
        raise ConfigError("no-file", "is missing")
    assert kept.value.code == "no-file"
