"""Flags that Megatron would refuse on every rank are refused before there is one."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from commands import pipemem
from megatron.training.arguments import add_megatron_arguments
from refusals import refused

from megatron_pipemem.flags import flag_parser
from megatron_pipemem.tools.config.arguments import frozen_flags
from megatron_pipemem.tools.megatron import known_flags as known_flags_module
from megatron_pipemem.tools.megatron.known_flags import check_flags, described, known_flags

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "runs" / "tiny-cpu.yaml"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"lrr": 0.1}, ("unknown-flag", "--lrr", "lr")),
        ({"pipemem-reprot": "x"}, ("unknown-flag", "pipemem-report")),
        ({"lr": "fast"}, ("bad-number", "lr", "fast", "--lr")),
        ({"pipemem-vocab-piece-tokens": 0}, ("bad-number", "--pipemem-vocab-piece-tokens", 0)),
        ({"lr": True}, ("bad-type", "lr", "--lr")),
        ({"optimizer": "sdg"}, ("bad-choice", "sdg")),
        ({"log-throughput": 3}, ("bad-type", 3, "--log-throughput")),
    ],
)
def test_what_megatron_would_refuse(flags, says):
    assert len(known_flags()) > 300
    with refused(*says):
        check_flags(flags)


def test_a_flag_of_ours_is_known_as_soon_as_it_is_declared(monkeypatch):
    parser = flag_parser()
    parser.add_argument("--pipemem-new", type=int)
    monkeypatch.setattr(known_flags_module, "flag_parser", lambda: parser)
    told = {"choices": None, "type": "int", "bare": False, "nargs": None, "default": None}
    assert known_flags()["--pipemem-new"] == {**told, "dest": "pipemem_new", "const": None}


def test_a_cached_list_of_another_form_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.training.arguments", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = {"--lr": known_flags()["--lr"]}
    monkeypatch.setattr(known_flags_module, "answers", lambda *arguments: [asked])
    read = known_flags_module._megatrons_flags.__wrapped__
    assert read() == asked
    (file,) = tmp_path.rglob("flags-*.json")
    right = file.read_text()
    for wrong in ("[]", "3", '{"--lr": 3}', '{"--lr": {"type": "int"}}', "{", "[" * 100_000):
        file.write_text(wrong)
        assert read() == asked and file.read_text() == right, wrong
    monkeypatch.setattr(known_flags_module, "answers", None)
    assert read() == asked


def test_the_file_of_flags_has_those_of_the_installed_megatron():
    assert frozen_flags() == described(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def test_without_megatron_the_flags_of_the_file_are_known(monkeypatch):
    monkeypatch.setattr(known_flags_module, "_megatrons_flags", dict)
    assert known_flags()["--num-layers"]["type"] == "int"
    check_flags({"my-flag": 3})  # perhaps of another version


def test_what_megatron_takes():
    check_flags({"lr": 1e-4, "optimizer": "sgd", "log-throughput": True, "split": None, "data-path": [1, "a"]})
    check_flags({"attention-backend": "flash", "exit-signal": "SIGTERM"})  # members of enumerations, by name


def test_launch_and_grid_ask_but_for_a_script_of_the_users_own(tmp_path):
    def launch(*changes: str):
        sets = [word for change in ("my_flag=3", *changes) for word in ("--set", change)]
        return pipemem("launch", TINY, "--print", *sets)

    error = launch().stderr
    assert "key my_flag" in error and "[unknown-key]" in error
    script = tmp_path / "mine.py"
    script.write_text("")
    assert "--my-flag 3" in launch(f"script={script}").stdout
    file = str(ROOT / "configs" / "grids" / "tiny-cpu.yaml")
    grid = ["grid", file, "--set", "my_flag=3", "--launcher", "print"]
    error = pipemem(*grid).stderr
    assert "my_flag" in error and "[unknown-key]" in error
