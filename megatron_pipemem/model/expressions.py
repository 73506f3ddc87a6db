"""Read texts with repetitions, which Megatron expands: lists such as ``[0]*3+[1]*58``, layouts such as ``Et*3|(t*4|)*6tL``.

The length of a result is computed before the result is built. So a short text cannot fill the memory.
"""

from __future__ import annotations

import ast
import operator
import re
from math import prod
from typing import Any

from megatron_pipemem.errors import UNREADABLE, ConfigError
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.values import MOST_LAYERS

_MOST_CHARACTERS = 10 * MOST_LAYERS
"""The most characters of a list, and those of a layout after its repetitions are written out."""
_MOST_DIGITS, _LARGEST_NUMBER = 9, 10**9
_REPEATED = (re.compile(r"\(([^()]*)\)\*(\d+)"), re.compile(r"([A-Za-z|])\*(\d+)"))


def listed(text: str, flag: str) -> list[int]:
    """Return the list that a Python expression of lists, sums and products gives, such as ``[0]*3+[1]*58``.

    A single number becomes a list. Raise a ConfigError about ``flag`` for any other text, and for a list of more than
    ``MOST_LAYERS`` numbers.
    """
    check_size(f"{_MOST_CHARACTERS:,} characters", len(text) > _MOST_CHARACTERS, text, flag)

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=entries):
                return [operator.index(value(entry)) for entry in entries]
            case ast.BinOp(op=ast.Add() | ast.Mult()):
                parts = value(node.left), value(node.right)
                sizes = [len(part) if isinstance(part, list) else part for part in parts]
                combine, total = (operator.add, sum) if isinstance(node.op, ast.Add) else (operator.mul, prod)
                most = _LARGEST_NUMBER if sizes == [*parts] else MOST_LAYERS
                check_size(f"{MOST_LAYERS:,} entries", total(sizes) > most, text, flag)
                return combine(*parts)
        raise TypeError("neither a whole number nor a list, sum or product of them")

    try:
        result = value(ast.parse(text.strip(), mode="eval").body)
    except UNREADABLE as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "bad-syntax", f"is {shortened(text)}; write a number, or a list as in [0]*3+[1]*58", key=flag
        ) from error
    return result if isinstance(result, list) else [result]


def unrolled(text: str, flag: str) -> str:
    """Return a layout with its repetitions written out: ``Et*2|(t*3|)*2tL`` gives ``Ett|ttt|ttt|tL``.

    Raise a ConfigError about ``flag`` for a result of too many characters.
    """
    check_size(f"{_MOST_CHARACTERS:,} characters", len(text) > _MOST_CHARACTERS, text, flag)
    for pattern in _REPEATED:
        while matches := list(pattern.finditer(text)):
            added = (len(match[1]) * _times(match[2]) - len(match[0]) for match in matches)
            is_long = len(text) + sum(added) > _MOST_CHARACTERS
            check_size(f"{_MOST_CHARACTERS:,} layers and stages", is_long, text, flag)
            text = pattern.sub(lambda match: match[1] * _times(match[2]), text)
    return text


def _times(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else _LARGEST_NUMBER


def check_size(most: str, exceeds: bool, text: str, flag: str) -> None:
    """Raise a ConfigError about ``flag`` if its text ``exceeds`` the limit ``most``, such as ``1,000 layers``."""
    if exceeds:
        raise ConfigError("too-large", f"is {shortened(text)}, more than {most}; write a shorter one", key=flag)
