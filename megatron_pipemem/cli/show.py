"""``pipemem show``: draw when every action runs and what every device holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import check_output, check_steps
from megatron_pipemem.cli.common import console, print_json, report_note
from megatron_pipemem.cli.completion import complete_schedules
from megatron_pipemem.cli.loading import check_attention, load_and_simulate, named
from megatron_pipemem.cli.options import NAME_HELP, Json, Question, takes_group
from megatron_pipemem.cli.prices import price_layers
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.report import SUFFIXES, TerminalTimeline, save_comparison
from megatron_pipemem.report.timeline import DrawnRun
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.schedule.stream import draw_steps


@takes_group
def show(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help=f"{NAME_HELP} Several make a comparison.", autocompletion=complete_schedules
        ),
    ],
    asked: Question,
    output: Annotated[Path | None, typer.Option(help=".png, .svg, .html, or .json for ui.perfetto.dev.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Draw so many steps without a barrier between them.")] = 1,
    as_json: Json = False,
) -> None:
    """Draw when every action runs and what every device holds: in the terminal, or into a file.

    Examples:
        # in the terminal
        pipemem show v-half -p 8 -m 16
        # several on one time axis, to zoom into
        pipemem show 1f1b v-half v-min -p 8 -m 16 --output compared.html
        # for ui.perfetto.dev
        pipemem show zbv -p 8 -m 16 --output zbv.json
    """
    check_output(output, SUFFIXES, "a picture")
    names = [named(name, asked.chunks) for name in names]
    prices, timelines = price_layers(names, asked), []
    for name in names:
        with showing(f"building, proving and simulating {name}"):
            _, timeline, reason = load_and_simulate(name, asked, prices)
            if steps > 1:
                check_steps(timeline.schedule, steps, asked.yes)
                timeline = draw_steps(timeline, steps)
        timelines.append(timeline)
        if reason and not as_json:
            report_note(f"{name}: {reason}")
    check_attention(asked, [timeline.schedule for timeline in timelines])
    if as_json:
        print_json([_data(timeline, output) for timeline in timelines])
    elif output is None:
        for timeline in timelines:
            console().print(TerminalTimeline(timeline, timelines))
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
        "timeline": [
            [[str(box.action), box.start, box.end, box.held] for box in row] for row in DrawnRun(timeline).rows
        ],
    }
