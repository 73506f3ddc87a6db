"""``pipemem trace``: show a step as it ran beside its plan, or read what a profiler recorded of stock Megatron."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import check_output
from megatron_pipemem.cli.common import console, print_json
from megatron_pipemem.cli.explain import SearchSeconds, read_case, show
from megatron_pipemem.cli.options import Json
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.config.runs import REPORT
from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.planner.changes import Case
from megatron_pipemem.planner.profiler_trace import measured_step, read_rank
from megatron_pipemem.reading import check_exists
from megatron_pipemem.report import save_comparison

_DRAWN = (".json", ".html", ".png", ".svg")


def trace(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE...",
            help="The report of a run, or its folder; or what torch.profiler wrote: one file per rank, or their folder.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for plan and run: .json for Perfetto, .html, .png or .svg. Of a report: trace.json beside it."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="N|N,N,...", help="Of what a profiler recorded: layers of the model, or of every stage."),
    ] = None,
    search_seconds: SearchSeconds = 2.0,
    as_json: Json = False,
) -> None:
    """Show a step as it ran beside its plan in Perfetto, or explain what a profiler recorded of stock Megatron.

    Of a report, it writes one file with two processes: the run's schedule simulated with the run's own times, and the step
    as it ran. Open it at https://ui.perfetto.dev.

    Of the traces that `torch.profiler` wrote (Megatron: `--profile --use-pytorch-profiler`, one file per rank), it finds every
    forward and backward, and tells where the time went and which schedule would win most, as `pipemem explain` does.

    Examples:
        # plan and run in one file
        pipemem trace out/runs/tiny-cpu --output trace.json
        # a stock run, by what its ranks recorded
        pipemem trace out/torch_profile
        # the same, with its layers: other cuts are tried, too
        pipemem trace out/torch_profile/rank-*.json.gz --layers 32
    """
    check_output(output, _DRAWN, "plan and run")
    for source in sources:
        check_exists(source, "a report or a trace")
    report = _report_in(sources)
    if report is not None:
        if layers is not None:
            raise UnsupportedError(
                "conflicting-options",
                "--layers is for what a profiler recorded, and a report knows its layers; leave it out",
            )
        _draw(read_case(report, 0.0), output or report.parent / "trace.json", as_json)
        return
    with showing("reading traces"):
        paths = _files(sources)
        step = measured_step([read_rank(path, number) for number, path in enumerate(paths)])
    case = Case(step, _layers(layers, step.schedule.num_stages), is_stock=True, search_seconds=search_seconds)
    if output is not None:
        _save(case, output)
    show(case, as_json)


def _report_in(sources: Sequence[Path]) -> Path | None:
    """Return the report that a user means, if it is no trace."""
    if len(sources) != 1:
        return None
    path = sources[0] / REPORT if (sources[0] / REPORT).is_file() else sources[0]
    return path if path.is_file() and path.suffix != ".gz" else None


def _files(sources: Sequence[Path]) -> list[Path]:
    """Return the files of all ranks, by the numbers in their names."""
    if len(sources) == 1 and sources[0].is_dir():
        sources = [path for path in sources[0].iterdir() if path.name.endswith((".json", ".json.gz"))]
    if len(sources) < 2:
        raise ConfigError(
            "missing-option",
            "give the traces of at least two pipeline ranks, one file each, or their folder",
            key="sources",
        )
    return sorted(sources, key=lambda path: ([*map(int, re.findall(r"\d+", path.name))], path.name))


def _layers(text: str | None, stages: int) -> tuple[int, ...] | None:
    """Return the layers of every stage."""
    if text is None:
        return None
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        counts = ()
    if len(counts) == 1 and counts[0] % stages == 0:
        counts = (counts[0] // stages,) * stages
    if len(counts) != stages or min(counts) < 0:
        raise ConfigError(
            "bad-layout",
            f"{text!r} are no layers of {stages} stages; give a multiple of {stages}, or one number per stage",
            key="--layers",
        )
    return counts


def _draw(case: Case, path: Path, as_json: bool) -> None:
    written = _save(case, path)
    if as_json:
        print_json(
            {"output": str(written), "planned_seconds": case.own.makespan, "measured_seconds": case.step.length / 1e9}
        )
    else:
        console().print(str(written), soft_wrap=True, markup=False)


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
