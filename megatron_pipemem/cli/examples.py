"""Show, after the options in a command's ``--help``, examples to copy, and for ``run`` the flags behind the script."""

from __future__ import annotations

from itertools import batched
from textwrap import indent
from typing import Any, Literal

from rich.console import Console
from typer import BadParameter
from typer.core import TyperCommand

_LEAST_COLUMNS = 80
"""Of Typer's panels, which cut names of options where there are fewer; then click's own plain help does."""


def markup() -> Literal["markdown"] | None:
    """Return how help is to be rendered; ``None`` is plain."""
    return "markdown" if Console().width >= _LEAST_COLUMNS else None


class CommandWithExamples(TyperCommand):
    """End a command's help with the examples of its docstring, each in a line that can be copied whole.

    Args:
        arguments: of ``TyperCommand``.
        help: the docstring. Behind ``Examples:`` stand command lines, each below a comment that says what it is for.
        settings: of ``TyperCommand``.
    """

    def __init__(self, *arguments: Any, help: str | None = None, **settings: Any) -> None:
        told, _, examples = (help or "").partition("\n\nExamples:\n")
        super().__init__(*arguments, help=told, **settings)
        pairs = batched(map(str.strip, examples.splitlines()), 2)
        self.examples = [(line, purpose.removeprefix("# ")) for purpose, line in pairs]

    # Contexts are those of click, which typer has taken in and does not export.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = list(args)  # as typed
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            if not error.message and self.examples:  # an argument is missing
                error.message = f"For example: {self.examples[0][0]}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = markup()
        super().format_help(ctx, formatter)
        formatter.write("\n Examples\n")  # what is written comes after panels
        for line, purpose in self.examples:
            formatter.write(f"   # {purpose}\n   {line}\n")


class RunCommand(CommandWithExamples):
    """Tell in the help also of the flags that stand behind the script. Whatever follows the script is the script's, whether
    or not it looks like a flag of ours.
    """

    ignore_unknown_options = True
    allow_interspersed_args = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from megatron_pipemem.launch.flags import flag_parser

        flags = flag_parser().format_help().partition(":\n")[2]  # without argparse's own heading
        formatter.write(f"\n Flags after the script\n{indent(flags, ' ')}")
