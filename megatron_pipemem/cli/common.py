"""What the commands share: options, where a schedule comes from, how results and errors are printed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from megatron_pipemem.errors import PipememError, ScheduleError, ScheduleFormatError, UnsupportedError
from megatron_pipemem.schedule.costs import Costs, CostsError
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.validator import validate

INVALID, UNUSABLE = 1, 2
"""Exit codes: a schedule that must not run; anything else that the user can mend."""

Dialect = Literal["pipemem", "torch"]
NAME_HELP = "A schedule of `pipemem schedules`, or a CSV file."

Devices = Annotated[int | None, typer.Option("--devices", "-p", help="Pipeline ranks.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Microbatches of one step.")]
Chunks = Annotated[
    int | None, typer.Option("--chunks", "-v", help="Stages per device, where the schedule has a choice.")
]
CostsText = Annotated[
    str,
    typer.Option(
        "--costs",
        metavar="F,I,W|FILE",
        help="Seconds of one device's share: forward, input and weight gradient; or JSON.",
    ),
]
P2P = Annotated[float | None, typer.Option("--p2p", help="Seconds of one message between two devices.")]
MemoryCap = Annotated[
    float | None, typer.Option("--memory-cap", help="The most a device may hold; 1 is the peak of 1F1B.")
]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the schedule; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def load_schedule(
    name: str,
    devices: int | None,
    microbatches: int | None,
    chunks: int | None = None,
    memory_cap: float | None = None,
    options: Sequence[str] | None = None,
    dialect: Dialect = "pipemem",
) -> Schedule:
    """The schedule a user named, proved valid: built by its family, or read when ``name`` is a CSV file.

    Raises:
        PipememError: it cannot be built, read or run; the message says why.
    """
    settings = parse_options([*(options or ()), *([] if chunks is None else [f"chunks={chunks}"])])
    if is_file(name):
        schedule = Schedule.from_csv(read_text(Path(name)), dialect, name=Path(name).stem)
        _check_counts(name, schedule, devices, microbatches, settings)
        validate(schedule, memory_cap=memory_cap)
        return schedule
    if devices is None or microbatches is None:
        raise UnsupportedError(f"how large is {name!r} to be? give --devices and --microbatches")
    schedule = build_schedule(
        name, num_devices=devices, num_microbatches=microbatches, memory_cap=memory_cap, **settings
    )
    validate(schedule)
    return schedule


def is_file(name: str) -> bool:
    """Whether a user who typed ``name`` means a file rather than a family."""
    return name.endswith(".csv") or Path(name).is_file()


def read_text(path: Path) -> str:
    """Raises ScheduleFormatError when the file cannot be read as text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleFormatError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ScheduleFormatError(f"cannot read {path}: not UTF-8 text (byte {error.start})") from error


def parse_costs(text: str, p2p: float | None) -> Costs:
    """Costs from ``F,I,W`` or a JSON file; ``p2p`` overrides the file's.

    Raises:
        CostsError: neither, or a price is not a finite number of at least 0.
    """
    if p2p is not None and not (math.isfinite(p2p) and p2p >= 0):
        raise CostsError(f"--p2p {p2p}: give seconds of at least 0")
    if text.endswith(".json") or Path(text).is_file():
        costs = Costs.from_json(text)
        return costs if p2p is None else Costs(
            costs.forward, costs.backward_input, costs.backward_weight, p2p, costs.memory
        )  # fmt: skip
    try:
        forward, backward_input, backward_weight = map(float, text.split(","))
    except ValueError:
        raise CostsError(f"--costs {text!r}: give three numbers F,I,W as in 1,1,1, or a JSON file") from None
    prices = (forward, backward_input, backward_weight)
    if not all(math.isfinite(price) and price >= 0 for price in prices) or not any(prices):
        raise CostsError(f"--costs {text!r}: give three numbers of at least 0, not all of them 0")
    return Costs(*prices, p2p=p2p or 0.0)


def parse_options(options: Sequence[str]) -> dict[str, object]:
    """``KEY=VALUE`` pairs; values that read as JSON (numbers, true, null) are taken as such, others as text.

    Raises:
        UnsupportedError: a pair has no ``=`` or no key, or a key comes twice.
    """
    settings: dict[str, object] = {}
    for pair in options:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise UnsupportedError(f"-o {pair!r}: write KEY=VALUE, as in -o chunks=4")
        if key in settings:
            raise UnsupportedError(f"-o {pair!r}: {key} is given twice")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def console() -> Console:
    return Console(highlight=False)


def print_json(result: object) -> None:
    typer.echo(json.dumps(result, indent=2))


def fail(error: PipememError) -> NoReturn:
    """One red line on stderr, and the exit code of the error."""
    report_error(str(error))
    raise typer.Exit(INVALID if isinstance(error, ScheduleError) else UNUSABLE)


def report_error(message: str) -> None:
    Console(stderr=True, highlight=False).print(Text(f"error: {message}", style="red"), soft_wrap=True)


def _check_counts(
    name: str, schedule: Schedule, devices: int | None, microbatches: int | None, settings: dict[str, object]
) -> None:
    for what, wanted, found in (
        ("devices", devices, schedule.num_devices),
        ("microbatches", microbatches, schedule.num_microbatches),
        ("chunks", settings.pop("chunks", None), schedule.placement.num_chunks),
    ):
        if wanted not in (None, found):
            raise UnsupportedError(f"{name} has {found} {what}, not {wanted}; leave --{what} out to take the file's")
    if settings:
        raise UnsupportedError(f"{name} is a file and takes no options; leave -o {next(iter(settings))} out")
