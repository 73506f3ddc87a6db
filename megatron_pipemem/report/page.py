"""Fill the HTML page of timelines, ``page.html``, ``page.css`` and ``page.js`` in this folder, with JSON data.

This module needs no other installed package, because the explorer runs it in a browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files

from megatron_pipemem.report.timeline import IDLE, UNITS, DrawnRun, colour, common_end, ink
from megatron_pipemem.schedule.action import COMPUTE, COPIES
from megatron_pipemem.schedule.simulator import Timeline


def page(timelines: Sequence[Timeline]) -> str:
    """Return the text of an HTML page with these timelines. The page loads no other file."""
    runs = [DrawnRun(timeline) for timeline in timelines]
    title = ", ".join(timeline.schedule.name for timeline in timelines)
    return filled(page_data(timelines), title, "; ".join(run.headline for run in runs) + ".")


def page_data(timelines: Sequence[Timeline], limit: float = 1.0) -> dict[str, object]:
    """Return all data that ``page.js`` draws, as an object for JSON.

    ``limit`` is the place of the dashed memory line, in activation units.
    """
    runs = [DrawnRun(timeline) for timeline in timelines]
    return {
        "kinds": {kind.value: kind.spec.says for kind in COMPUTE},
        "idle": IDLE,
        "shared": common_end(timelines) if timelines else 1.0,
        "units": f"Memory is in {UNITS}; {limit:g} is dashed." if any(run.in_units for run in runs) else "",
        "runs": [_data(run, max(run.memory_scale(runs), 1.02 * limit), limit) for run in runs],
    }


def filled(data: object, title: str, facts: str, **more: str) -> str:
    """Return the text of ``page.html`` with this data, title and text. No file is written.

    ``data`` is the result of ``page_data``, or other data for ``page.js``. ``facts`` is the text for browsers without
    JavaScript. ``more`` has HTML for ``controls``, and text that is added to ``style`` and ``script``.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    parts = {
        "@TITLE@": escape(title),
        "@FACTS@": escape(facts),
        "@CONTROLS@": more.get("controls", ""),
        "@DATA@": text.replace("</", "<\\/"),  # "</" would end the script element around the data
        "@STYLE@": _part("page.css") + more.get("style", ""),
        "@SCRIPT@": _part("page.js") + more.get("script", ""),
    }
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(run: DrawnRun, top: float, limit: float) -> dict[str, object]:
    timeline, rows, pairs = run.timeline, run.rows, run.legend
    lanes = run.host_transfers or ((),) * len(rows)
    shades = [(shade, ink(shade)) for shade in (run.colour(*pair) for pair in pairs)]
    shade_of = {pair: place for place, pair in enumerate(pairs)}
    index = {box: place for place, box in enumerate(map(id, (box for row in rows for box in row)))}
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
        "limit": limit if run.in_units else None,
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
                # Actions on memory have no width, so their colour does not matter.
                "shade": [shade_of.get((box.action.kind, box.chunk), 0) for box in row],
                "copies": [(_short(copy.start), _short(copy.end), colour(copy.action.kind)) for copy in lane],
                "start": [_short(box.start) for box in row],
                "end": [_short(box.end) for box in row],
                "held": [_short(box.held) for box in row],
                "pairs": [at for at, box in enumerate(row) if box.action in timeline.schedule.pairs],
                "from": [index[id(source)] if (source := run.awaited.get(box.action)) else -1 for box in row],
            }
            for row, lane in zip(rows, lanes, strict=True)
        ],
    }


@lru_cache(maxsize=1 << 14)
def _short(value: float) -> float:
    """Return a number that JSON writes with few characters: whole numbers without a point, others with nine digits."""
    return int(value) if value == int(value) else float(f"{value:.9g}")
