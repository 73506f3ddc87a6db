"""Names of the package: a class name means one thing, and other names are nouns of the field."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import megatron_pipemem

PACKAGE = Path(megatron_pipemem.__file__).parent
PARTICIPLES = {"each", "found", "given", "told"}


def test_no_class_name_stands_twice():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)[(:\[]", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_nothing_is_named_by_a_participle():
    paths = [*PACKAGE.rglob("*.py")]
    assert len(paths) > 200
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.Attribute(attr=name):
                    assert name not in PARTICIPLES, f"{path.relative_to(PACKAGE)}:{node.lineno}"
