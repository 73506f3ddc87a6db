"""``pipemem explain``: tell where the time of a run's step went, and what would win most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.common import console, print_json
from megatron_pipemem.cli.options import Json
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.config.runs import REPORT
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.launch.grid.results import report_of
from megatron_pipemem.planner.changes import Case
from megatron_pipemem.planner.explanation import LACKS_STEP, case_of_report, explain
from megatron_pipemem.report.explanation import change_lines, idle_table, lines


def explain_command(
    report: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", help="What --pipemem-report wrote, or the `output` folder of a run."),
    ],
    search_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for each search of a better order, of two; 0 for none.")
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """Tell where the time of a run's last step went, rank by rank, and the three changes that would win most.

    The idle time of every rank is split by cause: what the schedule makes unavoidable (warm-up and drain), uneven stages,
    unequal microbatches, messages, the host, actions that were late and whose, and the barrier at the step's end. Changes
    are simulated with the run's own times: other schedules in the same memory, offload, other layers per stage, steps
    without a barrier, vocabulary parallelism, ordered microbatches. What the run's configuration refuses is left out. Stock
    Megatron is explained, too: run it with `--pipemem-schedule stock --pipemem-report FILE`.

    Examples:
        # a run, by its report
        pipemem explain out/runs/tiny-cpu/report.json
        # for programs
        pipemem explain out/runs/tiny-cpu --json
    """
    case = read_case(report, search_seconds)
    with showing("simulating what the run could do otherwise"):
        facts = explain(case)
    if as_json:
        print_json(facts)
        return
    out = console()
    for line in lines(facts):
        out.print(line, soft_wrap=True, markup=False)
    out.print(idle_table(facts))
    for line in change_lines(facts):
        out.print(line, soft_wrap=True, markup=False)


def read_case(path: Path, search_seconds: float) -> Case:
    """Return the step of a report.

    Args:
        path: of the report, or of a run's folder.
        search_seconds: for each search of an order.

    Raises:
        ConfigError: it is no report, or lacks the step.
    """
    path = path / REPORT if path.is_dir() else path
    with report_of(path) as report:
        case = case_of_report(report, search_seconds)
    if case is None:
        raise ConfigError("wrong-file", LACKS_STEP, file=path)
    return case
