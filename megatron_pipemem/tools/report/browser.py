"""Show timelines in notebooks, and write them as traces for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from itertools import count
from typing import TYPE_CHECKING, Any

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import MEMORY
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.tools.console import Console
from megatron_pipemem.tools.report.page import page
from megatron_pipemem.tools.report.terminal import HEADINGS, TerminalTimeline, cells, placements_table
from megatron_pipemem.tools.report.timeline import DrawnRun, held_steps

if TYPE_CHECKING:
    from megatron_pipemem.search.result import SearchResult


def show(shown: Schedule | Timeline | SearchResult) -> None:
    """Show a picture in a notebook, or print a coloured timeline in a terminal.

    For a search result, a table of its placements comes first.
    """
    console = Console()
    if console.is_jupyter:
        from IPython.display import display

        display(shown)
        return
    if not isinstance(shown, Schedule | Timeline):
        console.print(placements_table(shown.candidates, DrawnRun(_run_of(shown)).memory_text))
    console.print(TerminalTimeline(_run_of(shown)))


def to_html(shown: Schedule | Timeline | SearchResult) -> str:
    """Return an HTML frame with the page of a timeline. For a search result, a table of placements comes first.

    A schedule is drawn with F = I = W. If the schedule cannot run, the result is its error.
    """
    try:
        run = _run_of(shown)
    except ScheduleError as error:
        return f"<pre>{escape(f'{shown!r}: {error}')}</pre>"
    table = ""
    if not isinstance(shown, Schedule | Timeline):
        rows = [
            (HEADINGS, "th"),
            *((cells(candidate, DrawnRun(run).memory_text), "td") for candidate in shown.candidates),
        ]
        lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for row, tag in rows)
        table = f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
    content = page([run]).replace("&", "&amp;").replace("'", "&#39;")
    return f"{table}{frame(run, f"srcdoc='{content}'")}"


def frame(run: Timeline, content: str) -> str:
    """Return the HTML element that shows the page of one timeline at its full height.

    ``content`` is the element's attribute with the page: ``srcdoc='...'`` with its text, or ``src='...'``.
    """
    height = 60 * run.schedule.num_devices + 225  # pixels; page.css and page.js have the height of a row
    style = f"width:100%;height:{height}px;border:0;background:#fff"
    return f"<iframe title='{escape(DrawnRun(run).headline)}' style='{style}' {content}></iframe>"


def to_dataframe(timeline: Timeline) -> Any:
    """Return a ``pandas.DataFrame`` with a row per action (see ``Timeline.to_dataframe``).

    Raise an UnsupportedError if pandas is not installed.
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
    """Return the timeline to draw: the argument itself, or a simulation of it."""
    if isinstance(shown, Timeline):
        return shown
    return simulate(shown) if isinstance(shown, Schedule) else simulate(shown.schedule, shown.costs)


_MICROSECONDS = 1e6


def trace(timelines: Sequence[Timeline]) -> dict[str, object]:
    """Return the timelines as a Perfetto trace, an object for JSON. One second of the costs is one second of the
    trace.
    """
    flow_ids = count(1)
    events: list[dict[str, object]] = []
    for process, timeline in enumerate(timelines):
        events += _process_events(process, timeline, flow_ids)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def to_json(timelines: Sequence[Timeline]) -> str:
    return json.dumps(trace(timelines), separators=(",", ":"), allow_nan=False)


def _process_events(process: int, timeline: Timeline, flow_ids: count[int]) -> list[dict[str, object]]:
    run = DrawnRun(timeline)
    rows, unit = run.rows, "units" if run.in_units else "bytes"
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": run.headline}}
    ]

    def name_track(number: int, name: str) -> None:
        track = {"pid": process, "tid": number}
        events.append({"ph": "M", "name": "thread_name", **track, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": number}})

    def add_slice(number: int, name: str, category: str, times: tuple[float, float], **arguments: object) -> None:
        start, end = times
        track = {"pid": process, "tid": number, "ts": start * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
        events.append({"ph": "X", "name": name, "cat": category, **track, "args": arguments})

    for device, row in enumerate(rows):
        name_track(device, f"device {device}")
        for box in row:
            if box.action.kind not in MEMORY:
                labels = {"stage": box.action.stage, "chunk": box.chunk, "microbatch": box.action.microbatch}
                held_after = {f"held after ({unit})": box.held}
                name, category = f"PP:{box.action}", box.action.kind.spec.says
                add_slice(device, name, category, (box.start, box.end), **labels, **held_after)
        for time, held in held_steps(row):
            counter = {"ph": "C", "name": f"held by device {device}", "pid": process, "tid": device}
            events.append({**counter, "ts": time * _MICROSECONDS, "args": {unit: held}})
    for device, lane in enumerate(run.host_transfers):
        if lane:
            name_track(len(rows) + device, f"copies of device {device}")
        for copy in lane:
            labels = {"stage": copy.action.stage, "microbatch": copy.action.microbatch}
            category = copy.action.kind.spec.says
            add_slice(len(rows) + device, str(copy.action), category, (copy.start, copy.end), **labels)
    if timeline.collectives:
        name_track(2 * len(rows), "collectives")
    for (kind, _, microbatch), start, end in timeline.collectives:
        times = (start - run.origin, end - run.origin)
        add_slice(2 * len(rows), f"PP:{kind}{microbatch}", "collective", times, microbatch=microbatch)
    for message, flow in zip(run.messages, flow_ids, strict=False):
        for phase, box in (("s", message.producer), ("f", message.consumer)):
            # An arrow belongs to the slice around its time, and the middle is certainly inside.
            middle = (box.start + box.end) / 2 * _MICROSECONDS
            arrow = {"ph": phase, "name": "message", "cat": "message", "id": flow, "pid": process, "tid": box.device}
            events.append({**arrow, "ts": middle, **({"bp": "e"} if phase == "f" else {})})
    return events
