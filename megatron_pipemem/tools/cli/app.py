"""The command ``pipemem``, and the table of its subcommands. A subcommand's module is imported only when it is
called.
"""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from itertools import batched
from textwrap import indent
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from megatron_pipemem.exits import exits_for_errors

_LEAST_COLUMNS = 80
"""The narrowest terminal for Typer's panels. On narrower terminals Typer cuts option names, so click's plain help is
shown.
"""


def markup() -> Literal["markdown"] | None:
    """Return the markup mode of help texts, or ``None`` for plain text if the terminal is narrow."""
    return "markdown" if Console().width >= _LEAST_COLUMNS else None


class CommandWithExamples(TyperCommand):
    """A command whose help ends with the examples of its docstring, each in one line that can be copied.

    Below ``Examples:``, the docstring has pairs of lines: a comment with the purpose, then the command line.
    """

    def __init__(self, *arguments: Any, help: str | None = None, **settings: Any) -> None:
        description, _, examples = (help or "").partition("\n\nExamples:\n")
        super().__init__(*arguments, help=description, **settings)
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
        formatter.write("\n Examples\n")  # text that is written here comes after the panels
        for line, purpose in self.examples:
            formatter.write(f"   # {purpose}\n   {line}\n")


class RunCommand(CommandWithExamples):
    """The command ``pipemem run``. Its help also lists the plugin's flags.

    Every argument after the script belongs to the script.
    """

    ignore_unknown_options = True
    allow_interspersed_args = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from megatron_pipemem.flags import flag_parser

        flags = flag_parser().format_help().partition(":\n")[2]  # without argparse's own heading
        formatter.write(f"\n Flags after the script\n{indent(flags, ' ')}")


_COMMANDS = {
    "schedules": "schedules.schedules",
    "simulate": "simulate.simulate",
    "show": "simulate.show",
    "explore": "explore.explore",
    "pareto": "simulate.pareto",
    "check": "check.check",
    "advise": "advise.advise_command",
    "plan": "plan.plan_command",
    "layout": "plan.layout_command",
    "profile": "profile.profile",
    "init": "launch.init",
    "launch": "launch.launch",
    "grid": "launch.grid",
    "report": "report.report",
    "explain": "report.explain_command",
    "trace": "report.trace",
    "run": "run.run_script",
    "unfinished": "launch.unfinished",
    "grid-result": "launch.grid_result",
}
"""The functions of the subcommands, as ``module.name`` within ``megatron_pipemem.tools.cli``."""
_HIDDEN = ("unfinished", "grid-result")  # only other programs call them


def _summary(name: str) -> str:
    """Return the first sentence of a subcommand's docstring. Its module is read and not imported."""
    module, _, function = _COMMANDS[name].partition(".")
    source = files(__package__).joinpath(f"{module}.py").read_text(encoding="utf-8")
    _, _, body = source.partition(f"\ndef {function}(")
    return body.partition('"""')[2].partition('"""')[0].partition("\n\n")[0]


def load_command(name: str) -> CommandWithExamples:
    """Import the function of a subcommand, and return the command with its options."""
    module, _, function = _COMMANDS[name].partition(".")
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    callback = getattr(import_module(f"megatron_pipemem.tools.cli.{module}"), function)
    kind = RunCommand if name == "run" else CommandWithExamples
    alone.command(name, cls=kind, hidden=name in _HIDDEN)(callback)
    command: Any = typer.main.get_command(alone)
    return command


def load_commands() -> dict[str, CommandWithExamples]:
    """Return all subcommands by name, hidden ones included."""
    return {name: load_command(name) for name in _COMMANDS}


class _Group(TyperGroup):
    """The command ``pipemem``. It lists its subcommands without importing them, and imports the one that is called."""

    def __init__(self, **settings: Any) -> None:
        listed = {name: TyperCommand(name, help=_summary(name), hidden=name in _HIDDEN) for name in _COMMANDS}
        super().__init__(**settings | {"commands": listed})

    # Contexts are those of click, which typer has taken in and does not export.
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if command is not None and name is not None else None, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = markup()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> object:
        """Run the subcommand (``exits_for_errors``)."""
        with exits_for_errors(lambda: " ".join(filter(None, ("pipemem", ctx.invoked_subcommand)))):
            return super().invoke(ctx)


app = typer.Typer(
    name="pipemem",
    cls=_Group,
    help="Pipeline schedules with controllable memory for stock Megatron-Core.",
    epilog="pipemem COMMAND --help shows examples; pipemem --install-completion lets the shell complete names.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from megatron_pipemem import __version__

        typer.echo(f"pipemem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the console script ``pipemem``."""
    app(prog_name="pipemem")
