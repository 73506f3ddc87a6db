"""Write the snapshot of the public surface: names with their parameters, commands, flags, and keys of YAML and JSON.

python scripts/freeze_api.py

``tests/scripts/test_api.py`` compares the code with ``tests/scripts/api.txt``. A line that is gone or changed breaks
a user's script: CHANGELOG.md then says how to change it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe
from typer.testing import CliRunner

import megatron_pipemem
from megatron_pipemem.files import write_whole
from megatron_pipemem.flags import flag_parser
from megatron_pipemem.request import Request, flags_of
from megatron_pipemem.tools.cli.app import app, load_commands
from megatron_pipemem.tools.config.keys import FIELDS, KEYS, SHORT

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "tests" / "scripts" / "api.txt"
ANSWERS = ("simulate v-half -p 2 -m 4", "schedules", "layout tiny-gpt -p 2", "pareto -p 2 -m 4 --seconds 0")
"""Commands whose JSON keys are compared."""


def python_names() -> Iterator[str]:
    """Yield each public name with its parameters, and with those of the public methods of a class.

    The sources are read, and not imported: half of them need Megatron.
    """
    for module, names in megatron_pipemem._NAMES_BY_MODULE.items():
        for name in names.split():
            value = _module(f"megatron_pipemem.{module}")[name]
            if value.is_alias:  # the module imports it
                value = _module(value.target_path.rpartition(".")[0])[name]
            yield from _signatures(name, value)


@cache
def _module(name: str) -> griffe.Module:
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return griffe.visit(name, filepath=path, code=path.read_text(encoding="utf-8"))


def _signatures(name: str, value: griffe.Object | griffe.Alias) -> Iterator[str]:
    if isinstance(value, griffe.Function):
        yield f"{name}({', '.join(_parameter(parameter) for parameter in value.parameters if parameter.name != 'self')})"
    elif value.is_class:
        yield name
        for member in sorted(value.members.values(), key=lambda member: member.name):
            if not member.name.startswith("_") and not member.is_alias:
                yield from _signatures(f"{name}.{member.name}", member)
    else:
        yield name


def _parameter(parameter: griffe.Parameter) -> str:
    kinds = griffe.ParameterKind
    star = "*" if parameter.kind is kinds.var_positional else "**" if parameter.kind is kinds.var_keyword else ""
    return f"{star}{parameter.name}{'' if parameter.default is None or star else '='}"


def surface() -> list[str]:
    """Return all lines of the snapshot."""
    lines = [f"python {line}" for line in python_names()]
    lines += [f"keyword enable {field}" for field in flags_of(Request)]
    lines += [f"flag {option}" for action in flag_parser()._actions for option in action.option_strings if action.help]
    for name, command in load_commands().items():
        if not command.hidden:
            lines += [f"command {name} {option}" for parameter in command.params for option in parameter.opts]
    lines += [f"yaml {key}" for key in {*FIELDS, *KEYS.values(), *SHORT}]
    for words in ANSWERS:
        lines += [f"json {words.split()[0]} {key}" for key in _keys(words)]
    return sorted({*lines})


def _keys(words: str) -> list[str]:
    """Return the keys of the JSON object that a command prints, or of the first object of a list."""
    answer = json.loads(CliRunner().invoke(app, [*words.split(), "--json"]).stdout)
    return [*(answer[0] if isinstance(answer, list) else answer)]


if __name__ == "__main__":
    write_whole(SNAPSHOT, "\n".join(surface()) + "\n")
