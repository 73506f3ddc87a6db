"""Timelines as one self-contained HTML page: zoom, scroll, and a tooltip on every action."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron_pipemem.report.timeline import (
    Box,
    boxes,
    colour,
    describe,
    headline,
    held_steps,
    ink,
    legend,
    legend_name,
    memory_text,
)
from megatron_pipemem.schedule.simulator import Timeline

_ROW, _HELD = 26, 90
"""Heights in pixels of a device's row and of the panel of held memory."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; color: #202124; margin: 1.5em; }}
h2 {{ font-size: 1.1em; margin: 1.4em 0 .5em; }}
label {{ position: sticky; top: 0; }}
.run {{ display: flex; }}
.names {{ flex: none; padding-right: .6em; text-align: right; color: #3c4043; font-size: 12px; }}
.names div {{ height: {row}px; line-height: {row}px; white-space: nowrap; }}
.scroll {{ overflow-x: auto; flex: auto; }}
.scroll svg {{ display: block; width: calc(100% * var(--zoom, 1)); overflow: hidden; }}
.rows {{ background: #f1f3f4; }}
.rows rect {{ stroke: #fff; stroke-width: .5; }}
.rows rect:hover {{ stroke: #000; stroke-width: 2; }}
.rows text {{ font-size: 11px; text-anchor: middle; pointer-events: none; visibility: hidden; }}
.rows.labels text {{ visibility: visible; }}
.held {{ margin-top: 6px; border-bottom: 1px solid #9aa0a6; }}
.held path {{ fill: none; stroke-width: 1.3; vector-effect: non-scaling-stroke; }}
.key span {{ display: inline-block; padding: 0 .6em; margin-right: .6em; border-radius: 3px; font-size: 12px; }}
{classes}
</style>
<label>zoom <input id="zoom" type="range" min="0" max="6" step="0.1" value="0"></label>
{runs}
<script>
const zoom = document.getElementById("zoom");
function show() {{
  document.body.style.setProperty("--zoom", 2 ** zoom.value);
  for (const rows of document.querySelectorAll(".rows"))
    rows.classList.toggle("labels", rows.clientWidth * rows.dataset.shortest > 16);
}}
zoom.addEventListener("input", show);
window.addEventListener("resize", show);
show();
</script>
</html>
"""


def page(timelines: Sequence[Timeline]) -> str:
    """The page as text. It loads nothing from elsewhere."""
    shades = {
        _css_class(kind.value, chunk, num_chunks): colour(kind, chunk, num_chunks)
        for timeline in timelines
        for num_chunks in (timeline.schedule.placement.num_chunks,)
        for kind, chunk in legend(timeline)
    }
    classes = "\n".join(
        f".{name} {{ fill: {shade}; background: {shade}; color: {ink(shade)}; }} .{name}-ink {{ fill: {ink(shade)}; }}"
        for name, shade in shades.items()
    )
    title = ", ".join(timeline.schedule.name for timeline in timelines)
    runs = "\n".join(map(_run, timelines))
    return _PAGE.format(title=escape(title), row=_ROW, classes=classes, runs=runs)


def _run(timeline: Timeline) -> str:
    rows, end = boxes(timeline), timeline.makespan or 1.0
    num_chunks = timeline.schedule.placement.num_chunks
    names = "".join(f"<div>device {device}</div>" for device in range(len(rows)))
    key = "".join(
        f'<span class="{_css_class(kind.value, chunk, num_chunks)}">{legend_name(kind, chunk, num_chunks)}</span>'
        for kind, chunk in legend(timeline)
    )
    shortest = min((box.seconds for row in rows for box in row if box.seconds > 0), default=0.0) / end
    cells = "\n".join(_cell(box, end, num_chunks) for row in rows for box in row)
    return (
        f"<h2>{escape(headline(timeline))}</h2>\n"
        f'<div class="run"><div class="names">{names}</div><div class="scroll">\n'
        f'<svg class="rows" height="{_ROW * len(rows)}" data-shortest="{shortest:.6g}">\n{cells}\n</svg>\n'
        f"{_held(timeline, rows, end)}\n</div></div>\n"
        f'<p class="key">{key}</p>\n'
        f"<p>Makespan {timeline.makespan:.6g}, busiest device works {timeline.ideal:.6g}, messages {timeline.messages}."
        f" Below the rows: what every device holds over time, up to {memory_text(timeline.peak, timeline)}.</p>"
    )


def _cell(box: Box, end: float, num_chunks: int) -> str:
    """Across in percent, so that zooming stretches boxes but not letters."""
    name = _css_class(box.action.kind.value, box.chunk, num_chunks)
    left, width, top = 100 * box.start / end, 100 * box.seconds / end, _ROW * box.device
    return (
        f'<rect class="{name}" x="{left:.5g}%" y="{top + 1}" width="{width:.5g}%" height="{_ROW - 2}">'
        f"<title>{describe(box)}</title></rect>"
        f'<text class="{name}-ink" x="{left + width / 2:.5g}%" y="{top + 0.66 * _ROW:.5g}">'
        f"{box.action.microbatch}</text>"
    )


def _held(timeline: Timeline, rows: tuple[tuple[Box, ...], ...], end: float) -> str:
    top = 1.1 * max(timeline.peak, 1.0 if timeline.costs.memory is None else 0.0) or 1.0
    paths = []
    if timeline.costs.memory is None:
        level = 100 - 100 / top
        paths.append(
            f'<path d="M0 {level:.5g}H100" stroke="#c43c4e" stroke-dasharray="4 3"><title>1F1B\'s peak</title></path>'
        )
    for device, row in reversed(list(enumerate(rows))):
        steps = "".join(f"H{100 * time / end:.5g}V{100 - 100 * held / top:.5g}" for time, held in held_steps(row))
        hue = 260 - 190 * device / max(1, len(rows) - 1)
        paths.append(
            f'<path d="M0 100{steps}H100" stroke="hsl({hue:.0f} 60% 45%)"><title>device {device}</title></path>'
        )
    return (
        f'<svg class="held" height="{_HELD}" viewBox="0 0 100 100" preserveAspectRatio="none">\n'
        + "\n".join(paths)
        + "\n</svg>"
    )


def _css_class(kind: str, chunk: int, num_chunks: int) -> str:
    return f"{kind}-{chunk}-{num_chunks}"
