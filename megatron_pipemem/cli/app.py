"""The command ``pipemem``, and the table of its subcommands. A subcommand's module is imported only when it is
called.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from importlib import import_module
from itertools import batched
from textwrap import indent
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from megatron_pipemem.cli.common import INTERRUPTED, INVALID, UNUSABLE, report_error
from megatron_pipemem.errors import PipememError, ScheduleError, with_code

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
        from megatron_pipemem.launch.command import flag_parser

        flags = flag_parser().format_help().partition(":\n")[2]  # without argparse's own heading
        formatter.write(f"\n Flags after the script\n{indent(flags, ' ')}")


@dataclass(frozen=True)
class _Entry:
    """The function and the summary of a subcommand."""

    function: str  # ``module.name`` within ``megatron_pipemem.cli``
    told: str  # the first sentence of its help, so that listing all commands imports no command
    kind: type[CommandWithExamples] = CommandWithExamples
    hidden: bool = False  # only other programs call it


_ENTRIES = {
    "schedules": _Entry(
        "schedules.schedules",
        "List the schedules to choose from, with peak memory, bubble and needs; or explain one of them.",
    ),
    "simulate": _Entry(
        "simulate.simulate",
        "Simulate a schedule: makespan, bubble, peak memory, messages, and the lower bound of the makespan.",
    ),
    "show": _Entry(
        "simulate.show",
        "Draw the time of every action and the memory of every device, in the terminal or into a file.",
    ),
    "explore": _Entry(
        "explore.explore",
        "Serve a page on which sliders change two schedules, with their timelines, memory, bubble and peak.",
    ),
    "pareto": _Entry(
        "simulate.pareto",
        "Compare bubble and peak memory of all families and of searched schedules, and list the best trade-offs.",
    ),
    "check": _Entry(
        "check.check",
        "Prove that a schedule can run: complete, ordered, free of deadlock, within memory. Write it to a file if asked.",
    ),
    "advise": _Entry(
        "advise.advise_command",
        "Compare a run's schedule with others, and print the line that changes it.",
    ),
    "plan": _Entry(
        "plan.plan_command",
        "Choose parallelism, microbatch, schedule and recompute for a run, and rank the plans that fit.",
    ),
    "layout": _Entry(
        "plan.layout_command",
        "Choose the layers of each pipeline stage that make a step shortest, and compare with the even split.",
    ),
    "profile": _Entry(
        "profile.profile",
        "Measure or compute the seconds and bytes of one layer, of the embedding and of the head.",
    ),
    "init": _Entry(
        "launch.init",
        "Write a first run file: a model, its parallelism, and as few nodes as its ranks fill.",
    ),
    "launch": _Entry(
        "launch.launch",
        "Start this node's ranks of a run under torchrun. Call it once on every node.",
    ),
    "grid": _Entry("launch.grid", "Train every point of a grid and compare them."),
    "report": _Entry(
        "report.report",
        "Compare the runs of a grid by throughput and peak memory, and mark those worth choosing.",
    ),
    "explain": _Entry(
        "report.explain_command",
        "Show where each rank spent the time of the last step, and up to three changes that would make a step faster.",
    ),
    "trace": _Entry(
        "report.trace",
        "Show a measured step and its plan in Perfetto.",
    ),
    "run": _Entry(
        "run.run_script", "Run a Megatron script with the plugin on, usually under torchrun.", kind=RunCommand
    ),
    "unfinished": _Entry(
        "launch.unfinished",
        "Exit with 0 if the run can resume from a checkpoint, else with 1. Batch files call this.",
        hidden=True,
    ),
    "grid-result": _Entry(
        "launch.grid_result",
        "Collect the result of a grid point whose training has ended. grid.sbatch calls this.",
        hidden=True,
    ),
}


def load_command(name: str) -> CommandWithExamples:
    """Import the function of a subcommand, and return the command with its options."""
    entry = _ENTRIES[name]
    module, _, function = entry.function.partition(".")
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    callback = getattr(import_module(f"megatron_pipemem.cli.{module}"), function)
    alone.command(name, cls=entry.kind, hidden=entry.hidden)(callback)
    command: Any = typer.main.get_command(alone)
    return command


def load_commands() -> dict[str, CommandWithExamples]:
    """Return all subcommands by name, hidden ones included."""
    return {name: load_command(name) for name in _ENTRIES}


class _Group(TyperGroup):
    """The command ``pipemem``. It lists its subcommands without importing them, and imports the one that is called."""

    def __init__(self, **settings: Any) -> None:
        listed = {name: TyperCommand(name, help=each.told, hidden=each.hidden) for name, each in _ENTRIES.items()}
        super().__init__(**settings | {"commands": listed})

    # Contexts are those of click, which typer has taken in and does not export.
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if command is not None and name is not None else None, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = markup()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> object:
        """Run the subcommand. Report a user's error or an interrupt in one line on stderr, without a traceback.

        Exit then with ``INVALID``, ``UNUSABLE`` or ``INTERRUPTED``. All other errors are raised.
        """
        try:
            return super().invoke(ctx)
        except PipememError as error:
            report_error(with_code(error))
            raise typer.Exit(INVALID if isinstance(error, ScheduleError) else UNUSABLE) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            report_error(
                f"{str(error.filename)[:40]}... is too long for the name of a file; give a shorter one [no-file]"
            )
            raise typer.Exit(UNUSABLE) from None
        except KeyboardInterrupt:
            report_error(f"pipemem {ctx.invoked_subcommand} was interrupted and wrote nothing")
            raise typer.Exit(INTERRUPTED) from None


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
