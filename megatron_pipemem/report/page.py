"""Fill the HTML page of timelines, ``page.html``, ``page.css`` and ``page.js`` in this folder, with JSON data.

This module needs no other installed package, because the explorer runs it in a browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from itertools import islice

from megatron_pipemem.report.timeline import IDLE, UNITS, Columns, DrawnRun, colour, common_end, ink
from megatron_pipemem.schedule.action import COMPUTE, COPIES, Action, Kind
from megatron_pipemem.schedule.simulator import Timeline


def page(timelines: Sequence[Timeline]) -> str:
    """Return the text of an HTML page with these timelines. The page loads no other file."""
    runs = [DrawnRun(timeline) for timeline in timelines]
    title = ", ".join(timeline.schedule.name for timeline in timelines)
    return filled(page_data(timelines), title, "; ".join(run.headline for run in runs) + ".")


def page_data(timelines: Sequence[Timeline], limit: float = 1.0) -> dict[str, object]:
    """Return all data that ``page.js`` draws, as an object for JSON, with a dashed memory line at ``limit`` units."""
    runs = [DrawnRun(timeline) for timeline in timelines]
    return {
        "kinds": {kind.value: kind.spec.says for kind in COMPUTE},
        "idle": IDLE,
        "shared": common_end(timelines) if timelines else 1.0,
        "units": f"Memory is in {UNITS}; {limit:g} is dashed." if any(run.in_units for run in runs) else "",
        "runs": [_data(run, max(run.memory_scale(runs), 1.02 * limit), limit) for run in runs],
    }


def filled(data: object, title: str, facts: str, **more: str) -> str:
    """Return the text of ``page.html`` with this data for ``page.js``, this title, and text for browsers without JavaScript.

    ``more`` has HTML for ``controls``, and text that is added to ``style`` and ``script``.
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
    timeline, pairs = run.timeline, run.legend
    lanes = run.host_transfers or ((),) * len(run.columns)
    shades = [(shade, ink(shade)) for shade in (run.colour(*pair) for pair in pairs)]
    sources = iter(run.sources)
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
                **_row(columns, pairs, timeline.schedule.pairs),
                "copies": [(_short(copy.start), _short(copy.end), colour(copy.action.kind)) for copy in lane],
                "from": list(islice(sources, len(columns.actions))),
            }
            for columns, lane in zip(run.columns, lanes, strict=True)
        ],
    }


def _row(
    columns: Columns, legend: Sequence[tuple[Kind, int]], pairs: Collection[Action]
) -> dict[str, Sequence[object]]:
    actions, chunks, starts, ends, held = columns
    shades = {entry: shade for shade, entry in enumerate(legend)}
    return {
        "name": list(map(str, actions)),
        "mb": [microbatch for _, _, microbatch in actions],
        "chunk": list(chunks),
        # Actions on memory have no width, so their colour does not matter.
        "shade": [shades.get((action.kind, chunk), 0) for action, chunk in zip(actions, chunks, strict=True)],
        "start": list(map(_short, starts)),
        "end": list(map(_short, ends)),
        "held": list(map(_short, held)),
        "pairs": [at for at, action in enumerate(actions) if action in pairs] if pairs else [],
    }


@lru_cache(maxsize=1 << 14)
def _short(value: float) -> float:
    """Return a number that JSON writes with few characters: whole numbers without a point, others with nine digits."""
    return int(value) if value == int(value) else float(f"{value:.9g}")
