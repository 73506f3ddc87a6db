"""Draw the pictures of the documents.

python scripts/doc_pictures.py [NAME...]

Without names, all are drawn. The command of a PNG picture stands beside it in its document. The SVG pictures explain ideas,
with placements, blocks, orders and bytes from the package's own functions.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from itertools import accumulate
from pathlib import Path

from megatron_pipemem.families.blocks import SLOTS, Pass, repeat
from megatron_pipemem.families.v_shape import v_half_block
from megatron_pipemem.files import write_whole
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.schedule.action import MESSAGES, Action, Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program
from megatron_pipemem.tools.cli.schedules import RESEARCH
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load, typed
from megatron_pipemem.tools.planner.profile import from_formulas
from megatron_pipemem.tools.report.timeline import colour, ink, outline

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
_COMMAND = re.compile(r"`pipemem ((?:show|pareto) [^`]*) --output docs/images/([\w.-]+)`")
_STYLE = """
svg { background: #fff; font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
text { fill: #202124; } .quiet { fill: #5f6368; font-size: 11px; } .head { font-weight: 600; }
.line { fill: none; stroke: #5f6368; stroke-width: 1.2; } .idle { fill: #f1f3f4; } .held { fill: #c9d3df; stroke: #5b6f86; }
@media (prefers-color-scheme: dark) {
  svg { background: #1e2129; } text { fill: #e8eaed; } .quiet { fill: #a8adb4; } .idle { fill: #2b2f38; }
  .line { stroke: #a8adb4; } .held { fill: #3b4a5c; stroke: #9db3cc; }
}"""


def commands() -> dict[str, list[str]]:
    """Return the words after ``pipemem`` that draw every picture with a command, by the picture's name."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
    return {name: shlex.split(words) for text in texts for words, name in _COMMAND.findall(" ".join(text.split("\n")))}


def _svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return the text of a picture. ``title`` is read to those who do not see it."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    arrow = '<marker id="end" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    arrow += '<path d="M0 0 6 3 0 6z" fill="#80868b"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>'
    return "\n".join([head, f"<style>{_STYLE}\n</style>", arrow, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, look: str = "", anchor: str = "start", extra: str = "") -> str:
    looks = f' class="{look}"' if look else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{looks}{extra}>{escape(text)}</text>'


def _arrow(*spots: tuple[float, float]) -> str:
    points = " ".join(f"{x:g},{y:g}" for x, y in spots)
    return f'<polyline points="{points}" class="line" marker-end="url(#end)"/>'


def _cell(spot: tuple[float, float], size: tuple[float, float], action: tuple[Kind, int, int], text: str) -> str:
    """Return a box with a text in the colours of the timelines.

    ``spot`` is its upper left corner, and ``action`` has its kind, chunk and the number of chunks.
    """
    (x, y), (width, height), (kind, chunk, chunks) = spot, size, action
    shade, edge = colour(kind, chunk, chunks), outline(kind, chunk) or "none"
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{shade}" stroke="{edge}"/>'
    look = f' font-size="{min(12, 0.62 * height, 1.6 * width / max(2, len(text))):.3g}" style="fill:{ink(shade)}"'
    return box + _text(x + width / 2, y + 0.69 * height, text, anchor="middle", extra=look)


# ---------------------------------------------------------------------------------------------------------- placements

_CELL, _GAP = (24, 20), (11, 16)


def placements() -> str:
    """Return the stages of four ranks under every placement, with the path of a microbatch and schedules that use it."""
    panels = {
        "linear": Placement.linear(4),
        "interleaved": Placement.interleaved(4, 2),
        "V": Placement.v_shape(4),
        "wave of 2 Vs": Placement.wave(4, 4),
        "two replicas": Placement.bidirectional(4),
    }
    parts: list[str] = []
    for index, (name, placement) in enumerate(panels.items()):
        parts += _panel(12 + 164 * index, name, placement)
    height = 74 + 4 * (_CELL[1] + _GAP[1])
    title = "Stages of four ranks: linear, interleaved, V, wave, two replicas. Arrows are the forward of a microbatch."
    return _svg(164 * len(panels) + 6, height, title, parts)


def _panel(left: float, name: str, placement: Placement) -> list[str]:
    (width, height), (across, down), top = _CELL, _GAP, 48

    def corner(stage: int) -> tuple[float, float]:
        return left + placement.devices[stage] * (width + across), top + placement.chunk_of(stage) * (height + down)

    parts = [_text(left, 18, name, "head")]
    parts += [_text(left + d * (width + across) + width / 2, 38, f"{d}", "quiet", "middle") for d in range(4)]
    for stage in range(placement.num_stages):
        parts.append(_cell(corner(stage), _CELL, (Kind.F, placement.chunk_of(stage), placement.num_chunks), f"{stage}"))
        following = placement.next_stage(stage)
        if following is not None:
            parts.append(_arrow(*_path(corner(stage), corner(following))))
    using = [family.name for family in families() if family.placement == placement.name]
    using = [name for name in using if name == "1f1b" or name not in RESEARCH] or using
    bottom = top + placement.num_chunks * (height + down)
    return [*parts, *(_text(left, bottom + 6 + 14 * i, name, "quiet") for i, name in enumerate(_lines(using, 24)))]


def _path(source: tuple[float, float], target: tuple[float, float]) -> list[tuple[float, float]]:
    """Return the corners of an arrow between two cells, from edge to edge."""
    (width, height), (x, y), (to_x, to_y) = _CELL, source, target
    if y == to_y:
        edges = (x + width + 1, to_x - 1) if x < to_x else (x - 1, to_x + width + 1)
        return [(edge, y + height / 2) for edge in edges]
    start, middle, end = x + width / 2, (y + height + to_y) / 2, to_x + width / 2
    return [(start, y + height + 1), (start, middle), (end, middle), (end, to_y - 1)]


def _lines(words: Sequence[str], width: int) -> list[str]:
    """Return the words with commas, in lines of at most ``width`` letters."""
    lines = [""]
    for word in words:
        joined = f"{lines[-1]}, {word}" if lines[-1] else word
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, word]
    return lines


# --------------------------------------------------------------------------------------------------------- how V-Half is made

_SLOT, _ROW = 12.5, 17
type _Drawn = tuple[float, Kind, int, int]
"""Slot, kind, stage and microbatch of a pass."""


def building_block() -> str:
    """Return a V-Half for four devices: its block, the block of every microbatch, and the squeezed schedule."""
    block, microbatches = v_half_block(4), 6
    placement = block.placement
    first: list[_Drawn] = [(start, kind, stage, 0) for (kind, stage), start in block.starts.items()]
    numbers: dict[Pass, int] = {}
    repeated: list[_Drawn] = []
    for slot, pass_ in repeat(block, microbatches):
        numbers[pass_] = numbers.get(pass_, -1) + 1
        repeated.append((slot, pass_.kind, pass_.stage, numbers[pass_]))
    timeline = simulate(build_schedule("v-half", num_devices=4, num_microbatches=microbatches))
    seconds = 1 / placement.num_chunks  # of a slot: F of a device is 1
    squeezed: list[_Drawn] = [
        (span[0] / seconds, action.kind, action.stage, action.microbatch)
        for order, spans in zip(timeline.schedule.orders, timeline.spans, strict=True)
        for action, span in zip(order, spans, strict=True)
    ]
    before = max(start for start, *_ in repeated) + 1
    panels = [
        ("1. Block: a slot for every pass of a microbatch", first),
        (f"2. Repeat: a microbatch every {block.interval} slots; {before} slots for {microbatches}", repeated),
        (
            f"3. Squeeze: passes fill idle slots, and the rest is dropped; {timeline.makespan / seconds:.0f} slots",
            squeezed,
        ),
    ]
    width, high = 70 + _SLOT * before, 34 + 4 * _ROW
    parts: list[str] = []
    for index, (title, passes) in enumerate(panels):
        top = 10 + index * (high + 12)
        parts.append(_text(8, top + 14, title, "head"))
        for device in range(4):
            y = top + 24 + device * _ROW
            parts.append(_text(8, y + 12, f"device {device}", "quiet"))
            end = 1 + max(start for start, *_ in passes)
            parts.append(f'<rect class="idle" x="62" y="{y}" width="{_SLOT * end:g}" height="{_ROW - 2}"/>')
        for start, kind, stage, microbatch in passes:
            spot = (62 + _SLOT * start, top + 24 + placement.devices[stage] * _ROW)
            look = (kind, placement.chunk_of(stage), placement.num_chunks)
            parts.append(_cell(spot, (_SLOT * SLOTS[kind], _ROW - 2), look, f"{microbatch}"))
    bottom = 10 + len(panels) * (high + 12) + 12
    for index, kind in enumerate((Kind.F, Kind.I, Kind.W)):
        for chunk in range(placement.num_chunks):
            parts.append(_cell((62 + 165 * index + 16 * chunk, bottom - 12), (15, 15), (kind, chunk, 2), ""))
        parts.append(_text(100 + 165 * index, bottom, f"{kind} {kind.spec.says}"))
    parts.append(_text(572, bottom, "numbers: microbatches; pale: up the V", "quiet"))
    return _svg(width, bottom + 12, "V-Half on four devices: block, repeat, squeeze", parts)


# ---------------------------------------------------------------------------------------------------- the life of a run


def run() -> str:
    """Return how a name becomes a step: order, proof, messages, executor, with those of device 1."""
    device, schedule = 1, build_schedule("v-half", num_devices=4, num_microbatches=8)
    validate(schedule)
    timeline, program = simulate(schedule), lower(schedule)
    validate_program(program)
    counts = [sum(map(len, orders)) for orders in (schedule.orders, program.actions)]
    facts = f"no deadlock; bubble {timeline.bubble_rate:.1%}, peak {timeline.peak:g} of 1F1B's"
    rows = [
        ("Name", "families/, search/ or a file", f"{schedule.name}, p = 4, m = 8", ()),
        (
            "Order",
            "a Schedule: F, I, W, B per device",
            f"device {device} of 4, {counts[0]} actions",
            schedule.orders[device],
        ),
        ("Proof", "validate(), simulate()", facts, ()),
        (
            "Messages",
            "lower(), validate_program()",
            f"{counts[1]} actions; all ranks compare a hash",
            program.actions[device],
        ),
        ("Executor", "on every rank", "calls Megatron's forward and backward; counts bytes, times passes", ()),
    ]
    parts: list[str] = []
    for index, (name, where, text, order) in enumerate(rows):
        y = 10 + 58 * index
        parts.append(f'<rect class="idle" x="8" y="{y}" width="208" height="42" rx="5"/>')
        parts += [_text(18, y + 18, name, "head"), _text(18, y + 34, where, "quiet")]
        parts.append(_text(232, y + (14 if order else 26), text))
        parts += _cells(232, y + 22, order, schedule.placement)
        if index:
            parts.append(_arrow((112, y - 16), (112, y - 1)))
    return _svg(
        800, 10 + 58 * len(rows), "A name becomes an order, a proof, messages, and the actions of a rank", parts
    )


def _cells(left: float, top: float, order: Sequence[Action], placement: Placement) -> list[str]:
    """Return the first actions of a device, messages without colour, as far as there is room."""
    parts: list[str] = []
    x = left
    for action in order:
        text = str(action)
        width = 30 if action.kind not in MESSAGES else 7.2 * len(text)
        if x + width > 770:
            return [*parts, _text(x + 4, top + 12, "...", "quiet")]
        if action.kind in MESSAGES:
            parts.append(f'<rect class="idle" x="{x:g}" y="{top:g}" width="{width:g}" height="18"/>')
            parts.append(_text(x + width / 2, top + 13, text, "quiet", "middle"))
        else:
            look = (action.kind, placement.chunk_of(action.stage), placement.num_chunks)
            parts.append(_cell((x, top), (width, 18), look, text))
        x += width + 3
    return parts


# -------------------------------------------------------------------------------------------- memory between F, I and W


def memory() -> str:
    """Return the bytes that a layer holds for one microbatch, from its F to its W."""
    panels = [
        ("in units", {kind: float(kind.spec.units) for kind in (Kind.F, Kind.I, Kind.W)}, "{:g} unit"),
        ("Llama-70B", _bytes("llama3-70b"), "{:.0f} MiB"),
        ("Llama-70B, gathered", _bytes("llama3-70b", wgrad_inputs="gathered"), "{:.0f} MiB"),
        ("Mixtral-8x7B, experts", _bytes("mixtral-8x7b"), "{:.0f} MiB"),
    ]
    top = max(max(accumulate(changes.values())) for _, changes, _ in panels[1:])
    parts: list[str] = []
    for index, (name, changes, form) in enumerate(panels):
        parts += _life(12 + 202 * index, name, changes, form, 110 / (top if index else 1.6))
    return _svg(
        202 * len(panels) + 6, 212, "Memory of a layer for one microbatch: taken by F, and freed by I and W", parts
    )


def _bytes(name: str, **execution: object) -> dict[Kind, float]:
    """Return the changes of memory in MiB of a layer of the model's most frequent kind."""
    model = replace(load(name, Model), sequence=4096)
    cut = {"tp": 8, "sequence_parallel": True, "implementation": "transformer_engine", **execution}
    layers = from_formulas(model, typed(cut, Execution), load("h100-80g", Cluster)).layers
    changes = layers[max(model.kinds, key=model.kinds.count)].memory
    return {kind: changes[kind] / 2**20 for kind in (Kind.F, Kind.I, Kind.W)}


def _life(left: float, name: str, changes: dict[Kind, float], form: str, scale: float) -> list[str]:
    """Return a panel: the passes, and below them the memory, ``scale`` pixels for one of its unit.

    Memory is taken at the start of a pass, and freed at its end.
    """
    width, gap, floor = 32, 44, 196
    parts, held = [_text(left, 18, name, "head")], 0.0
    steps: list[tuple[float, float]] = [(left, floor)]
    for index, (kind, change) in enumerate(changes.items()):
        x = left + index * (width + gap)
        parts.append(_cell((x, 28), (width, 20), (kind, 0, 1), str(kind)))
        edge = x if change > 0 else x + width
        before, held = held, held + change
        steps += [(edge, floor - scale * before), (edge, floor - scale * held)]
        if kind is not Kind.W:
            parts.append(_text(edge + 3, floor - scale * held - 5, form.format(held), "quiet"))
    points = " ".join(f"{x:g},{y:.4g}" for x, y in steps)
    return [f'<polygon points="{points}" class="held"/>', *parts]


PICTURES: dict[str, Callable[[], str]] = {
    "placements.svg": placements,
    "building-block.svg": building_block,
    "run.svg": run,
    "memory.svg": memory,
}
"""The pictures without a command, and the functions that draw them."""


def main(names: Sequence[str]) -> None:
    words = commands()
    for name in names or [*PICTURES, *words]:
        if name in PICTURES:
            write_whole(IMAGES / name, PICTURES[name]())
        else:
            drawing = [*words[name], "--output", str(IMAGES / name)]
            subprocess.run([sys.executable, "-m", "megatron_pipemem", *drawing], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
