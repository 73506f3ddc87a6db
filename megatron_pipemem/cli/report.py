"""``pipemem report``: tell what came of a grid, or of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import check_output
from megatron_pipemem.cli.common import console, print_json
from megatron_pipemem.cli.options import Json
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.config.runs import REPORT
from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.launch.grid.comparison import front, save_picture, table
from megatron_pipemem.launch.grid.config import Settings, label
from megatron_pipemem.launch.grid.results import Result, report_of
from megatron_pipemem.launch.grid.store import Store
from megatron_pipemem.reading import check_exists
from megatron_pipemem.report.picture import SUFFIXES
from megatron_pipemem.report.run import lines
from megatron_pipemem.report.run import table as run_table


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|FILE",
            help="Of a grid, which may still run, or of one run: its `output` folder, or what --pipemem-report wrote.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Picture of a grid, .png or .svg; by default report.png in the folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the runs of a grid: throughput against peak memory, and those that are worth choosing.

    Of one run: what it did against what was planned.

    Examples:
        # also while it runs
        pipemem report out/grids/tiny-cpu
        # the picture elsewhere
        pipemem report out/grids/tiny-cpu --output report.svg
    """
    check_output(output, SUFFIXES, "a comparison of runs")
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
        raise UnsupportedError("conflicting-options", f"{folder} is of one run, and --output draws grids; leave it out")
    else:
        _show_run(one, as_json)


def show(store: Store, picture: Path, as_json: bool) -> list[Result | None]:
    """Print and draw the results so far, and return them.

    Args:
        store: folder of the grid.
        picture: file to draw into.
        as_json: print JSON instead of tables.
    """
    settings, results = store.settings(), store.results()
    points = [each for each in results if each is not None and each.peak_bytes and each.seconds_per_step]
    drawn = picture if points else None
    missing = [index for index, result in enumerate(results) if result is None]
    if as_json:
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
        print_json({"results": rows, "missing": missing, "picture": None if drawn is None else str(drawn)})
    else:
        _print(points, results, [label(settings[index]) for index in missing])
    if drawn is not None:
        with showing(f"drawing {drawn}"):
            save_picture(points, drawn, store.folder.name)
        if not as_json:
            console().print(str(drawn), soft_wrap=True, markup=False)
    return results


def _show_run(path: Path, as_json: bool) -> None:
    with report_of(path) as report:
        told, ranks = lines(report), run_table(report)
        page = report["timelines"] and Path(report["timelines"]) / "run.html"
    if as_json:
        print_json(report)
        return
    out = console()
    for line in told:
        out.print(line, soft_wrap=True, markup=False)
    out.print(ranks)
    if page and page.is_file():
        out.print(str(page), soft_wrap=True, markup=False)


def _print(points: Sequence[Result], results: Sequence[Result | None], missing: Sequence[str]) -> None:
    if points:
        console().print(table(points))
    by_reason: dict[tuple[str, str | None], list[Settings]] = {}  # those with the same reason together
    for result in results:
        if result is not None and result.status != "done":
            by_reason.setdefault((result.status, result.reason), []).append(result.settings)
    for (status, reason), settings in sorted(by_reason.items(), key=lambda item: item[0][0]):
        told = f"{status}: {'; '.join(map(label, settings))}\n    {reason or ''}"
        console().print(told, soft_wrap=True, markup=False)
    if missing:
        console().print(f"without a result: {'; '.join(missing)}", soft_wrap=True, markup=False)
