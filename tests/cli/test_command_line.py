"""The app as a whole: help, version, start-up, and what ``run`` is handed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from refusals import check_refusal
from typer.main import get_command

import megatron_pipemem.run
from megatron_pipemem.__main__ import main
from megatron_pipemem.request import Request, flags_of
from megatron_pipemem.tools.cli.app import app, load_commands
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run


def test_the_list_of_commands_says_the_first_sentence_of_each():
    """It is written down beside the names, so that the list needs no command's module."""
    listed = get_command(app).commands
    told = {name: " ".join(command.help.split("\n\n")[0].split()) for name, command in load_commands().items()}
    assert {name: help_text.help for name, help_text in listed.items()} == told


OF_THE_APP = {"tools", "tools.cli", "tools.cli.app", "errors", "exits"}
SLOW = {"matplotlib", "megatron", "numpy", "torch", "yaml"}


@pytest.mark.parametrize(
    ("arguments", "commands", "slow"),
    [
        ("--help", set(), SLOW | {"pydantic"}),
        ("--version", set(), SLOW | {"pydantic"}),
        ("simulate zbv -p 4 -m 8", {"simulate", "common", "loading", "options"}, SLOW),
        ("show zbv -p 4 -m 8", {"simulate", "common", "loading", "options"}, SLOW),
        ("schedules", {"schedules", "common", "loading", "options"}, SLOW),
        ("check zbv -p 4 -m 8 --write OUT", {"check", "common", "loading", "options"}, SLOW),
    ],
    ids=lambda argument: argument.split()[0] if isinstance(argument, str) else "",
)
def test_a_command_imports_what_it_needs(tmp_path, arguments, commands, slow):
    """Start-up is mostly imports. Modules are counted, since seconds depend on what else the machine does."""
    code = (
        "import sys\n"
        "from megatron_pipemem.tools.cli.app import main\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)\n"
    )
    words = arguments.replace("OUT", str(tmp_path / "out.txt")).split()
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert loaded & slow == set()
    ours = {name.removeprefix("megatron_pipemem.") for name in loaded if name.startswith("megatron_pipemem.")}
    if not commands:
        assert ours == OF_THE_APP
    assert {name for name in ours if name.startswith("tools.cli.")} == {
        f"tools.cli.{module}" for module in ("app", *commands)
    }
    assert {name.split(".")[0] for name in ours} <= {
        *("tools", "errors", "exits", "files", "schedule"),
        *("families", "search", "features", "request", "conflicts", "choose", "part_costs"),
    }


@pytest.mark.parametrize("arguments", [("nonsense",), ("simulate",), ("simulate", "1f1b", "-p", "four"), ("check",)])
def test_usage_errors_exit_2_with_a_clean_stdout(pipemem, arguments):
    result = pipemem(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "cpu", "handed_on"),
    [
        (["train.py"], False, []),
        (["--cpu", "train.py", "--lr", "0.1"], True, ["--lr", "0.1"]),
        (["train.py", "--cpu", "--json", "--help", "-m", "3"], False, ["--cpu", "--json", "--help", "-m", "3"]),
        (["train.py", "--pipemem-schedule", "v-half", "--", "x"], False, ["--pipemem-schedule", "v-half", "--", "x"]),
        (["train.py", "--data-path", "a b", "--unknown=1", "-x"], False, ["--data-path", "a b", "--unknown=1", "-x"]),
    ],
)
def test_run_hands_the_scripts_flags_on_untouched(pipemem, monkeypatch, arguments, cpu, handed_on):
    calls = []
    module = pytest.importorskip("megatron_pipemem.tools.cli.run")
    monkeypatch.setattr(module, "run", lambda *given: calls.append(given))
    assert pipemem("run", *arguments).exit_code == 0
    assert calls == [(cpu, Path("train.py"), handed_on, False)]


@pytest.mark.parametrize(
    ("words", "handed_on"),
    [
        ("run train.py --cpu -m 3", (False, Path("train.py"), ["--cpu", "-m", "3"], False)),
        ("run --cpu --verbose train.py --help", (True, Path("train.py"), ["--help"], True)),
        ("run --cup train.py", None),
        ("run", None),
        ("run --help", None),
        ("schedules", None),
    ],
)
def test_ranks_run_a_script_without_the_tools(monkeypatch, words, handed_on):
    """Other words go to the command line of the tools, which explains them."""
    calls, commands = [], []
    monkeypatch.setattr(sys, "argv", ["pipemem", *words.split()])
    monkeypatch.setattr(megatron_pipemem.run, "run", lambda *given: calls.append(given))
    monkeypatch.setattr("megatron_pipemem.tools.cli.app.main", lambda: commands.append(True))
    main()
    assert (calls, commands) == (([], [True]) if handed_on is None else ([handed_on], []))


def test_a_full_disk_under_the_answer_is_told():
    command = [sys.executable, "-m", "megatron_pipemem", "schedules"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    check_refusal(done.stderr, "cannot-write")
    assert done.returncode == 2


def test_module_and_exit_code_of_a_real_process():
    command = [sys.executable, "-m", "megatron_pipemem", "simulate", "v-hlaf", "-p", "4", "-m", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: unknown schedule 'v-hlaf'; did you mean 'v-half'")


SHOWN = {name: command for name, command in load_commands().items() if not command.hidden}


@pytest.mark.parametrize("command", SHOWN)
def test_examples_of_help_are_whole_and_take_the_options_that_there_are(pipemem, monkeypatch, command):
    examples = SHOWN[command].examples
    for line, purpose in examples:
        words = shlex.split(line)
        assert purpose
        if command != "run":
            assert words[:2] == ["pipemem", command]
            SHOWN[command].make_context(command, words[2:])
        for option, setting in pairwise(words):
            if option in ("--set", "-s"):
                assert load("tiny-cpu", Run, [setting])
    for width in ("80", "60"):
        monkeypatch.setenv("COLUMNS", width)
        shown = pipemem(command, "--help").stdout
        assert all(line in shown for line, _ in examples), "in one line, to be copied"
        assert "…" not in shown and all(option in shown for option in _options(SHOWN[command]))


def _options(command) -> list[str]:
    return [name for option in command.params for name in option.opts if name.startswith("--")]


def test_help_of_run_lists_the_flags_without_torch_or_megatron():
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'matplotlib', 'numpy'): sys.modules[name] = None\n"
        "sys.argv = ['pipemem', 'run', '--help']\n"
        "from megatron_pipemem.tools.cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    flags = [flag.name for flag in flags_of(Request).values()]
    assert len(flags) > 12 and set(flags) <= set(done.stdout.split())


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    "words",
    [
        "schedules --all",
        "schedules v-half",
        "schedules gis-h",
        "simulate v-half -p 8 -m 32",
        "simulate v-half zb-h1 1f1b -p 8 -m 32",
        "simulate seq1f1b -p 8 -m 4 -o slices=16 --attention-share .6 --slice-cut flops",
        "show zbv 1f1b -p 4 -m 8",
        "profile --model llama3-8b --formulas",
        "layout llama3-8b -p 4",
    ],
)
def test_no_line_is_wider_than_the_terminal(pipemem, monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = pipemem(*words.split())
    assert done.exit_code == 0
    assert [
        line for line in done.stdout.splitlines() if len(line) > columns and not line.startswith("--pipeline")
    ] == []
