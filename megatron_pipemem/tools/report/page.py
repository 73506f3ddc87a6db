"""Fill the HTML page of timelines, ``page.html``, ``page.css`` and ``page.js`` in this folder, with JSON data.

This module needs no other installed package, because the explorer runs it in a browser.
"""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from collections.abc import Collection, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import chain, islice
from struct import pack

from megatron_pipemem.schedule.action import COMPUTE, COPIES, KIND_AND_STAGE, Action, Kind
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.tools.report.timeline import IDLE, Columns, DrawnRun, colour, common_end, ink, outline


def page(timelines: Sequence[Timeline], limit: float = 1.0) -> str:
    """Return the text of an HTML page with these timelines. The page loads no other file.

    ``limit`` is the place of the dashed memory line, in activation units.
    """
    runs = [DrawnRun(timeline) for timeline in timelines]
    title = ", ".join(timeline.schedule.name for timeline in timelines)
    return filled(page_data(timelines, limit), title, "; ".join(run.headline for run in runs) + ".")


def page_data(timelines: Sequence[Timeline], limit: float = 1.0) -> dict[str, object]:
    """Return all data that ``page.js`` draws, as an object for JSON.

    ``limit`` is the place of the dashed memory line, in activation units.
    """
    runs = [DrawnRun(timeline) for timeline in timelines]
    return {
        "kinds": {kind.value: kind.spec.says for kind in COMPUTE},
        "idle": IDLE,
        "shared": common_end(timelines) if timelines else 1.0,
        "units": next((f"Memory is in {run.memory_units}; {limit:g} is dashed." for run in runs if run.in_units), ""),
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
    timeline, legend = run.timeline, run.legend
    lanes = run.host_transfers or ((),) * len(run.columns)
    shades = [(shade, ink(shade), outline(*entry)) for entry in legend for shade in [run.colour(*entry)]]
    # Actions on memory have no width, so their colour does not matter.
    shade_of = {entry: shade for shade, entry in enumerate(legend)}
    passes = {chunk: number for number, chunk in enumerate(run.chunks)}
    sources = iter(run.sources)
    return {
        "name": timeline.schedule.name,
        "title": run.headline,
        "facts": (
            f"Time: {run.time_unit}. Makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g}, messages "
            f"{timeline.messages}, peak {run.peak_text}."
        ),
        "slices": timeline.schedule.units.parts,
        "makespan": timeline.makespan,
        "bytes": not run.in_units,
        "limit": limit if run.in_units else None,
        "top": top,
        "peaks": timeline.peaks,
        "shades": shades,
        "legend": [(run.legend_name(*entry), *shade) for entry, shade in zip(legend, shades, strict=True)]
        + [(kind.spec.says, colour(kind), ink(colour(kind)), "") for kind in COPIES if any(lanes)],
        "passes": [
            (f"{stage}{kind}", chunk, shade_of.get((kind, chunk), 0)) for (kind, stage), chunk in run.chunks.items()
        ],
        "rows": [
            {
                **_row(columns, passes, timeline.schedule.pairs),
                "copies": [(copy.start, copy.end, colour(copy.action.kind)) for copy in lane],
                "from": list(islice(sources, len(columns.actions))),
                "steps": starts,
            }
            for columns, lane, starts in zip(run.columns, lanes, run.step_starts, strict=True)
        ],
    }


def _row(
    columns: Columns, index_of_pass: Mapping[tuple[Kind, int], int], pairs: Collection[Action]
) -> dict[str, Sequence[object] | str]:
    """Return the boxes of a device, with their starts, ends and memory as one text of 64-bit floats.

    Python writes, and a browser reads, such a text in a tenth of the time that decimal numbers take.
    """
    actions, *numbers = columns
    packed = pack(f"<{3 * len(actions)}d", *chain.from_iterable(numbers))
    return {
        "pass": list(map(index_of_pass.__getitem__, map(KIND_AND_STAGE, actions))),
        "mb": [microbatch for _, _, microbatch in actions],
        "numbers": b2a_base64(packed, newline=False).decode(),
        "pairs": [at for at, action in enumerate(actions) if action in pairs] if pairs else [],
    }
