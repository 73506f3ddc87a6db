"""``pipemem check``: say whether a schedule file may run, and where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.common import (
    CANNOT_RUN,
    INVALID,
    console,
    print_facts,
    print_json,
    report_error,
    report_lines,
    report_note,
)
from megatron_pipemem.cli.loading import read_schedule
from megatron_pipemem.cli.options import DIALECT_HELP, Dialect, Json, MemoryCapText, Yes, at_least_one
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.report.run import UNITS
from megatron_pipemem.schedule.action import SENDS
from megatron_pipemem.schedule.csv_format import LETTERS, Cell, Table, in_letters
from megatron_pipemem.schedule.dependencies import Wait
from megatron_pipemem.schedule.lint import Fault, find_fault, find_obstacle
from megatron_pipemem.schedule.memory_cap import parse_caps
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate


def check(
    file: Annotated[Path, typer.Argument(help="A table: one line per device, one action per cell, as in 2F0.")],
    dialect: Annotated[Dialect, typer.Option(help=DIALECT_HELP)] = "auto",
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            "-m",
            callback=at_least_one,
            help="How many a step has, where the table leaves it open.",
        ),
    ] = None,
    memory_cap: MemoryCapText = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Prove that a schedule file may run: complete, ordered, free of deadlock, within memory.

    A lowered file is judged by its own messages as well. A table that adds gradients up in another order than that of the
    microbatches is valid, with a note that it cannot run on Megatron. Exit code 0: valid; 1: invalid, and why; 2: the file
    cannot be read as a schedule, and where.

    Examples:
        # letters are found out
        pipemem check schedule.csv --memory-cap 1
        # a file of torch.distributed.pipelining
        pipemem check torch.csv --dialect torch --json
    """
    cap = _cap(memory_cap)
    with showing(f"proving {file}"):
        table, schedule = read_schedule(file, dialect, microbatches, yes)
        facts = _facts(file, table, schedule)
        fault = find_fault(table, schedule, cap)
        if fault is None:
            obstacle, timeline = find_obstacle(table, schedule), simulate(schedule)
    if fault is not None:
        if as_json:
            print_json({"valid": False, **facts, **_fault_json(fault)})
        report_error(f"{file} is not valid: {_headline(fault)} [{fault.error.code}]")
        if fault.cycle and not as_json:
            report_lines(_cycle_lines(fault.cycle, table))
        raise typer.Exit(INVALID)
    facts |= {"peak_activation": timeline.peak, "bubble_rate": timeline.bubble_rate}
    if as_json:
        print_json({"valid": True, "cannot_run": obstacle and _headline(obstacle), **facts})
        return
    if obstacle is not None:
        report_note(f"{file} {CANNOT_RUN}: {_headline(obstacle)}")
    out = console()
    out.print(f"{file} is valid.", style="green", soft_wrap=True)
    print_facts(
        out,
        (
            (name.replace("_", " "), f"{fact:.6g}" if isinstance(fact, float) else str(fact))
            for name, fact in facts.items()
            if name != "file"
        ),
    )
    out.print(f"(bubble with F = I = W; peak in {UNITS})", style="dim", soft_wrap=True)


def _cap(text: str | None) -> float | tuple[float, ...] | None:
    """Raises:
    UnsupportedError: a cap in bytes, which no table knows of.
    """
    cap = None if text is None else parse_caps(text)
    if cap is not None and cap.in_bytes:
        raise UnsupportedError(
            "unit-mismatch", f"--memory-cap {text}: a table knows of no bytes; give activation units, 1 is 1F1B's peak"
        )
    return None if cap is None else cap.amount


def _facts(file: Path, table: Table, schedule: Schedule) -> dict[str, object]:
    written = sum(action.kind in SENDS for row in table.actions for action in row)
    facts: dict[str, object] = {
        "file": str(file),
        "dialect": table.letters,
        "letters": f"{LETTERS[table.letters]} ({table.reason})",
        "placement": schedule.placement.name,
        "devices": schedule.num_devices,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.placement.num_chunks,
        "messages": f"the file's own {written}" if written else "none in the file; they are derived from the order",
    }
    if table.ignored:
        facts["ignored"] = ", ".join(f"{count} {kind}" for kind, count in sorted(table.ignored.items()))
    if table.pairs:
        facts["overlapped_pairs"] = f"{table.pairs}, each read as its two actions in turn"
    return facts


def _headline(fault: Fault) -> str:
    return f"{fault.message}{_at(fault.cell)}"


def _cycle_lines(cycle: tuple[Wait, ...], table: Table) -> list[str]:
    """Return the circle of a deadlock, a line per device, closed by the first device again."""
    before = {wait.device: wait for wait in cycle}
    lines = []
    for wait in cycle:
        place = _at(table.cell_of(wait.device, wait.action))
        stands = f"device {wait.device} stands at {wait.action}{place} and waits for {wait.needed}"
        blocked = before[wait.owner].action
        comes = f"which comes{_at(table.cell_of(wait.owner, wait.needed))} after {blocked}, where"
        there = "where" if blocked == wait.needed else comes
        lines.append(f"{stands}, {there} device {wait.owner} stands")
    marks = [" ┌▶", *[" │ "] * (len(lines) - 1)]
    closing = f" └─ device {cycle[0].device} again: a circle, in which nobody ever moves"
    return [*(f"{mark} {in_letters(line, table.letters)}" for mark, line in zip(marks, lines, strict=True)), closing]


def _at(cell: Cell | None) -> str:
    return "" if cell is None else f" (line {cell.line}, cell {cell.column})"


def _fault_json(fault: Fault) -> dict[str, object]:
    error, cell = fault.error, fault.cell
    return {
        "error": fault.message,
        "code": error.code,
        "device": error.device,
        "position": error.position,
        "action": error.action,
        "line": cell and cell.line,
        "column": cell and cell.column,
        "cycle": [
            {"device": w.device, "action": str(w.action), "waits_for": str(w.needed), "of_device": w.owner}
            for w in fault.cycle
        ],
    }
