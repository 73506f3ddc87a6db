"""``pipemem report``, ``explain`` and ``trace``: results of a run or grid, causes of idle time, the measured step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.files import check_exists
from megatron_pipemem.results import lines
from megatron_pipemem.schedule.registry import families
from megatron_pipemem.tools.cli.common import Shown, print_answer, print_file, showing
from megatron_pipemem.tools.cli.options import Json, check_output
from megatron_pipemem.tools.config.runs import REPORT
from megatron_pipemem.tools.launch.grid.comparison import draw, front, table
from megatron_pipemem.tools.launch.grid.points import Settings, label
from megatron_pipemem.tools.launch.grid.store import Result, Store
from megatron_pipemem.tools.planner.explanation import Case, explain, read_case
from megatron_pipemem.tools.report import save_comparison
from megatron_pipemem.tools.report.figure import IMAGES, write_picture
from megatron_pipemem.tools.report.run import explanation_lines, idle_table, opened_report
from megatron_pipemem.tools.report.run import table as run_table


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|FILE",
            help="Folder of a grid, which may still run; or of one run, its `output` folder or its report file.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Picture of a grid, .png or .svg. Default: report.png in the folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the runs of a grid by throughput and peak memory, and mark those worth choosing.

    For one run, compare the measured step with the plan.

    Examples:
        # see the results so far of a grid
        pipemem report out/grids/tiny-cpu
        # write the picture elsewhere
        pipemem report out/grids/tiny-cpu --output report.svg
    """
    check_output(output, IMAGES, "a comparison of runs")
    check_exists(folder, "a grid, or the report of a run,")
    one = folder if folder.is_file() else folder / REPORT
    if Store(folder).exists():
        show(Store(folder), output or folder / "report.png", as_json)
    elif not one.is_file():
        raise ConfigError(
            "wrong-file",
            "holds neither a grid nor the report of a run; give a folder that pipemem grid or pipemem launch wrote",
            file=folder,
        )
    elif output is not None:
        raise UnsupportedError(
            "conflicting-options", f"{folder} holds one run, and --output draws grids; leave --output out"
        )
    else:
        _show_run(one, as_json)


def show(store: Store, picture: Path, as_json: bool) -> list[Result | None]:
    """Print a table and save a picture of the grid points with measured steps and bytes. Return all results.

    A point without a result has ``None``. No picture is saved if no point is measured.
    """
    settings, results = store.settings(), store.results()
    points = [result for result in results if result is not None and result.peak_bytes and result.seconds_per_step]
    drawn = picture if points else None
    missing = [index for index, result in enumerate(results) if result is None]
    chosen = {point.index for point in front(points)}
    rows = [
        asdict(result)
        | {
            "peak_bytes": result.peak_bytes,
            "share_of_1f1b": result.share_of_1f1b,
            "peaks_agree": result.peaks_agree,
            "front": result.index in chosen,
        }
        for result in results
        if result is not None
    ]
    facts = {"results": rows, "missing": missing, "picture": drawn}
    print_answer(facts, _compared(points, results, [label(settings[index]) for index in missing]), as_json)
    if drawn is not None:
        kind, name = "a comparison of runs", store.folder.name
        print_file(drawn, lambda: write_picture(lambda: draw(points, name), drawn, kind), as_json)
    return results


def _show_run(path: Path, as_json: bool) -> None:
    with opened_report(path) as report:
        shown: list[Shown] = [*lines(report), run_table(report)]
        shown += [[("next", f"pipemem explain {path} splits the idle time by cause")]] * bool(report.get("last_step"))
        page = report["timelines"] and Path(report["timelines"]) / "run.html"
    print_answer(report, shown + [page] * bool(page and page.is_file()), as_json)


def _compared(points: Sequence[Result], results: Sequence[Result | None], missing: Sequence[str]) -> Iterator[Shown]:
    if points:
        yield table(points)
    by_reason: dict[tuple[str, str | None], list[Settings]] = {}  # one paragraph per reason
    for result in results:
        if result is not None and result.status != "done":
            by_reason.setdefault((result.status, result.reason), []).append(result.settings)
    for (status, reason), settings in sorted(by_reason.items(), key=lambda item: item[0][0]):
        yield f"{status}: {'; '.join(map(label, settings))}\n    {reason or ''}"
    if missing:
        yield f"without a result: {'; '.join(missing)}"


