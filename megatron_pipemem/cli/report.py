"""``pipemem report``: what came of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import check_output
from megatron_pipemem.cli.common import Json, console, print_json
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.planner.grid.config import Settings, label
from megatron_pipemem.planner.grid.results import Result
from megatron_pipemem.planner.grid.store import Store
from megatron_pipemem.report.grid import SUFFIXES, RunPoint, front, save_picture, table


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a grid, as `pipemem grid` wrote it; it may still run.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="Picture, .png or .svg; by default report.png in the folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the runs of a grid: throughput against peak memory, and those that are worth choosing."""
    check_output(output, SUFFIXES, "a comparison of runs")
    show(Store(folder), output or folder / "report.png", as_json)


def show(store: Store, picture: Path, as_json: bool) -> list[Result | None]:
    """Print and draw the results so far, and return them."""
    settings, results = store.settings(), store.results()
    points = [
        _point(result) for result in results if result is not None and result.peak_bytes and result.seconds_per_step
    ]
    drawn = picture if points else None
    missing = [index for index, result in enumerate(results) if result is None]
    if as_json:
        chosen = {point.number for point in front(points)}
        rows = [_facts(result) | {"front": result.index in chosen} for result in results if result is not None]
        print_json({"results": rows, "missing": missing, "picture": None if drawn is None else str(drawn)})
    else:
        _print(points, results, [label(settings[index]) for index in missing])
    if drawn is not None:
        with showing(f"drawing {drawn}"):
            save_picture(points, drawn, store.folder.name)
        if not as_json:
            console().print(str(drawn), soft_wrap=True, markup=False)
    return results


def _print(points: Sequence[RunPoint], results: Sequence[Result | None], missing: Sequence[str]) -> None:
    if points:
        console().print(table(points))
    for status in ("failed", "infeasible"):
        _print_reasons(status, [result for result in results if result is not None and result.status == status])
    if missing:
        console().print(f"without a result: {'; '.join(missing)}", soft_wrap=True, markup=False)


def _print_reasons(status: str, results: Sequence[Result]) -> None:
    """Points with the same reason together."""
    by_reason: dict[str, list[Settings]] = {}
    for result in results:
        by_reason.setdefault(result.reason or "", []).append(result.settings)
    for reason, settings in by_reason.items():
        console().print(f"{status}: {'; '.join(map(label, settings))}\n    {reason}", soft_wrap=True, markup=False)


def _facts(result: Result) -> dict[str, object]:
    found = {"peak_bytes": result.peak_bytes, "peaks_agree": result.peaks_agree}
    return asdict(result) | found


def _point(result: Result) -> RunPoint:
    return RunPoint(
        result.index,
        {key: str(value) for key, value in result.settings.items()},
        result.tokens_per_second,
        result.seconds_per_step,
        result.peak_bytes,
        result.predicted_peak,
        result.peaks_agree,
        _least(result.predicted_bubble_rate),
        _least(result.measured_bubble_rate),
    )


def _least(rates: Sequence[float | None]) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)
