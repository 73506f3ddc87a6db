"""``pipemem convert``: read a schedule in one format and write it in another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_pipemem.cli.checks import check_output
from megatron_pipemem.cli.common import console, print_json
from megatron_pipemem.cli.completion import complete_schedules
from megatron_pipemem.cli.loading import load_schedule
from megatron_pipemem.cli.options import DIALECT_HELP, NAME_HELP, Dialect, Json, Size, takes_group
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.csv_format import LETTERS, write_header, write_table
from megatron_pipemem.schedule.lowering import lower, lower_paired
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.validator import validate_program

_SUFFIXES = (".csv", ".txt")
_Letters = Literal["pipemem", "torch", "torch-new", "torch-old"]


@takes_group
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help=NAME_HELP, autocompletion=complete_schedules)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help=".csv: compute actions; .txt: the whole program.")],
    size: Size,
    from_dialect: Annotated[Dialect, typer.Option("--from", help=DIALECT_HELP)] = "auto",
    to_dialect: Annotated[
        _Letters, typer.Option("--to", help="Letters of OUT; torch-old: from before 2.6.")
    ] = "pipemem",
    lowered: Annotated[
        bool | None, typer.Option("--lowered/--compute-only", help="Whether OUT has messages, whatever its suffix.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a schedule as a file: one line per device, one action per comma-separated cell.

    A .csv holds the compute actions, which torch.distributed.pipelining loads as compute_only. A .txt holds the lowered
    program, with messages and gradient reductions, which torch loads as compute_comms. Written for torch, both ends of
    a pair of devices post its messages in one order, as torch's communicators need.

    Examples:
        # the orders of a family
        pipemem convert v-half v-half.csv -p 4 -m 16
        # in torch's letters
        pipemem convert v-half.csv torch.csv --to torch
        # with messages
        pipemem convert v-half.csv program.txt
    """
    check_output(target, _SUFFIXES, "a schedule")
    with showing(f"building and proving {source}"):
        schedule = load_schedule(source, size, from_dialect).schedule
    with_messages = target.suffix == ".txt" if lowered is None else lowered
    letters = "torch-new" if to_dialect == "torch" else to_dialect
    header = write_header(schedule.header(schedule.orders))
    if header and letters != "pipemem":
        raise UnsupportedError(
            "not-in-dialect",
            f"torch's files cannot say what {schedule.name!r} needs said ({header.strip('# ').strip()}); write it with "
            "--to pipemem",
        )
    rows = _program(schedule, letters) if with_messages else schedule.orders
    write_whole(target, write_header(schedule.header(rows)) + write_table(rows, letters))
    actions = sum(map(len, rows))
    if as_json:
        print_json(
            {
                "schedule": schedule.name,
                "devices": schedule.num_devices,
                "actions": actions,
                "letters": LETTERS[letters],
                "lowered": with_messages,
                "output": str(target),
            }
        )
    else:
        what = "actions and messages" if with_messages else "actions"
        summary = f"{target}: {actions} {what} on {schedule.num_devices} devices, letters of {letters}"
        console().print(summary, soft_wrap=True, markup=False)


def _program(schedule: Schedule, letters: str) -> tuple[Order, ...]:
    program = lower(schedule) if letters == "pipemem" else lower_paired(schedule)
    validate_program(program, microbatch_order=False)
    return program.actions
