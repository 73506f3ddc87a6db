"""Write timelines as one self-contained HTML page: zoom, a slider over time, and the details of every action and bubble.

The page itself is ``page.html`` beside this file, with its style and script; here they are put together with the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from megatron_pipemem.report.timeline import (
    IDLE,
    KIND_NAMES,
    TRANSFER_COLOURS,
    TRANSFER_NAMES,
    awaited,
    boxes,
    colour,
    common_end,
    headline,
    host_transfers,
    ink,
    legend,
    legend_name,
    memory_text,
)
from megatron_pipemem.schedule.core.simulator import Timeline


def page(timelines: Sequence[Timeline]) -> str:
    """Return the page as text. It loads nothing from elsewhere."""
    # "</" would end the script element that holds the data.
    data = json.dumps(_data(timelines), separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace(
        "</", "<\\/"
    )
    in_units = any(timeline.costs.memory is None for timeline in timelines)
    parts = {
        "@TITLE@": escape(", ".join(timeline.schedule.name for timeline in timelines)),
        "@FACTS@": escape("; ".join(map(headline, timelines))) + ".",
        "@UNITS@": " Memory is in activation units: 1 (dashed) is the peak of 1F1B." if in_units else "",
        "@DATA@": data,
        "@STYLE@": _part("page.css"),
        "@SCRIPT@": _part("page.js"),
    }
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(timelines: Sequence[Timeline]) -> dict[str, object]:
    tops = {False: 0.0, True: 0.0}
    for timeline in timelines:
        in_bytes = timeline.costs.memory is not None
        tops[in_bytes] = max(tops[in_bytes], timeline.peak)
    tops[False] = max(tops[False], 1.0)
    return {
        "kinds": {kind.value: name for kind, name in KIND_NAMES.items()},
        "idle": IDLE,
        "shared": common_end(timelines),
        "runs": [_run(timeline, 1.12 * (tops[timeline.costs.memory is not None] or 1.0)) for timeline in timelines],
    }


def _run(timeline: Timeline, top: float) -> dict[str, object]:
    rows = boxes(timeline)
    needed = awaited(timeline, rows)
    num_chunks = timeline.schedule.placement.num_chunks
    lanes = host_transfers(timeline) or ((),) * len(rows)
    pairs = legend(timeline)
    shades = [(colour(kind, chunk, num_chunks), ink(colour(kind, chunk, num_chunks))) for kind, chunk in pairs]
    shade_of = {pair: place for place, pair in enumerate(pairs)}
    index = {box.action: place for place, box in enumerate(box for row in rows for box in row)}
    return {
        "name": timeline.schedule.name,
        "title": headline(timeline),
        "facts": (
            f"Makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g}, messages "
            f"{timeline.messages}, peak {memory_text(timeline.peak, timeline)}."
        ),
        "pieces": timeline.schedule.pieces,
        "makespan": timeline.makespan,
        "bytes": timeline.costs.memory is not None,
        "limit": 1 if timeline.costs.memory is None else None,
        "top": top,
        "peaks": timeline.peaks,
        "shades": shades,
        "legend": [
            (legend_name(kind, chunk, num_chunks), *shade) for (kind, chunk), shade in zip(pairs, shades, strict=True)
        ]
        + [
            (name, TRANSFER_COLOURS[kind], ink(TRANSFER_COLOURS[kind]))
            for kind, name in TRANSFER_NAMES.items()
            if any(lanes)
        ],
        "rows": [
            {
                "name": [str(box.action) for box in row],
                "mb": [box.action.microbatch for box in row],
                "chunk": [box.chunk for box in row],
                # Actions on memory have no width to be coloured.
                "shade": [shade_of.get((box.action.kind, box.chunk), 0) for box in row],
                "copies": [(_short(copy.start), _short(copy.end), TRANSFER_COLOURS[copy.action.kind]) for copy in lane],
                "start": [_short(box.start) for box in row],
                "end": [_short(box.end) for box in row],
                "held": [_short(box.held) for box in row],
                "from": [index[source.action] if (source := needed.get(box.action)) else -1 for box in row],
            }
            for row, lane in zip(rows, lanes, strict=True)
        ],
    }


def _short(value: float) -> float:
    """Write a number with fewer characters in the page: whole numbers without a point, others to what a picture can
    tell.
    """
    return int(value) if value == int(value) else float(f"{value:.9g}")
