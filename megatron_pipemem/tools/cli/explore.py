"""``pipemem explore``: serve or write a page on which sliders change the sizes and prices of schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.registry import families
from megatron_pipemem.tools.cli.common import print_answer, showing
from megatron_pipemem.tools.cli.options import PORT, Json, ScheduleModules
from megatron_pipemem.tools.cli.schedules import RESEARCH
from megatron_pipemem.tools.explore.serving import ExplorerServer, Groups, export


def schedule_groups() -> Groups:
    """Return the names of the schedules that the page offers, under each heading."""
    names = [family.name for family in families()]
    return {
        "to choose from": [*(name for name in names if name not in RESEARCH), AUTO],
        "for research and comparison": [name for name in names if name in RESEARCH],
    }


def explore(
    port: Annotated[int | None, typer.Option(help="Port of the page. Default: one that is free.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--export", metavar="DIR", help="Write a page that needs no server, and leave.")
    ] = None,
    pyodide: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Copy Pyodide from node_modules/pyodide next to the exported page. Default: the page loads it from jsDelivr.",
        ),
    ] = None,
    as_json: Json = False,
    modules: ScheduleModules = None,
) -> None:
    """Serve a page on which sliders change two schedules, with their timelines, memory, bubble and peak.

    Only browsers on this machine can open the page. Choose schedules, devices, microbatches, chunks, seconds of F, I
    and W, the time of a message and a memory cap. The address of the page has all choices. Pictures, schedules, times
    and the command line for the same numbers can be saved.

    An exported page needs no server, because the browser computes everything. It has no numpy, so some
    searches of auto end with an error that says so.

    Examples:
        # open the printed address in a browser, and end it with Ctrl-C
        pipemem explore
        # write a page for a web site
        pipemem explore --export out/explorer
        # with Pyodide beside it, after npm install pyodide
        pipemem explore --export out/explorer --pyodide node_modules/pyodide
    """
    if port is not None:
        PORT.read("--port", port)
    if folder is not None:
        if modules:
            raise UnsupportedError(
                "conflicting-options",
                "an exported page has the schedules of this package only; leave --schedule-module out",
            )
        with showing(f"writing {folder}"):
            page = export(folder, schedule_groups(), pyodide)
        print_answer({"output": page}, [page], as_json)
        return
    if pyodide is not None:
        raise UnsupportedError("needs-option", f"--pyodide {pyodide} is for an exported page; give --export too")
    with ExplorerServer(port or 0, schedule_groups()) as server:
        print_answer({"url": server.url}, [f"{server.url} shows the schedules until Ctrl-C"], as_json)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
