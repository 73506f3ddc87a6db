"""Names of the package: a class name means one thing, and other names are nouns of the field."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import megatron_pipemem

PACKAGE = Path(megatron_pipemem.__file__).parent
ROOT = Path(__file__).parents[1]
PARTICIPLES = {"each", "found", "given", "told"}


def test_no_class_name_stands_twice():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)[(:\[]", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 300
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def named(path: Path, names: set[str]) -> list[str]:
    """The places of a file where a variable, argument, function or attribute has one of these names."""
    places = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.Attribute(attr=name):
                places += [f"{path.relative_to(ROOT)}:{node.lineno}"] if name in names else []
    return places


def test_nothing_is_named_by_a_participle():
    package = [*PACKAGE.rglob("*.py")]
    others = [path for folder in ("tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")]
    others = [path for path in others if path.parent != ROOT / "benchmarks" / "gpu"]
    assert len(package) > 200 and len(others) > 300
    places = [place for path in package for place in named(path, PARTICIPLES)]
    assert places + [place for path in others for place in named(path, {"each", "found"})] == []
