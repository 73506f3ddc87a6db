"""The Typer app. One module per command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from megatron_pipemem import __version__
from megatron_pipemem.cli import check, convert, grid, launch, pareto, plan, profile, report, schedules, show, simulate
from megatron_pipemem.cli.common import INTERRUPTED, fail, report_error
from megatron_pipemem.errors import PipememError


class _Group(TyperGroup):
    def invoke(self, ctx: typer.Context) -> object:
        """Run the command; a user's error or an interrupt, ends in one line on stderr, never in a traceback."""
        try:
            return super().invoke(ctx)
        except PipememError as error:
            fail(error)
        except KeyboardInterrupt:
            report_error(f"pipemem {ctx.invoked_subcommand} was interrupted and has written nothing")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="pipemem",
    cls=_Group,
    help="Pipeline schedules with controllable memory for stock Megatron-Core.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("schedules")(schedules.schedules)
app.command("simulate")(simulate.simulate)
app.command("show")(show.show)
app.command("pareto")(pareto.pareto)
app.command("check")(check.check)
app.command("convert")(convert.convert)
app.command("plan")(plan.plan_command)
app.command("profile")(profile.profile)
app.command("launch")(launch.launch)
app.command("unfinished", hidden=True)(launch.unfinished)
app.command("grid")(grid.grid)
app.command("grid-result", hidden=True)(grid.grid_result)
app.command("report")(report.report)


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
@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def _run(
    script: Annotated[Path, typer.Argument(help="A Megatron training script, for example pretrain_gpt.py.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Flags of the script, and our --pipemem-* flags.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run CUDA-only Megatron on CPU ranks over gloo.")] = False,
) -> None:
    """Run a Megatron script with the plugin on, usually under torchrun."""
    from megatron_pipemem.cli.run import run

    run(cpu, script, arguments or [])


def main() -> None:
    """The console script ``pipemem``."""
    app(prog_name="pipemem")
