"""A class name of the package means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import megatron_pipemem

PACKAGE = Path(megatron_pipemem.__file__).parent


def test_no_class_name_stands_twice():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
