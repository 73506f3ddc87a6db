"""Every refusal of the package names a code of the table, and every code of the table is used."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import megatron_pipemem
from megatron_pipemem import errors
from megatron_pipemem.errors import CODES, with_code
from megatron_pipemem.runtime.first_failure import summary

PACKAGE = Path(megatron_pipemem.__file__).parent
CLASSES = {
    name: member
    for name, member in vars(errors).items()
    if isinstance(member, type) and issubclass(member, errors.PipememError)
}
MADE_BY = {"refusal", "fault"}
"""Calls that make an error and take its code first, besides the classes."""


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "errors.py"]


def test_every_error_names_a_code_of_the_table_and_every_code_is_used() -> None:
    count, wrong, strings = 0, [], set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
            if not isinstance(node, ast.Call):
                continue
            if getattr(node.func, "id", getattr(node.func, "attr", "")) in CLASSES.keys() | MADE_BY:
                count, code = count + 1, node.args[0]
                # Another error's code, or one that was chosen above.
                passed_on = isinstance(code, ast.Name | ast.Attribute | ast.Starred)
                if not passed_on and not (isinstance(code, ast.Constant) and code.value in CODES):
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(code)}")
    assert wrong == [] and count > 400
    assert sorted(CODES.keys() - strings) == []


def test_codes_are_short_and_explained() -> None:
    assert [code for code in CODES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+){0,3}", code)] == []
    assert [code for code, text in CODES.items() if not text.endswith(".")] == []


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_an_error_keeps_its_code_when_it_is_sent_to_another_rank(kind: type[errors.PipememError]) -> None:
    error = kind("deadlock", "no way")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind and str(other) == "no way" and vars(other) == vars(error)


def test_users_see_the_code_behind_the_message() -> None:
    error = errors.ScheduleError("deadlock", "they wait", at=(1, 2, "0F0"))
    assert with_code(error) == "device 1, position 2, action 0F0: they wait [deadlock]"
    assert summary(error) == f"ScheduleError: {with_code(error)}"
    assert with_code(ValueError("no")) == "no"
