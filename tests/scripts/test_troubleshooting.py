"""The troubleshooting page explains every error that the package raises, and none that it does not.

An error is explained by a row of a table whose first column quotes its message, with ``…`` where the message varies, or by a
section that covers all errors of a class, or those in some files: ``<!-- covers: ConfigError; UnsupportedError in cli/ -->``.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

import megatron_pipemem
from megatron_pipemem import errors

ROOT = Path(__file__).parents[2]
PACKAGE = Path(megatron_pipemem.__file__).parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}


class Site(NamedTuple):
    """Where an error is made, with all text that its message may have."""

    file: str
    line: int
    error: str
    message: str


def template(node: ast.AST) -> str:
    """All text below a node, with ``…`` for what varies."""
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return " … ".join(filter(None, map(template, ast.iter_child_nodes(node))))


def assigned(name: str, function: ast.FunctionDef) -> list[ast.expr]:
    """What a function's variable is set to."""
    settings = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
    return [each.value for each in settings if any(getattr(target, "id", None) == name for target in each.targets)]


@lru_cache
def sites() -> list[Site]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    constants = {
        target.id: template(each.value)
        for tree in trees.values()
        for each in tree.body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for path, tree in trees.items():
        functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
            name = getattr(call.func, "id", getattr(call.func, "attr", None))
            if name not in CLASSES or not call.args:
                continue
            parts = [template(call.args[0])]
            for each in (each for each in ast.walk(call.args[0]) if isinstance(each, ast.Name)):
                parts.append(constants.get(each.id, ""))
                parts += map(template, functions[each.id].body[1:] if each.id in functions else ())
                around = [f for f in functions.values() if f.lineno <= call.lineno <= (f.end_lineno or 0)]
                parts += [template(value) for function in around for value in assigned(each.id, function)]
            message = " ".join(" … ".join(parts).split())
            if re.search("[a-z]", message):  # else it passes on the message of another error
                found.append(Site(str(path.relative_to(PACKAGE)), call.lineno, name, message))
    return found


def quotes() -> list[str]:
    rows = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    return [" ".join(each.replace("\\|", "|").split()) for row in rows for each in re.findall(r"`([^`]+)`", row)]


def covered() -> list[tuple[str, tuple[str, ...]]]:
    parts = [each for found in re.findall(r"<!-- covers: (.*?) -->", PAGE) for each in found.split("; ")]
    return [
        (name, tuple(files.split(", ")) if files else ("",)) for name, _, files in (p.partition(" in ") for p in parts)
    ]


def test_every_error_is_explained() -> None:
    missing = [
        f"{site.file}:{site.line} {site.error}: {site.message[:300]}"
        for site in sites()
        if not any(site.error == name and site.file.startswith(files) for name, files in covered())
        and not any(quote in site.message for quote in quotes())
    ]
    assert not missing, "no row and no group of docs/troubleshooting.md explains\n" + "\n".join(missing)


@pytest.mark.parametrize("quote", quotes())
def test_every_row_quotes_a_message(quote: str) -> None:
    assert any(quote in site.message for site in sites())


def test_every_group_has_errors() -> None:
    for name, files in covered():
        for file in files:
            assert any(site.error == name and site.file.startswith(file) for site in sites()), (name, file)


def test_the_collector_finds_all_errors() -> None:
    raised = {site.error for site in sites()}
    assert raised == CLASSES - {"PipememError"} and len(sites()) > 300
    texts = [site.message for site in sites()]
    assert any("… needs … replicas of the model" in text for text in texts)  # of an f-string
    assert any("cannot tie the embedding" in text for text in texts)  # of a constant of another module
    assert any("is a folder" in text for text in texts)  # of a function that makes the sentence
