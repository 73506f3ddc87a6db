"""Parse the ``--pipemem-*`` flags, which the fields of ``Request`` describe. ``mcore.flags`` acts on them."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.request import Request, flags_of


class Parser(argparse.ArgumentParser):
    """A parser of flags among others. Raises UnsupportedError where argparse would print all flags and end the process."""

    def __init__(self, **settings: Any):
        super().__init__(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS, **settings)

    def error(self, message: str):
        raise UnsupportedError("unknown-flag", f"{message}; pipemem run --help lists the --pipemem-* flags")


def plan_parser() -> Parser:
    """Return a parser of the flag that stands for others, which is read first."""
    parser = Parser()
    parser.add_argument(
        "--pipemem-plan",
        metavar="FILE",
        help="add what pipemem plan --output wrote: parallelism, layout, schedule; other flags may repeat it, not contradict",
    )
    return parser


def flag_parser() -> Parser:
    """Return a parser of all flags. Its answer has the fields of ``Request`` that are given."""
    parser = Parser(parents=[plan_parser()], argument_default=argparse.SUPPRESS)
    for field, flag in flags_of(Request).items():
        told: dict[str, Any] = {"action": "store_true"}
        if flag.metavar:
            told = {"metavar": flag.metavar, "type": flag.kind, "action": "append" if flag.repeated else "store"}
        parser.add_argument(flag.name, dest=field, help=flag.help.replace("%", "%%"), **told)
    return parser
