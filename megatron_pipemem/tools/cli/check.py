"""``pipemem check``: prove that a schedule can run, say where a file is wrong, and write the schedule to a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.text import Text

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.exits import INVALID, report_error
from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.action import SENDS
from megatron_pipemem.schedule.csv_format import LETTERS, Cell, Table, in_letters, write_header, write_table
from megatron_pipemem.schedule.dependencies import Wait
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.lowering import lower, lower_paired
from megatron_pipemem.schedule.memory_cap import parse_caps
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.schedule_file import Fault, find_fault, find_obstacle
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.tools.cli.common import (
    CANNOT_RUN,
    Shown,
    placement_text,
    print_answer,
    print_json,
    report_lines,
    report_note,
    showing,
)
from megatron_pipemem.tools.cli.loading import load_schedule, read_file
from megatron_pipemem.tools.cli.options import (
    DIALECT_HELP,
    NAME_HELP,
    Dialect,
    Json,
    Size,
    check_output,
    complete_schedules,
    is_file,
    takes_group,
)
from megatron_pipemem.tools.report.timeline import UNITS

_SUFFIXES = (".csv", ".txt")
_Letters = Literal["pipemem", "torch", "torch-new", "torch-old"]


@takes_group
def check(
    source: Annotated[str, typer.Argument(metavar="IN", help=NAME_HELP, autocompletion=complete_schedules)],
    size: Size,
    dialect: Annotated[Dialect, typer.Option(help=DIALECT_HELP)] = "auto",
    target: Annotated[
        Path | None,
        typer.Option("--write", metavar="OUT", help="Output file. .csv: compute actions; .txt: the whole program."),
    ] = None,
    to_dialect: Annotated[
        _Letters, typer.Option("--to", help="Letters of OUT; torch-old is for torch before 2.6.")
    ] = "pipemem",
    lowered: Annotated[
        bool | None,
        typer.Option("--lowered/--compute-only", help="Override the suffix of OUT: write messages, or leave them out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove that a schedule can run: complete, ordered, free of deadlock, within memory. Write it to a file if asked.

    A schedule file has one line per device and one action per comma-separated cell. If it has messages, they are
    checked too. Give --microbatches if the number of microbatches does not follow from the file. A file may add up
    gradients in another order than that of the microbatches. It is then valid, with a note that Megatron cannot run it.
    Exit code 0: valid. 1: invalid, with the reason. 2: the file cannot be read, with the place of the error.

    --write to a .csv file writes the compute actions, which torch.distributed.pipelining loads as compute_only. --write
    to a .txt file writes the whole program with messages and gradient reductions, which torch loads as compute_comms.
    In a file for torch, two devices post the messages between them in the same order, because torch's communicators
    need it. An invalid schedule is not written.

    Examples:
        # detect the letters of a file
        pipemem check schedule.csv --memory-cap 1
        # check a file of torch.distributed.pipelining
        pipemem check torch.csv --dialect torch --json
        # write the orders of a family to a file
        pipemem check v-half -p 4 -m 16 --write v-half.csv
        # convert a file to torch's letters
        pipemem check v-half.csv --write torch.csv --to torch
        # write the program with its messages
        pipemem check v-half.csv --write program.txt
    """
    check_output(target, _SUFFIXES, "a schedule")
    table = fault = obstacle = written = None
    with showing(f"proving {source}"):
        if is_file(source):
            table, schedule = read_file(source, size, dialect)
            facts = _facts_of_file(source, table) | _facts(schedule)
            fault = find_fault(table, schedule, _cap(size.memory_cap))
        else:
            schedule = load_schedule(source, size).schedule
            facts = {"schedule": source} | _facts(schedule)
        if fault is None:
            obstacle = None if table is None else find_obstacle(table, schedule)
            timeline = simulate(schedule)
            facts |= {"peak_activation": timeline.peak}
            # How long a run idles between the steps of an asynchronous schedule depends on where they end.
            facts |= {"bubble_rate": timeline.bubble_rate} if schedule.updates is None else {}
            written = None if target is None else _write(schedule, target, to_dialect, lowered)
    if fault is not None:
        assert table is not None, "only a file has faults"
        _refuse(source, fault, table, facts, as_json)
    if obstacle is not None and not as_json:
        report_note(f"{source} {CANNOT_RUN}: {_headline(obstacle)}")
    output = {} if written is None else {"written": written}
    answer = {"valid": True, "cannot_run": obstacle and _headline(obstacle), **facts, **output}
    print_answer(answer, _shown(source, facts, written), as_json)


def _shown(source: str, facts: Mapping[str, object], written: Mapping[str, object] | None) -> Iterator[Shown]:
    """Yield the facts about a valid schedule for people, and about the file that it is written to."""
    yield Text(f"{source} is valid.", style="green")
    yield [
        (_NAMES.get(name, name.replace("_", " ")), _text(name, fact))
        for name, fact in facts.items()
        if name not in ("file", "schedule", "dialect")
    ]
    if written is not None:
        contents = "actions and messages" if written["lowered"] else "actions"
        summary = f"{written['output']}: {written['actions']} {contents} on {facts['devices']} devices"
        yield f"{summary}, in the letters {written['letters']}"


