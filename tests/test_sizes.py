"""A newcomer finds the room at once: no file and no function is too long to be read at a sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_pipemem

PACKAGE = Path(megatron_pipemem.__file__).parent
LINES_OF_FILE, LINES_OF_FUNCTION = 400, 80
HOT_LOOPS = {"schedule/search/step_dispatch.py: run"}
"""Longer, and they say why: a call per action would cost a search more than the action does."""


def test_no_file_is_long() -> None:
    lengths = {
        str(source.relative_to(PACKAGE)): len(source.read_text(encoding="utf-8").splitlines())
        for source in PACKAGE.rglob("*.py")
    }
    assert len(lengths) > 100
    assert {name: length for name, length in lengths.items() if length > LINES_OF_FILE} == {}


def test_no_function_is_long_but_hot_loops() -> None:
    long = {
        f"{source.relative_to(PACKAGE)}: {node.name}"
        for source in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= LINES_OF_FUNCTION
    }
    assert long == HOT_LOOPS
