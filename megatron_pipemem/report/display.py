"""Show schedules, runs and results of searches where their user is: in a notebook, in a terminal, or as a table of pandas."""

from __future__ import annotations

from html import escape
from typing import Any

from rich.console import Console

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.report.html import page
from megatron_pipemem.report.placements import HEADINGS, cells, placements_table
from megatron_pipemem.report.terminal import TerminalTimeline
from megatron_pipemem.report.timeline import DrawnRun
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.search.result import SearchResult


def show(shown: Schedule | Timeline | SearchResult) -> None:
    """Show a picture in a notebook, and coloured letters in a terminal."""
    console = Console()
    if console.is_jupyter:
        from IPython.display import display

        display(shown)
        return
    if isinstance(shown, SearchResult):
        console.print(placements_table(shown.candidates))
    console.print(TerminalTimeline(_run_of(shown)))


def to_html(shown: Schedule | Timeline | SearchResult) -> str:
    """Return the page of a run in a frame, below a table of placements where it is the best that a search found.

    A schedule is drawn as it runs with F = I = W. One that cannot run is told in words.
    """
    try:
        run = _run_of(shown)
    except ScheduleError as error:
        return f"<pre>{escape(f'{shown!r}: {error}')}</pre>"
    table = ""
    if isinstance(shown, SearchResult):
        rows = [(HEADINGS, "th"), *((cells(each), "td") for each in shown.candidates)]
        lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for row, tag in rows)
        table = f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
    content = page([run]).replace("&", "&amp;").replace("'", "&#39;")
    return f"{table}{frame(run, f"srcdoc='{content}'")}"


def frame(run: Timeline, content: str) -> str:
    """Return the HTML element that shows a page of one run, as high as that is.

    Args:
        run: what the page shows.
        content: the attribute that says where the page comes from.
    """
    height = 48 * run.schedule.num_devices + 225  # pixels
    style = f"width:100%;height:{height}px;border:0;background:#fff"
    return f"<iframe title='{escape(DrawnRun(run).headline)}' style='{style}' {content}></iframe>"


def to_dataframe(timeline: Timeline) -> Any:
    """Return a ``pandas.DataFrame`` with a row per action, as ``Timeline.to_dataframe`` says.

    Raises:
        UnsupportedError: pandas is missing.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise UnsupportedError("not-installed", f"a data frame needs {error.name}: pip install {error.name}") from error
    return pandas.DataFrame(
        {
            "device": box.device,
            "action": str(box.action),
            "kind": box.action.kind.value,
            "stage": box.action.stage,
            "chunk": box.chunk,
            "microbatch": box.action.microbatch,
            "start": box.start,
            "end": box.end,
            "held": box.held,
        }
        for row in DrawnRun(timeline).rows
        for box in row
    )


def _run_of(shown: Schedule | Timeline | SearchResult) -> Timeline:
    """Return the run that a picture of it shows."""
    if isinstance(shown, Timeline):
        return shown
    return simulate(shown.schedule, shown.costs) if isinstance(shown, SearchResult) else simulate(shown)
