"""Public functions say what their arguments are.

Public is what ``megatron_pipemem.__all__`` names, and the classes that others extend. Such a function, method or constructor
with three or more arguments has an ``Args:`` section that names all of them. A dataclass has it in its own docstring, for its
fields. Methods without a docstring in a class with bases are exempt: they inherit it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import megatron_pipemem
from megatron_pipemem.tools.cli.app import load_commands

PACKAGE = Path(megatron_pipemem.__file__).parent
EXTENDED = {"StageRunner", "StepFeature", "Extension"}
PUBLIC = EXTENDED | set(megatron_pipemem.__all__)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_of(function: Function) -> list[str]:
    """Argument names, without ``self`` and ``cls``, and those that nothing uses."""
    arguments = function.args
    everything = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [
        argument.arg
        for argument in everything
        if argument is not None and argument.arg not in ("self", "cls") and argument.arg[0] != "_"
    ]


def fields_of(cls: ast.ClassDef) -> list[str] | None:
    """Public arguments of a dataclass's constructor; None for other classes."""
    if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        return None
    explained = {id(field) for field, text in pairwise(cls.body) if isinstance(text, ast.Expr)}  # by a string behind it
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and id(node) not in explained]
    return [
        field.target.id
        for field in fields
        if not field.target.id.startswith("_")
        and "init=False" not in ast.unparse(field)
        and "ClassVar" not in ast.unparse(field.annotation)
    ]


def missing(names: list[str], docstring: str | None) -> list[str]:
    """Those of three or more names that an ``Args:`` section does not explain."""
    if len(names) < 3:
        return []
    section = re.search(r"^\s*(?:Args|Attributes):\n(.*)", docstring or "", re.DOTALL | re.MULTILINE)
    said = (
        set(re.findall(r"^\s+((?:\*{0,2}\w+(?:, )?)+)(?: \([^)]*\))?:", section[1], re.MULTILINE)) if section else set()
    )
    said = {name.lstrip("*") for names in said for name in names.split(", ")}
    return [name for name in names if name not in said]


def check_class(cls: ast.ClassDef, where: str) -> Iterator[str]:
    fields, own = fields_of(cls), ast.get_docstring(cls)
    if fields is not None and (left := missing(fields, own)):
        yield f"{where}: {', '.join(left)}"
    for node in cls.body:
        if not isinstance(node, Function):
            continue
        if node.name == "__init__":
            said = "\n".join(filter(None, (own, ast.get_docstring(node))))
            if left := missing(names_of(node), said):
                yield f"{where}: {', '.join(left)}"
        elif not node.name.startswith("_") and (ast.get_docstring(node) or not cls.bases):
            yield from check_function(node, f"{where}.{node.name}")


def check_function(function: Function, where: str) -> Iterator[str]:
    if left := missing(names_of(function), ast.get_docstring(function)):
        yield f"{where}: {', '.join(left)}"


def check_module(path: Path, text: str) -> Iterator[str]:
    """What is not explained in a module's public functions and classes."""
    for node in ast.parse(text).body:
        if getattr(node, "name", None) in PUBLIC:
            where = f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
            yield from check_class(node, where) if isinstance(node, ast.ClassDef) else check_function(node, where)


def test_every_public_function_explains_its_arguments():
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if "cli" not in path.relative_to(PACKAGE).parts
    }
    defined = {
        path: {*re.findall(r"^(?:async def|def|class) (\w+)", text, re.MULTILINE)} for path, text in texts.items()
    }
    names = EXTENDED | {public.__name__ for public in map(megatron_pipemem.__getattr__, PUBLIC - EXTENDED)}
    assert set().union(*defined.values()) >= names
    public = [path for path in texts if defined[path] & PUBLIC]
    assert [problem for path in public for problem in check_module(path, texts[path])] == []


def test_every_option_of_a_command_has_a_help_text():
    for name, command in load_commands().items():
        assert [parameter.name for parameter in command.params if not parameter.help] == [], name


def test_the_checker_finds_what_is_missing():
    source = (
        'def f(a, b, *, c):\n    """Do.\n\n    Args:\n        a, b: numbers.\n    """\n'
        'class K:\n    """It."""\n    def __init__(self, a, b, c): ...\n    def _g(self, a, b, c): ...\n'
        "@dataclass\nclass D:\n    a: int\n    b: int\n    c: int = 0\n    _d: int = field(init=False)\n"
    )
    function, plain, data = ast.parse(source).body
    assert list(check_function(function, "f")) == ["f: c"]
    assert list(check_class(plain, "K")) == ["K: a, b, c"]
    assert list(check_class(data, "D")) == ["D: a, b, c"]
