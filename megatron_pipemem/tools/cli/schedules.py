"""``pipemem schedules``: list all schedules, or explain one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import AUTO, Family, build_schedule, families, family
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.size import estimated
from megatron_pipemem.schedule.stream import bubble_in_a_run
from megatron_pipemem.tools.cli.common import ASYNCHRONOUS, Shown, placement_text, print_answer
from megatron_pipemem.tools.cli.loading import with_channel
from megatron_pipemem.tools.cli.options import Devices, Json, Microbatches, ScheduleModules, complete_families
from megatron_pipemem.tools.report.terminal import FittingTable, TerminalTimeline
from megatron_pipemem.tools.report.timeline import UNITS

# Arguments of ``build_schedule``. A family that lists them fits its order to them.
_FLAGS = {"costs": "--costs", "memory_cap": "--memory-cap"}
RESEARCH = frozenset(
    "gpipe 1f1b 1f1b-eager looped-bfs zb-h2 zb-auto gis-h 1f1b-v dualpipe-v hanayo "
    "chimera gems dualpipe seq1f1b slimpipe pipedream pipedream-2bw".split()
)
"""Families of this package that ``pipemem schedules`` lists only with --all."""
_ADVICE = {
    "1f1b": "hundreds of microbatches, or full recomputation",
    "interleaved": "more memory than 1F1B takes, layers for chunks",
    "zb-h1": "you run 1F1B: same messages, about its memory",
    "gis": "1F1B's memory, layers for chunks",
    "zbv": "1F1B's memory, and links for twice the messages",
    "v-half": "1/2 + 1/p of 1F1B's memory, W as long as F",
    "v-min": "half of 1F1B's memory, and nothing else fits",
    "po-h": "far less memory, and a fast link to the host",
    "po-f": "the least, and a fast link to the host",
    "auto": "a cap, or passes that differ: it searches",
}
"""When to take a schedule. The others have their summaries."""
_SEARCH = "no family, but a search for the fastest order of passes, for any costs and any memory cap."
_TRY = f"pipemem simulate {AUTO} -p 8 -m 24 --memory-cap .625"
_SIZE = 8, 32
"""Devices and microbatches of the list, if the user gives none."""
_COLUMNS = (
    *("name", "placement", "summary", "peak", "bubble", "source", "splits_backward", "min_devices", "chunks", "needs"),
    *("asynchronous", "slices", "offloads", "replicas"),
)
"""Columns of the JSON table."""


def schedules(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Explain this schedule.", autocompletion=complete_families),
    ] = None,
    devices: Devices = None,
    microbatches: Microbatches = None,
    every: Annotated[bool, typer.Option("--all", help="List also the schedules for research.")] = False,
    as_json: Json = False,
    _modules: ScheduleModules = None,
) -> None:
    """List the schedules to choose from, with bubble and peak; or explain one of them, with its formulas.

    The sizes are 8 devices and 32 microbatches, or those that you give; F, I and W take equally long, and messages no
    time. The bubble is the share of a step in which the busiest device idles. The peak is a share of 1F1B's first
    device, with equal stages; inputs kept for W are not counted. Asynchronous schedules update weights in the middle of
    a step, so they train differently from all others. Their bubble is a share of the time from step to step.

    Examples:
        # list the schedules to choose from
        pipemem schedules
        # list also the schedules for research, for other sizes
        pipemem schedules --all -p 4 -m 16
        # explain one, with formulas, options and a picture
        pipemem schedules v-half
    """
    if name == AUTO:
        facts = {"name": AUTO, "summary": _SEARCH, "try": _TRY, "run": f"--pipemem-schedule {AUTO}"}
        print_answer(facts, [f"{AUTO}: {_SEARCH}", [("try", _TRY), ("in a run", facts["run"])]], as_json)
        return
    if name is not None:
        chosen = family(name)
        print_answer(_row(chosen), _explained(chosen, devices, microbatches), as_json)
        return
    listed = [candidate for candidate in families() if every or candidate.name not in RESEARCH]
    print_answer([_row(candidate) for candidate in listed], _listed(listed, every, devices, microbatches), as_json)


def _listed(
    candidates: Sequence[Family], every: bool, devices: int | None, microbatches: int | None
) -> Iterator[Shown]:
    """Yield the table of schedules with stock's 1F1B first and the search last, and the units of its numbers."""
    p, m = _SIZE if devices is None and microbatches is None else (devices or 8, microbatches or 4 * (devices or 8))
    _check_size(p, m, 2 * len(candidates))
    heading = "take it if; for research (*): what it is" if every else "take it if"
    table = FittingTable(("name", heading, "bubble", "peak"), text=("name", heading))
    first = [] if every else [family("1f1b")]
    for candidate in [*first, *candidates]:
        name = f"{candidate.name} *" if every and candidate.name in RESEARCH - {"1f1b"} else candidate.name
        *figures, cut = _figures(candidate, p, m)
        advice = _ADVICE.get(candidate.name, candidate.summary.rstrip("."))
        table.add_row(name, "; ".join([advice, *(_needs(candidate) if every else ()), *cut]), *figures)
    table.add_row("auto", _ADVICE["auto"], "", "the cap")
    yield table
    more = "" if every else f"; --all lists {len(RESEARCH) - 1} more, for research"
    yield f"p = {p} devices, m = {m}, F = I = W. bubble: idle share of the busiest device;"
    chunks = "; at most 2 chunks unless a row says more" if every else ", with at most 2 chunks"
    yield f"peak: share of 1F1B's first device (equal stages){chunks}"
    if every:
        names = ", ".join(candidate.name for candidate in candidates if candidate.asynchronous)
        yield f"{names}: bubble from step to step; {ASYNCHRONOUS}"
    yield f"schedules NAME: formulas and options{more}"