def explain_command(
    report: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", help="The file of --pipemem-report, or the `output` folder of a run."),
    ],
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT.sh | RUN.yaml [KEY=VALUE ...] | -- COMMAND]",
            help="The run, as `pipemem advise` reads it: compare its schedule with others at the measured times.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where each rank spent the time of the last step; given the run too, which schedule would make it shorter.

    The idle time of every rank is split by cause: warm-up and drain of the schedule, uneven stages, unequal microbatches,
    messages, the host, late actions of a named rank, and the barrier at the end of the step. The comparison with other
    schedules and layouts is that of `pipemem advise`, with the seconds of this report. A run of stock Megatron is
    explained too, if it has the flags `--pipemem-schedule stock --pipemem-report FILE`.

    Examples:
        # explain a run by its report
        pipemem explain out/runs/tiny-cpu/report.json
        # compare the schedules that the run could have
        pipemem explain out/runs/tiny-cpu configs/runs/tiny-cpu.yaml
        # print JSON for other programs
        pipemem explain out/runs/tiny-cpu --json
    """
    case, file = read_case(report), report / REPORT if report.is_dir() else report
    facts = explain(case)
    answer: list[Shown] = [
        [
            (
                "next",
                f"pipemem explain {file} RUN compares schedules and layouts at these times; RUN: its script or file",
            )
        ]
    ]
    if source:
        from megatron_pipemem.tools.cli.advise import advise_measured  # only here, because it imports the planner

        answer, facts["advice"] = advise_measured(source, file)
        today, measured = facts["advice"]["ways"]["today"]["schedule"], case.schedule.name
        if measured != today and {measured, today} <= {family.name for family in families()}:
            answer.append([("other schedule", f"the report is of {measured}, and the run has {today}")])
        elif (warning := _lost_by_scaling(case, facts["advice"]["ways"]["today"]["seconds"])) is not None:
            answer.append([("averaged", warning)])
    print_answer(facts, [*explanation_lines(facts), idle_table(facts), *answer], as_json)


_ALIKE = 0.05
"""The fraction by which the step of a run may differ from its measured step without a warning."""


def _lost_by_scaling(case: Case, seconds: float) -> str | None:
    """Return a warning if the step of ``seconds`` that the comparison has for the run is not about the measured one."""
    measured = case.step.length_ns / 1e9
    if abs(seconds - measured) <= _ALIKE * measured:
        return None
    return (
        f"the row of today is {seconds:.3g} s, and the measured step {measured:.3g} s: all stages are scaled by one measured "
        "factor each for F, I and W, so a stage that is slower than its layers say, and waits for the host, are left out"
    )


_DRAWN = (".json", ".html", ".png", ".svg")


def trace(
    report: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", help="The file of --pipemem-report, or the `output` folder of a run."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for both: .json for Perfetto, .html, .png or .svg. Default: trace.json in the report's folder."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a measured step and its plan in Perfetto.

    Process 0 is the run's schedule, simulated with the measured times. Process 1 is the measured step. Open the file at
    https://ui.perfetto.dev. Stock Megatron's own schedule is shown too, if the run has the flags
    `--pipemem-schedule stock --pipemem-report FILE`.

    Examples:
        # write plan and measured step to one file
        pipemem trace out/runs/tiny-cpu --output trace.json
    """
    check_output(output, _DRAWN, "plan and run")
    case = read_case(report)
    path = _save_trace(case, output or (report if report.is_dir() else report.parent) / "trace.json")
    facts = {
        "output": path,
        "planned_seconds": case.own_timeline.makespan,
        "measured_seconds": case.step.length_ns / 1e9,
    }
    print_answer(facts, [path], as_json)


def _save_trace(case: Case, path: Path) -> Path:
    """Draw the measured step and the plan with the measured times into one file, and return its path."""
    plan, run = case.planned_timeline, case.measured_timeline
    name = case.schedule.name
    plan, run = (
        replace(timeline, schedule=replace(timeline.schedule, name=f"{name}, {part}"))
        for timeline, part in ((plan, "planned with the run's times"), (run, "as it ran"))
    )
    with showing(f"drawing {path}"):
        return save_comparison([plan, run], path)
