"""``pipemem convert``: schedule files, in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.common import (
    NAME_HELP,
    Chunks,
    Devices,
    Dialect,
    Json,
    Microbatches,
    Options,
    console,
    load_schedule,
    print_json,
)
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.validator import validate_program

_SUFFIXES = (".csv", ".txt")


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help=NAME_HELP)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help=".csv: compute actions; .txt: the whole program.")],
    from_dialect: Annotated[
        Dialect, typer.Option("--from", help="Letters of IN; torch also reads those before 2.6.")
    ] = "pipemem",
    to_dialect: Annotated[
        Dialect, typer.Option("--to", help="Letters of OUT; torch calls the gradient messages SEND_B and RECV_B.")
    ] = "pipemem",
    devices: Devices = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Write a schedule as a file: one line per device, one action per comma-separated cell.

    A .csv holds the compute actions, whose letters torch.distributed.pipelining shares with us. A .txt holds the
    lowered program, with messages and gradient reductions; torch reads it as compute_comms.
    """
    if target.suffix not in _SUFFIXES:
        raise UnsupportedError(f"cannot tell a format from {target.name!r}: end it in {' or '.join(_SUFFIXES)}")
    schedule = load_schedule(source, devices, microbatches, chunks, options=options, dialect=from_dialect)
    if target.suffix == ".csv":
        text = schedule.to_csv()
    else:
        program = lower(schedule)
        validate_program(program)
        text = "".join(",".join(map(str, actions)) + "\n" for actions in program.actions)
        if to_dialect == "torch":
            text = text.replace("SEND_I", "SEND_B").replace("RECV_I", "RECV_B")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnsupportedError(f"cannot write {target}: {error.strerror or error}") from error
    actions = text.count(",") + text.count("\n")
    if as_json:
        print_json(
            {"schedule": schedule.name, "devices": schedule.num_devices, "actions": actions, "output": str(target)}
        )
    else:
        console().print(f"{target}: {actions} actions on {schedule.num_devices} devices", soft_wrap=True)
