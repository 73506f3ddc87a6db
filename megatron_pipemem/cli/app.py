"""Assemble the command ``pipemem`` from one module per subcommand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_pipemem import __version__
from megatron_pipemem.cli import check, convert, grid, launch, pareto, plan, profile, report, schedules, show, simulate
from megatron_pipemem.cli.common import INTERRUPTED, INVALID, UNUSABLE, report_error
from megatron_pipemem.cli.examples import CommandWithExamples, RunCommand, markup
from megatron_pipemem.errors import PipememError, ScheduleError


class _Group(TyperGroup):
    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        self.rich_markup_mode = markup()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: typer.Context) -> object:
        """Run the command; a user's error or an interrupt ends in one line on stderr, never in a traceback."""
        try:
            return super().invoke(ctx)
        except PipememError as error:
            report_error(str(error))
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
for _name, _command in (
    ("schedules", schedules.schedules),
    ("simulate", simulate.simulate),
    ("show", show.show),
    ("pareto", pareto.pareto),
    ("check", check.check),
    ("convert", convert.convert),
    ("plan", plan.plan_command),
    ("profile", profile.profile),
    ("launch", launch.launch),
    ("grid", grid.grid),
    ("report", report.report),
):
    app.command(_name, cls=CommandWithExamples)(_command)
app.command("unfinished", hidden=True)(launch.unfinished)
app.command("grid-result", hidden=True)(grid.grid_result)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipemem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


# Whatever follows the script is the script's, whether or not it looks like a flag of ours.
@app.command("run", cls=RunCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def _run(
    script: Annotated[Path, typer.Argument(help="A Megatron training script, for example pretrain_gpt.py.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Flags of the script, and the --pipemem-* flags below.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run CUDA-only Megatron on CPU ranks over gloo.")] = False,
) -> None:
    """Run a Megatron script with the plugin on, usually under torchrun.

    Examples:
        # by name
        torchrun --nproc-per-node 8 -m megatron_pipemem run pretrain_gpt.py FLAGS --pipemem-schedule v-half
        # the fastest that fits
        torchrun ... run pretrain_gpt.py FLAGS --pipemem-schedule auto --pipemem-memory-cap 6GiB
    """
    from megatron_pipemem.cli.run import run

    run(cpu, script, arguments or [])


def main() -> None:
    """Run the console script ``pipemem``."""
    app(prog_name="pipemem")
