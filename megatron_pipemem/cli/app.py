"""Assemble the command ``pipemem`` from one function per subcommand, imported when it is called."""

from __future__ import annotations

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
        from megatron_pipemem.launch.command import flag_parser

        flags = flag_parser().format_help().partition(":\n")[2]  # without argparse's own heading
        formatter.write(f"\n Flags after the script\n{indent(flags, ' ')}")


@dataclass(frozen=True)
class _Entry:
    """Say where a command stands."""

    function: str  # "module.name" within megatron_pipemem.cli
    told: str  # the first sentence of its help, which is not read where all commands are listed
    kind: type[CommandWithExamples] = CommandWithExamples
    hidden: bool = False  # for other programs


_ENTRIES = {
    "schedules": _Entry(
        "schedules.schedules",
        "List the schedules to choose from: what each holds at its peak, how long it idles, what it needs; or explain one.",
    ),
    "simulate": _Entry(
        "simulate.simulate",
        "Run a schedule in the simulator: makespan, bubble, peak memory, messages, and how fast any could be.",
    ),
    "show": _Entry(
        "simulate.show",
        "Draw when every action runs and what every device holds: in the terminal, or into a file.",
    ),
    "pareto": _Entry(
        "simulate.pareto",
        "Compare bubble and peak memory of all families and of searched schedules; only the front is a choice.",
    ),
    "check": _Entry(
        "check.check",
        "Prove that a schedule may run: complete, ordered, free of deadlock, within memory; and write it as a file.",
    ),
    "advise": _Entry(
        "advise.advise_command",
        "Compare a run's schedule with others, and print the line that changes it.",
    ),
    "plan": _Entry(
        "plan.plan_command",
        "Choose tensor, pipeline and data parallelism, microbatch, schedule and recompute for a run, and rank what fits.",
    ),
    "layout": _Entry(
        "plan.layout_command",
        "Say which layers each pipeline stage should hold so that a step is shortest, beside the even split.",
    ),
    "profile": _Entry(
        "profile.profile",
        "Measure or compute what one layer, the embedding and the head take and keep.",
    ),
    "init": _Entry(
        "launch.init",
        "Write a run file to begin with: a model, cut as asked, on as few nodes as its ranks fill.",
    ),
    "launch": _Entry(
        "launch.launch",
        "Start this node's ranks of a run under torchrun; start the same on every node of it.",
    ),
    "grid": _Entry("launch.grid", "Train every point of a grid and compare them."),
    "report": _Entry(
        "report.report",
        "Compare the runs of a grid: throughput against peak memory, and those that are worth choosing.",
    ),
    "explain": _Entry(
        "report.explain_command",
        "Tell where the time of a run's last step went, rank by rank, and the three changes that would win most.",
    ),
    "trace": _Entry(
        "report.trace",
        "Show a step as it ran beside its plan in Perfetto.",
    ),
    "run": _Entry(
        "run.run_script", "Run a Megatron script with the plugin on, usually under torchrun.", kind=RunCommand
    ),
    "unfinished": _Entry(
        "launch.unfinished",
        "Exit with 0 if the run has a checkpoint to go on from, with 1 if it is finished or would start over; batch files ask.",
        hidden=True,
    ),
    "grid-result": _Entry(
        "launch.grid_result",
        "Collect the result of a grid's point whose training has ended; grid.sbatch calls this.",
        hidden=True,
    ),
}


def load_command(name: str) -> CommandWithExamples:
    """Import the function of a command, and return the command with all its options."""
    entry = _ENTRIES[name]
    module, _, function = entry.function.partition(".")
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    callback = getattr(import_module(f"megatron_pipemem.cli.{module}"), function)
    alone.command(name, cls=entry.kind, hidden=entry.hidden)(callback)
    command: Any = typer.main.get_command(alone)
    return command


def load_commands() -> dict[str, CommandWithExamples]:
    """Return all commands by name, those that the help does not list too."""
    return {name: load_command(name) for name in _ENTRIES}


class _Group(TyperGroup):
    """Know its commands by name and sentence, and import the one that is called."""

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
        """Run the command; a user's error or an interrupt ends in one line on stderr, never in a traceback."""
        try:
            return super().invoke(ctx)
        except PipememError as error:
            report_error(with_code(error))
            raise typer.Exit(INVALID if isinstance(error, ScheduleError) else UNUSABLE) from None
        except KeyboardInterrupt:
            report_error(f"pipemem {ctx.invoked_subcommand} was interrupted and has written nothing")
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the console script ``pipemem``."""
    app(prog_name="pipemem")
