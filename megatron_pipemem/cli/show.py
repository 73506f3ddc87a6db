"""``pipemem show``: draw when every action runs and what every device holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import Yes, check_layers, check_output
from megatron_pipemem.cli.common import (
    NAME_HELP,
    P2P,
    Chunks,
    CostsText,
    Devices,
    HostMemory,
    Json,
    MemoryCapText,
    Microbatches,
    OffloadRatio,
    OffloadText,
    Options,
    ScheduleModules,
    console,
    print_json,
    report_note,
)
from megatron_pipemem.cli.completion import complete_schedules
from megatron_pipemem.cli.loading import OffloadChoice, check_offload_ratio, load_schedule, parse_costs, with_channel
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.cli.vocabulary import Head, HeadCost, Layers, VocabParallel, apply_head
from megatron_pipemem.report import SUFFIXES, save_comparison, terminal_timeline
from megatron_pipemem.report.timeline import boxes
from megatron_pipemem.schedule.core.simulator import Timeline
from megatron_pipemem.schedule.core.simulator import simulate as run_simulator


def show(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help=f"{NAME_HELP} Several make a comparison.", autocompletion=complete_schedules
        ),
    ],
    devices: Devices = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    costs: CostsText = "1,1,1",
    p2p: P2P = None,
    memory_cap: MemoryCapText = None,
    offload: OffloadText = "off",
    offload_ratio: OffloadRatio = None,
    host_memory: HostMemory = None,
    options: Options = None,
    vocab_parallel: VocabParallel = "off",
    head_cost: HeadCost = None,
    layers: Layers = None,
    yes: Yes = False,
    output: Annotated[
        Path | None, typer.Option("--output", help=".png, .svg, .html, or .json for ui.perfetto.dev.")
    ] = None,
    as_json: Json = False,
    _modules: ScheduleModules = None,
) -> None:
    """Draw when every action runs and what every device holds: in the terminal, or into a file."""
    check_output(output, SUFFIXES, "a picture")
    check_layers(layers, devices or 1)
    check_offload_ratio(names, offload_ratio, offload)
    prices = with_channel(parse_costs(costs, p2p), offload_ratio)
    choice = OffloadChoice(offload, host_memory)
    timelines = []
    for name in names:
        with showing(f"building, proving and simulating {name}"):
            loaded = load_schedule(
                name, devices, microbatches, chunks, memory_cap, options, costs=prices, offload=choice, yes=yes
            )
            loaded, priced, reason = apply_head(loaded, prices, Head(vocab_parallel, head_cost, layers))
            timelines.append(run_simulator(loaded.schedule, priced))
        if reason and not as_json:
            report_note(f"{name}: {reason}")
    if as_json:
        print_json([_data(timeline, output) for timeline in timelines])
    elif output is None:
        for timeline in timelines:
            console().print(terminal_timeline(timeline, timelines))
    if output is not None:
        with showing(f"drawing {output}"):
            save_comparison(timelines, output)
        if not as_json:
            console().print(str(output), soft_wrap=True, markup=False)


def _data(timeline: Timeline, output: Path | None) -> dict[str, object]:
    """Return the picture as data: per device ``[action, start, end, held after]``."""
    return {
        "schedule": timeline.schedule.name,
        "devices": timeline.schedule.num_devices,
        "microbatches": timeline.schedule.num_microbatches,
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "peak": timeline.peak,
        "output": None if output is None else str(output),
        "timeline": [[[str(box.action), box.start, box.end, box.held] for box in row] for row in boxes(timeline)],
    }