_NAMES = {"bubble_rate": "bubble", "peak_activation": "peak"}
"""Printed names that differ from the keys."""


def _text(name: str, fact: object) -> str:
    match name:
        case "bubble_rate":
            return f"{fact:.2%} of the makespan, in which the busiest device idles, with F = I = W"
        case "peak_activation":
            return f"{fact:.6g} {UNITS}"
        case "placement":
            return f"{fact}{placement_text(str(fact))}"
        case "chunks":
            return f"{fact} per device"
    return str(fact)


def _letters_of(dialect: str, has_messages: bool) -> str:
    """Return the letters of a file. Without messages, this package and torch since 2.6 write the same ones."""
    return (
        LETTERS[dialect] if has_messages or dialect == "torch-old" else "F, I, W, B, as torch since 2.6 writes them too"
    )


def _refuse(source: str, fault: Fault, table: Table, facts: dict[str, object], as_json: bool) -> NoReturn:
    """Print the reason why a file is invalid, and exit with code 1."""
    if as_json:
        print_json({"valid": False, **facts, **_fault_json(fault)})
    report_error(f"{source} is not valid: {_headline(fault)} [{fault.error.code}]")
    if fault.cycle and not as_json:
        report_lines(_cycle_lines(fault.cycle, table))
    raise typer.Exit(INVALID)


def _write(schedule: Schedule, target: Path, to_dialect: _Letters, lowered: bool | None) -> dict[str, object]:
    """Write a schedule to the file ``target``, and return facts about that file to print, by name.

    ``lowered`` is whether messages are written; ``None`` decides by the suffix. Letters of torch that cannot express the
    schedule are refused.
    """
    with_messages = target.suffix == ".txt" if lowered is None else lowered
    letters = "torch-new" if to_dialect == "torch" else to_dialect
    header = write_header(schedule.header(schedule.orders))
    if header and letters != "pipemem":
        raise UnsupportedError(
            "not-in-dialect",
            f"torch's files cannot hold the header of {shortened(schedule.name)} "
            f"({header.strip('# ').strip()}); write the file with "
            "--to pipemem",
        )
    rows: Sequence[Order] = schedule.orders
    if with_messages:
        program = lower(schedule) if letters == "pipemem" else lower_paired(schedule)
        validate_program(program, microbatch_order=False)
        rows, schedule = program.actions, program.schedule
    write_whole(target, write_header(schedule.header(rows)) + write_table(rows, letters, schedule.pairs))
    actions = sum(map(len, rows))
    return {
        "output": str(target),
        "actions": actions,
        "letters": _letters_of(letters, with_messages),
        "lowered": with_messages,
    }


def _cap(text: str | None) -> float | tuple[float, ...] | None:
    """Return the memory cap in activation units: one number, or one per device; ``None`` if there is no text.

    Raise an ``UnsupportedError`` for a cap in bytes.
    """
    cap = None if text is None else parse_caps(text)
    if cap is not None and cap.in_bytes:
        raise UnsupportedError(
            "unit-mismatch",
            f"--memory-cap {text}: the file of a schedule has no bytes; give activation units, where 1 is 1F1B's peak",
        )
    return None if cap is None else cap.amount


def _facts_of_file(file: str, table: Table) -> dict[str, object]:
    written = sum(action.kind in SENDS for row in table.actions for action in row)
    facts: dict[str, object] = {
        "file": file,
        "dialect": table.letters,
        "letters": f"{_letters_of(table.letters, written > 0)} ({table.reason})",
        "messages": f"{written} in the file" if written else "none in the file; they follow from the order",
    }
    if table.ignored:
        facts["ignored"] = ", ".join(f"{count} {kind}" for kind, count in sorted(table.ignored.items()))
    if table.pairs:
        facts["pairs"] = len(table.pairs)
    if table.in_turn:
        facts["overlapped_backwards"] = f"{table.in_turn} pairs, each read as its two actions in turn"
    return facts


def _facts(schedule: Schedule) -> dict[str, object]:
    return {
        "placement": schedule.placement.name,
        "devices": schedule.num_devices,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.placement.num_chunks,
    }


def _headline(fault: Fault) -> str:
    return f"{fault.message}{_at(fault.cell)}"


def _cycle_lines(cycle: tuple[Wait, ...], table: Table) -> list[str]:
    """Return the lines that show a deadlock: one for each waiting device, and one that returns to the first device."""
    before = {wait.device: wait for wait in cycle}
    lines = []
    for wait in cycle:
        place = _at(table.cell_of(wait.device, wait.action))
        stands = f"device {wait.device} is at {wait.action}{place} and waits for {wait.needed}"
        blocked = before[wait.owner].action
        comes = f"which comes{_at(table.cell_of(wait.owner, wait.needed))} after {blocked}, where"
        there = "where" if blocked == wait.needed else comes
        lines.append(f"{stands}, {there} device {wait.owner} is")
    marks = [" ┌▶", *[" │ "] * (len(lines) - 1)]
    closing = f" └─ device {cycle[0].device} again: each device of this circle waits for the next one"
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