def _check_size(devices: int, microbatches: int, chunks: int) -> None:
    size = estimated(devices, microbatches, chunks)
    if size.is_large:
        raise UnsupportedError(
            "too-large", f"a schedule of this size makes {size}; give fewer --devices or --microbatches"
        )


def _figures(candidate: Family, devices: int, microbatches: int) -> tuple[str, str, list[str]]:
    """Return a family's bubble, its peak, and its numbers of slices and of chunks above 2, which options change.

    Bubble and peak are dashes for sizes that the family does not have.
    """
    try:
        schedule = build_schedule(candidate.name, num_devices=devices, num_microbatches=microbatches)
    except UnsupportedError:
        return "-", "-", []
    run = simulate(schedule, with_channel(Costs(), None))
    chunks, parts = schedule.placement.num_chunks, schedule.units.parts
    cut = [f"here {chunks} chunks"] if chunks > 2 else []
    cut += [f"here {parts} slices"] if parts > 1 else []
    return f"{bubble_in_a_run(run):.1%}", f"{run.peak:.3f}", cut


def _explained(chosen: Family, devices: int | None, microbatches: int | None) -> Iterator[Shown]:
    """Yield a family's facts, and the picture of its example, or of the size that the user gives."""
    if devices is None and microbatches is None:
        p, m = chosen.example.num_devices, chosen.example.num_microbatches
    else:
        p, m = devices or 4, microbatches or 2 * (devices or 4)
    _check_size(p, m, chosen.chunks or 2)
    costs = with_channel(Costs(), None)
    fitted: dict[str, Any] = {"costs": costs} if "costs" in chosen.options else {}
    timeline = simulate(build_schedule(chosen.name, num_devices=p, num_microbatches=m, **fitted), costs)
    yield f"{chosen.name}: {chosen.summary}"
    yield [*_facts(chosen), ("", "")]
    yield TerminalTimeline(timeline)


def _facts(chosen: Family) -> Iterator[tuple[str, str]]:
    chunks = "" if chosen.chunks is None else f", {chosen.chunks} chunk{'s' if chosen.chunks > 1 else ''} per device"
    yield "placement", f"{chosen.placement}{chunks}{placement_text(chosen.placement)}"
    yield "backward", _backward(chosen)
    yield "peak", f"{chosen.peak}, in {UNITS}"
    yield "idle time", chosen.bubble
    yield "source", chosen.source
    for need in _needs(chosen):
        yield "needs", need
    if chosen.offloads:
        yield "offload", "activations are held in host memory for a time"
    for flag, text in _options(chosen):
        yield f"  {flag}", text
    yield "p, m, v, n", "devices, microbatches, chunks per device, slices of a sequence"
    passes = "forward, input gradient, weight gradient, I and W at once"
    yield (
        "F, I, W, B",
        f"{passes}: seconds of one device's share of the model; idle time: of the busiest device in a step",
    )


def _backward(chosen: Family) -> str:
    if not chosen.splits_backward:
        return "B"
    fused = any(action.kind is Kind.B for order in chosen.example.orders for action in order)
    return "B, or I and W, as in the picture" if fused else "I and W"


def _needs(chosen: Family) -> list[str]:
    least = f"p >= {chosen.min_devices}" if chosen.min_devices > 1 else ""
    mark = "asynchronous" if chosen.asynchronous else ""
    copies = f"{chosen.replicas} copies of the weights" if chosen.replicas > 1 else ""
    return [line for line in (chosen.needs or least, copies, mark) if line]


def _options(chosen: Family) -> Iterator[tuple[str, str]]:
    for option, text in chosen.options.items():
        yield _FLAGS.get(option, f"-o {option}"), text


def _row(chosen: Family) -> dict[str, object]:
    return {key: getattr(chosen, key) for key in _COLUMNS} | {
        "options": dict(chosen.options),
        "for_research": chosen.name in RESEARCH,
    }
