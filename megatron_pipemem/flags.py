"""Flags as words of a command line: read them, write them, and parse the ``--pipemem-*`` flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.request import Request, flags_of

Flags = dict[str, Any]
"""Values by the names of flags without leading dashes, as in ``Run.flags``."""


def words(flags: Flags) -> list[str]:
    """Return flags as words of a command line.

    ``True`` gives a flag without a value, ``False`` and ``None`` leave the flag out, and a list gives several values.
    """
    result: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        result += [f"--{name}", *map(text_of, values)]
    return result


def text_of(value: object) -> str:
    """Return a value as a word of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def words_by_flag(words: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the words after each flag, by the flag with its ``--``, one list per occurrence.

    For example, ``--a 1 2 --a 3`` gives ``{"--a": [["1", "2"], ["3"]]}``. Words before the first flag are left out.
    """
    occurrences: dict[str, list[list[str]]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, separator, value = word.partition("=")
            values = [value] if separator else []
            occurrences.setdefault(flag, []).append(values)
        else:
            values.append(word)
    return occurrences


def values_by_flag(arguments: Sequence[str]) -> dict[str, str | bool]:
    """Return each flag without ``--`` and the word after it; ``True`` if there is none. The last occurrence counts."""
    return {flag[2:]: lists[-1][0] if lists[-1] else True for flag, lists in words_by_flag(arguments).items()}


class Parser(argparse.ArgumentParser):
    """A parser of ``--pipemem-*`` flags among others. A wrong flag raises an UnsupportedError and does not exit."""

    def __init__(self, **settings: Any):
        super().__init__(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS, **settings)

    def error(self, message: str):
        raise UnsupportedError(
            "bad-syntax", f"{message}; pipemem run --help lists the --pipemem-* flags and their values"
        )


CHECK_FLAG = "--pipemem-check"
"""The flag with which ``pipemem run`` only checks the other flags. Nothing is trained, and no device is used."""


def plan_parser() -> Parser:
    """Return a parser of ``--pipemem-plan``, which is read before all other flags, because a plan adds flags."""
    parser = Parser()
    parser.add_argument(
        "--pipemem-plan",
        metavar="FILE",
        help="add the flags of a plan that pipemem plan --output wrote; other flags must agree",
    )
    return parser


def flag_parser() -> Parser:
    """Return a parser of all ``--pipemem-*`` flags. Its namespace has the fields of ``Request`` that are given."""
    parser = Parser(parents=[plan_parser()], argument_default=argparse.SUPPRESS)
    for field, flag in flags_of(Request).items():
        form: dict[str, Any] = {"action": "store_true"}
        if flag.metavar:
            form = {"metavar": flag.metavar, "action": "append" if flag.repeated else "store"}
        parser.add_argument(flag.name, dest=field, help=flag.help.replace("%", "%%"), **form)
    return parser
