"""What ``pipemem schedules NAME`` tells of a schedule, and what the shell offers for a name that is begun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from refusals import check_refusal

from megatron_pipemem.schedule import registry
from megatron_pipemem.schedule.registry import families, family
from megatron_pipemem.tools.cli.options import complete_families, complete_schedules
from megatron_pipemem.tools.cli.schedules import RESEARCH

NAMES = [family.name for family in families()]


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_explained_with_a_picture(pipemem, name):
    chosen, shown = family(name), pipemem("schedules", name)
    assert shown.exit_code == 0, shown.stderr
    for fact in (chosen.summary, chosen.placement, chosen.peak, chosen.bubble, chosen.source, chosen.needs):
        assert fact in shown.stdout
    assert "device 0 |" in shown.stdout and " forward " in shown.stdout
    for option, text in chosen.options.items():
        assert option.replace("_", "-") in shown.stdout.replace("_", "-") and text in shown.stdout
        assert "default" in text, f"{option}: say what it is by default"
    assert ("asynchronous" in shown.stdout) == chosen.asynchronous


def test_the_picture_has_the_size_that_is_asked_for(pipemem):
    assert "p=3, m=7" in pipemem("schedules", "zbv", "-p", 3, "-m", 7).stdout
    assert "p=6, m=12" in pipemem("schedules", "dualpipe", "-p", 6).stdout
    check_refusal(pipemem("schedules", "dualpipe", "-p", 3).stderr, "needs-devices", "dualpipe", "even", 3)


def test_eight_schedules_are_listed_and_all_if_asked(pipemem, pipemem_json, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rows = pipemem_json("schedules", "--all")
    assert [row["name"] for row in rows] == NAMES
    chosen = [row["name"] for row in rows if not row["for_research"]]
    assert chosen == [row["name"] for row in pipemem_json("schedules")] and len(chosen) == 8
    assert set(NAMES) >= RESEARCH and len(NAMES) == 8 + len(RESEARCH), "every row is of one kind"
    shown = [pipemem("schedules", *flags).stdout for flags in ((), ("--all",))]
    assert ["zb-h2" in text for text in shown] == ["research (*)" in text for text in shown] == [False, True]
    by_name = {row["name"]: row for row in rows}
    assert set(by_name["zbv"]) == {
        "name", "placement", "summary", "peak", "bubble", "source", "splits_backward", "min_devices", "options",
        "chunks", "needs", "asynchronous", "slices", "offloads", "replicas", "for_research",
    }  # fmt: skip
    assert by_name["zbv"]["placement"] == "v" and by_name["zbv"]["splits_backward"] is True
    assert "chunks" in by_name["interleaved"]["options"]
    assert [words in " ".join(shown[1].split()) for words in ("here 4 chunks", "here 2 slices", "here 8 slices")] == [
        True
    ] * 3
    assert by_name["dualpipe"]["needs"] == "even p, even m of at least 2p" and "even p" in shown[1]
    assert [row["name"] for row in rows if row["asynchronous"]] == ["pipedream", "pipedream-2bw"]
    assert shown[1].count("asynchronous") == 2 and shown[1].count("2 copies of the weights") == 3


def test_the_search_is_explained_too(pipemem):
    shown = pipemem("schedules", "auto")
    assert shown.exit_code == 0 and "--pipemem-schedule auto" in shown.stdout


def test_the_list_fits_a_terminal_and_has_the_simulated_numbers(pipemem, pipemem_json, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = pipemem("schedules", "-p", 4).stdout.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split() for line in lines[3:13]}
    assert list(rows) == ["1f1b", *(name for name in NAMES if name not in RESEARCH), "auto"]
    for name in ("1f1b", "zb-h1", "v-half", "po-f"):
        run = pipemem_json("simulate", name, "-p", 4, "-m", 16)
        assert rows[name][-2:] == [f"{run['bubble_rate']:.1%}", f"{run['peak_activation']:.3f}"]


@pytest.mark.parametrize("words", [(), ("zbv",)])
def test_sizes_that_take_too_long_are_refused(pipemem, words):
    check_refusal(pipemem("schedules", *words, "-p", 3000, "-m", 100_000).stderr, "too-large", "--devices")


def test_sizes_that_a_schedule_does_not_have_are_dashes(pipemem):
    (row,) = [line for line in pipemem("schedules", "--all", "-p", 3).stdout.splitlines() if " dualpipe * " in line]
    assert row.split()[-2:] == ["-", "-"]


def test_those_to_choose_from_are_those_that_the_page_on_choosing_advises():
    page = (Path(__file__).parents[2] / "docs" / "choosing-a-schedule.md").read_text(encoding="utf-8")
    table = page.partition("## Which one to take")[2].partition("\n## ")[0]
    advice = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`([\w-]+)`", advice)) & set(NAMES) - {"seq1f1b"} == set(NAMES) - RESEARCH


def complete(pipemem, monkeypatch, words: str) -> list[str]:
    """What bash is offered after these words."""
    monkeypatch.setenv("_PIPEMEM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    return pipemem().stdout.split()


@pytest.mark.parametrize("command", ["simulate", "show", "check", "schedules", "show 1f1b"])
def test_the_shell_completes_names_of_schedules(pipemem, monkeypatch, command):
    assert complete(pipemem, monkeypatch, f"pipemem {command} zb-") == ["zb-h1", "zb-h2", "zb-auto"]


def test_the_shell_completes_commands_and_their_options(pipemem, monkeypatch):
    assert complete(pipemem, monkeypatch, "pipemem s") == ["schedules", "simulate", "show"]
    assert complete(pipemem, monkeypatch, "pipemem simulate 1f1b --vocab") == ["--vocab-cut"]


def test_files_and_auto_are_offered_where_they_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("mine.csv", "mine.json", "folder/other.txt"):
        (tmp_path / name).write_text("")
    offered = [name for name, _ in complete_schedules("m")]
    assert offered == ["mine.csv"]
    assert [name for name, _ in complete_schedules("f")] == ["folder/"]
    assert [name for name, _ in complete_schedules("folder/")] == ["folder/other.txt"]
    assert [name for name, _ in complete_schedules("")] == [*NAMES, "auto"]
    assert [name for name, _ in complete_families("")] == NAMES
    assert [name for name, _ in complete_schedules(str(tmp_path / "none" / "x"))] == []


MODULE = """
from dataclasses import replace
from pathlib import Path
from megatron_pipemem import Family
from megatron_pipemem.families.one_f_one_b import gpipe
NAME = Path(__file__).stem
def build(p, m):
    return replace(gpipe(p, m), name=NAME)
FAMILY = Family(name=NAME, build=build, summary="mine", peak="m/p", bubble="(p-1)(F+B)", source="a test")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["schedules", "NAME"],
        ["simulate", "NAME", "-p", 2, "-m", 3],
        ["show", "NAME", "1f1b", "-p", 2, "-m", 3],
        ["check", "NAME", "--write", "OUT", "-p", 2, "-m", 3],
        ["schedules"],
    ],
)
def test_a_module_adds_schedules_to_every_command(pipemem, monkeypatch, tmp_path, arguments):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    name = f"mine-{arguments[0]}-{len(arguments)}"
    path = tmp_path / f"{name}.py"
    path.write_text(MODULE)
    arguments = [{"NAME": name, "OUT": tmp_path / "out.csv"}.get(argument, argument) for argument in arguments]
    assert name not in pipemem(*arguments).stdout
    done = pipemem(*arguments, "--schedule-module", path)
    assert done.exit_code == 0, done.stderr
    assert name in done.stdout or (tmp_path / "out.csv").exists()
