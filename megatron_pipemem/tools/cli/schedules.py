"""``pipemem schedules``: list all schedules, or explain one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import Family, build_schedule, families, family
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.tools.cli.common import Shown, print_answer
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
    """List the schedules to choose from, with peak memory, bubble and needs; or explain one of them.

    Peaks are in activation units: 1 is the peak of 1F1B's first device. They assume equal stages that hold no more
    between I and W than between F and I. Bubbles are for many microbatches. F, I, W and B are the seconds of one
    device's share of the model; p counts devices, m microbatches and v chunks. Asynchronous schedules update weights in
    the middle of a step, so they train differently from all others.

    Examples:
        # list the schedules to choose from, with formulas
        pipemem schedules
        # list also the schedules for research
        pipemem schedules --all
        # explain one, with a picture
        pipemem schedules v-half
    """
    if name is not None:
        chosen = family(name)
        print_answer(_row(chosen), _explained(chosen, devices, microbatches), as_json)
        return
    if devices is not None or microbatches is not None:
        raise UnsupportedError(
            "needs-option", "--devices and --microbatches set the size of one schedule's picture; name the schedule"
        )
    listed = [candidate for candidate in families() if every or candidate.name not in RESEARCH]
    print_answer([_row(candidate) for candidate in listed], _listed(listed, every), as_json)


def _listed(candidates: Sequence[Family], every: bool) -> Iterator[Shown]:
    figures = _table("name", "placement", "peak", "bubble")
    origins = _table("name", "backward", "source", "needs and options")
    for candidate in candidates:
        name = f"{candidate.name} (for research)" if candidate.name in RESEARCH else candidate.name
        figures.add_row(name, candidate.placement, candidate.peak, candidate.bubble)
        needs = [*_needs(candidate), *(f"{flag}: {text}" for flag, text in _options(candidate))]
        origins.add_row(candidate.name, _backward(candidate), candidate.source, "\n".join(needs))
    yield from (figures, origins)
    more = "" if every else f"; --all lists {len(RESEARCH)} more, for research"
    yield f"pipemem schedules NAME explains one{more}"


def _table(*columns: str) -> FittingTable:
    return FittingTable(columns, text=columns)


def _explained(chosen: Family, devices: int | None, microbatches: int | None) -> Iterator[Shown]:
    """Yield a family's facts, and the picture of its example, or of the size that the user gives."""
    if devices is None and microbatches is None:
        p, m = chosen.example.num_devices, chosen.example.num_microbatches
    else:
        p, m = devices or 4, microbatches or 2 * (devices or 4)
    costs = with_channel(Costs(), None)
    fitted: dict[str, Any] = {"costs": costs} if "costs" in chosen.options else {}
    timeline = simulate(build_schedule(chosen.name, num_devices=p, num_microbatches=m, **fitted), costs)
    yield Text(f"{chosen.name}: {chosen.summary}", style="bold")
    yield [*_facts(chosen), ("", "")]
    yield TerminalTimeline(timeline)


def _facts(chosen: Family) -> Iterator[tuple[str, str]]:
    chunks = "" if chosen.chunks is None else f", {chosen.chunks} chunk{'s' if chosen.chunks > 1 else ''} per device"
    yield "placement", f"{chosen.placement}{chunks}"
    yield "backward", _backward(chosen)
    yield "peak", f"{chosen.peak} {UNITS}"
    yield "bubble", chosen.bubble
    yield "source", chosen.source
    for need in _needs(chosen):
        yield "needs", need
    if chosen.offloads:
        yield "offload", "activations are held in host memory for a time"
    if chosen.slices > 1:
        yield "slices", f"every sequence runs in {chosen.slices} slices; -o slices changes the number"
    for flag, text in _options(chosen):
        yield f"  {flag}", text
    yield "p, m, v", "devices, microbatches, chunks per device; F, I, W, B: seconds of one device's share of the model"


def _backward(chosen: Family) -> str:
    return "I and W" if chosen.splits_backward else "B"


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
