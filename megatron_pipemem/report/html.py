"""Write timelines as one self-contained HTML page: zoom, a slider over time, and the details of every action and bubble.

The page itself is ``page.html`` beside this file, with its style and script; here they are put together with the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from megatron_pipemem.report.run import UNITS
from megatron_pipemem.report.timeline import (
    IDLE,
    DrawnRun,
    colour,
    common_end,
    ink,
)
from megatron_pipemem.schedule.action import COMPUTE, COPIES
from megatron_pipemem.schedule.simulator import Timeline


def page(timelines: Sequence[Timeline]) -> str:
    """Return the page as text. It loads nothing from elsewhere."""
    runs = [DrawnRun(timeline) for timeline in timelines]
    data = {
        "kinds": {kind.value: kind.spec.says for kind in COMPUTE},
        "idle": IDLE,
        "shared": common_end(timelines),
        "runs": [_data(run, run.memory_scale(runs)) for run in runs],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    in_units = any(run.in_units for run in runs)
    parts = {
        "@TITLE@": escape(", ".join(timeline.schedule.name for timeline in timelines)),
        "@FACTS@": escape("; ".join(run.headline for run in runs)) + ".",
        "@UNITS@": f" Memory is in {UNITS}; 1 is dashed." if in_units else "",
        "@DATA@": text.replace("</", "<\\/"),  # "</" would end the script element that holds the data
        "@STYLE@": _part("page.css"),
        "@SCRIPT@": _part("page.js"),
    }
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(run: DrawnRun, top: float) -> dict[str, object]:
    timeline, rows, pairs = run.timeline, run.rows, run.legend
    lanes = run.host_transfers or ((),) * len(rows)
    shades = [(shade, ink(shade)) for shade in (run.colour(*pair) for pair in pairs)]
    shade_of = {pair: place for place, pair in enumerate(pairs)}
    index = {box.action: place for place, box in enumerate(box for row in rows for box in row)}
    return {
        "name": timeline.schedule.name,
        "title": run.headline,
        "facts": (
            f"Makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g}, messages "
            f"{timeline.messages}, peak {run.peak_text}."
        ),
        "slices": timeline.schedule.slices,
        "makespan": timeline.makespan,
        "bytes": not run.in_units,
        "limit": 1 if run.in_units else None,
        "top": top,
        "peaks": timeline.peaks,
        "shades": shades,
        "legend": [(run.legend_name(*pair), *shade) for pair, shade in zip(pairs, shades, strict=True)]
        + [(kind.spec.says, colour(kind), ink(colour(kind))) for kind in COPIES if any(lanes)],
        "rows": [
            {
                "name": [str(box.action) for box in row],
                "mb": [box.action.microbatch for box in row],
                "chunk": [box.chunk for box in row],
                # Actions on memory have no width to be coloured.
                "shade": [shade_of.get((box.action.kind, box.chunk), 0) for box in row],
                "copies": [(_short(copy.start), _short(copy.end), colour(copy.action.kind)) for copy in lane],
                "start": [_short(box.start) for box in row],
                "end": [_short(box.end) for box in row],
                "held": [_short(box.held) for box in row],
                "from": [index[source.action] if (source := run.awaited.get(box.action)) else -1 for box in row],
            }
            for row, lane in zip(rows, lanes, strict=True)
        ],
    }


def _short(value: float) -> float:
    """Write a number with fewer characters in the page: whole numbers without a point, others to what a picture can
    tell.
    """
    return int(value) if value == int(value) else float(f"{value:.9g}")
