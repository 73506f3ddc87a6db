"""``pipemem trace``: show a step as it ran beside its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import check_output
from megatron_pipemem.cli.common import console, print_json
from megatron_pipemem.cli.explain import read_case
from megatron_pipemem.cli.options import Json
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.planner.changes import Case
from megatron_pipemem.reading import check_exists
from megatron_pipemem.report import save_comparison

_DRAWN = (".json", ".html", ".png", ".svg")


def trace(
    report: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", help="What --pipemem-report wrote, or the `output` folder of a run."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for plan and run: .json for Perfetto, .html, .png or .svg; trace.json beside the report."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a step as it ran beside its plan in Perfetto.

    It writes one file with two processes: the run's schedule simulated with the run's own times, and the step as it ran.
    Open it at https://ui.perfetto.dev. Stock Megatron's own schedule is shown, too, if it ran with
    `--pipemem-schedule stock --pipemem-report FILE`.

    Examples:
        # plan and run in one file
        pipemem trace out/runs/tiny-cpu --output trace.json
    """
    check_output(output, _DRAWN, "plan and run")
    check_exists(report, "a report")
    case = read_case(report, 0.0)
    path = _save(case, output or (report if report.is_dir() else report.parent) / "trace.json")
    if as_json:
        print_json(
            {"output": str(path), "planned_seconds": case.own.makespan, "measured_seconds": case.step.length / 1e9}
        )
    else:
        console().print(str(path), soft_wrap=True, markup=False)


def _save(case: Case, path: Path) -> Path:
    """Write the run's schedule with its usual times, and the step as it ran."""
    plan, run = case.own, case.as_ran
    name = case.schedule.name
    plan, run = (
        replace(each, schedule=replace(each.schedule, name=f"{name}, {what}"))
        for each, what in ((plan, "planned with the run's times"), (run, "as it ran"))
    )
    with showing(f"drawing {path}"):
        return save_comparison([plan, run], path)
