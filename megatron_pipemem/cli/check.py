"""``pipemem check``: a linter for schedule files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.common import INVALID, Dialect, Json, MemoryCap, console, print_json, read_text, report_error
from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.schedule import Schedule, is_older_torch
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


def check(
    file: Annotated[Path, typer.Argument(help="A CSV file: one line per device, one action per cell, as in 2F0.")],
    dialect: Annotated[
        Dialect, typer.Option(help="torch also reads the letters from before 2.6 (B input gradient, BW full backward).")
    ] = "pipemem",
    memory_cap: MemoryCap = None,
    as_json: Json = False,
) -> None:
    """Prove that a schedule file may run: complete, ordered, free of deadlock, within memory.

    Exit code 0: valid; 1: invalid, and why; 2: the file cannot be read as a schedule, and where.
    """
    text = read_text(file)
    schedule = Schedule.from_csv(text, dialect, name=file.stem)
    facts: dict[str, object] = {
        "file": str(file),
        "letters": letters(text, dialect),
        "placement": schedule.placement.name,
        "devices": schedule.num_devices,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.placement.num_chunks,
    }
    try:
        validate(schedule, memory_cap=memory_cap)
    except ScheduleError as error:
        if as_json:
            where = {"device": error.device, "position": error.position, "action": error.action}
            print_json({"valid": False, **facts, "error": str(error), **where})
        report_error(f"{file} is not valid: {error}")
        raise typer.Exit(INVALID) from None
    timeline = simulate(schedule)
    facts |= {"peak_activation": timeline.peak, "bubble_rate": timeline.bubble_rate}
    if as_json:
        print_json({"valid": True, **facts})
        return
    out = console()
    out.print(f"{file} is valid.", style="green", soft_wrap=True)
    for name, fact in facts.items():
        if name != "file":
            value = f"{fact:.6g}" if isinstance(fact, float) else str(fact)
            out.print(f"  {name.replace('_', ' '):<16} {value}", soft_wrap=True, markup=False)
    out.print("  (bubble and peak with F = I = W; 1 is the peak of 1F1B)", style="dim")


def letters(text: str, dialect: str) -> str:
    """Which generation of letters a file is read in."""
    if dialect == "pipemem":
        return "F, I, W, B"
    if is_older_torch(text):
        return "torch before 2.6 (guessed): F, B as input gradient, W, BW as full backward"
    return "torch (guessed): F, I, W, B"
