"""What the commands share: options, where a schedule comes from, how results and errors are printed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Literal, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from megatron_pipemem.cli.checks import check_size
from megatron_pipemem.errors import CostsError, PipememError, ScheduleError, ScheduleFormatError, UnsupportedError
from megatron_pipemem.schedule.core.costs import Channel, Costs
from megatron_pipemem.schedule.core.memory_cap import MemoryCap, parse_cap, parse_caps
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.validator import validate
from megatron_pipemem.schedule.features.offload import (
    OffloadPlan,
    fastest_within,
    over_cap,
    plan_offload,
    recompute_plans,
    with_early_recompute,
)
from megatron_pipemem.schedule.features.offload.search import OffloadSearchResult, search_offload
from megatron_pipemem.schedule.options import AUTO, OFF, check_recompute, parse_options, searched_placements
from megatron_pipemem.schedule.registry import build_schedule, check_options, family
from megatron_pipemem.schedule.search import SearchResult, search_schedule
from megatron_pipemem.schedule.search.cache import ResultCache
from megatron_pipemem.schedule.size import is_fitted
from megatron_pipemem.schedule.text.csv_format import LETTERS, Table, read_schedule_file, read_table
from megatron_pipemem.schedule.text.lint import find_obstacle

CANNOT_RUN = "is valid, but cannot run here, where losses are bit-identical to stock Megatron's"
"""Of a table that other programs run."""
INVALID, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit codes: a schedule that must not run; anything else that the user can mend; Ctrl-C."""

Dialect = Literal["auto", "pipemem", "torch", "torch-new", "torch-old"]
_WIDTH_OF_FILES = 130
_NAMES = 20
"""Columns of what ``print_facts`` names."""
NAME_HELP = "A schedule of `pipemem schedules`, a file of `pipemem convert` or of torch, or `auto` for a search."
DIALECT_HELP = "Letters of the file; by default they are detected, and said."

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
MemoryCapText = Annotated[
    str | None,
    typer.Option(
        "--memory-cap",
        metavar="X|XGiB|X,X,...",
        help="The most a device may hold, or one cap per device; 1 is the peak of 1F1B. Bytes need --costs FILE with memory.",
    ),
]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the schedule; repeatable.")
]
OffloadText = Annotated[
    str,
    typer.Option(
        "--offload",
        metavar="off|half|full|auto|N",
        help="Send activations to host memory: half or all chunks, N of every device, or as few as keep the cap.",
    ),
]
OffloadRatio = Annotated[
    float | None,
    typer.Option(
        "--offload-ratio",
        metavar="K",
        help="Seconds of activations to the host and back over those of their F, I and W (default 1, or the costs').",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option("--host-memory", metavar="X|XGiB", help="The most host memory of a device, in the unit of the cap."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class Loaded(NamedTuple):
    """A schedule that a command was asked for.

    Args:
        schedule: valid, and within the cap.
        costs: with the memory that the cap is about: none for activation units.
        memory_cap: in the unit of ``costs``.
        search: what a search found besides; ``None`` for other schedules.
        plan: what is offloaded of it and why not more, where ``--offload`` was given.
        offload_search: the other plans, where ``plan`` was searched for with its order.
    """

    schedule: Schedule
    costs: Costs
    memory_cap: float | tuple[float, ...] | None
    search: SearchResult | None = None
    plan: OffloadPlan | None = None
    offload_search: OffloadSearchResult | None = None


class OffloadChoice(NamedTuple):
    """The options about offload as typed."""

    select: str = "off"
    host_memory: str | None = None


NO_OFFLOAD = OffloadChoice()


def load_schedule(
    name: str,
    devices: int | None,
    microbatches: int | None,
    chunks: int | None = None,
    memory_cap: str | None = None,
    options: Sequence[str] | None = None,
    dialect: Dialect = "auto",
    costs: Costs | None = None,
    offload: OffloadChoice = NO_OFFLOAD,
    yes: bool = False,
) -> Loaded:
    """The schedule a user named, proved valid: built by its family, searched for, or read when ``name`` is a CSV file.

    Some families fit their order to the cap and to the costs. A file's own messages are left out. Letters that are not
    ours are said on stderr. With ``offload`` its activations' round trips to the host are planned; ``auto`` with
    ``--offload auto`` searches for the order, too. What takes long is refused but for ``yes``.

    Raises:
        PipememError: it cannot be built, found, read or run; the message says why.
    """
    settings = parse_options("-o", [*(options or ()), *([] if chunks is None else [f"chunks={chunks}"])])
    costs = costs or Costs()
    cap = None if memory_cap is None else parse_caps(memory_cap)
    if cap is not None and cap.in_bytes and costs.memory is None:
        raise UnsupportedError(
            f"--memory-cap {memory_cap} is in bytes, but the costs say nothing of bytes; give --costs FILE with memory, or "
            "the cap in activation units (1 is the peak of 1F1B)"
        )
    if cap is None or not cap.in_bytes:
        costs = replace(costs, memory=None)
    amount = None if cap is None else cap.amount
    recompute = settings.pop("recompute", "none")
    check_recompute(recompute)
    if offload.host_memory is not None and offload.select == OFF and recompute == "none":
        raise UnsupportedError(f"--host-memory {offload.host_memory} bounds what --offload sends; give --offload too")
    if not is_file(name) and devices is not None and microbatches is not None:
        check_size(devices, microbatches, _likely_chunks(name, settings), yes, is_fitted(name))
    if offload.select != "off" or recompute != "none":
        return _offloaded(name, devices, microbatches, costs, cap, settings, offload, dialect, recompute, yes)
    if is_file(name):
        table, schedule = read_schedule(Path(name), dialect, yes=yes)
        if table.letters != "pipemem":
            report_note(f"{name} is read in the letters of {LETTERS[table.letters]} ({table.reason})")
        _check_counts(name, schedule, devices, microbatches, settings)
        validate(schedule, costs, amount, microbatch_order=False)
        if (obstacle := find_obstacle(table, schedule)) is not None:
            report_note(f"{name} {CANNOT_RUN}: {obstacle.message}")
        return Loaded(schedule, costs, amount)
    if devices is None or microbatches is None:
        raise UnsupportedError(f"how large is {name!r} to be? give --devices and --microbatches")
    if name == AUTO:
        return _search(devices, microbatches, costs, amount, settings)
    check_options(name, settings)
    in_units = None if cap is None or cap.in_bytes else cap.amount
    schedule = build_schedule(
        name, num_devices=devices, num_microbatches=microbatches, memory_cap=in_units, costs=costs, **settings
    )
    validate(schedule, costs, amount)
    return Loaded(schedule, costs, amount)


def _offloaded(
    name: str,
    devices: int | None,
    microbatches: int | None,
    costs: Costs,
    memory_cap: MemoryCap | None,
    settings: dict[str, object],
    offload: OffloadChoice,
    dialect: Dialect,
    recompute: str,
    yes: bool,
) -> Loaded:
    """A schedule, built without the cap, with what is recomputed and the round trips of its activations within it."""
    budget = None if offload.host_memory is None else parse_cap(offload.host_memory)
    if budget is not None and budget.in_bytes != (costs.memory is not None):
        raise UnsupportedError(
            f"--host-memory {offload.host_memory} is not in the unit of the memory cap; give both in bytes, with --costs FILE "
            "with memory, or both in activation units"
        )
    host_budget = None if budget is None else budget.amount
    cap = None if memory_cap is None else memory_cap.amount
    found = None
    leaves_choice = offload.select in ("off", "auto") and recompute in ("none", "auto")
    if name == AUTO and leaves_choice and cap is not None:
        if devices is None or microbatches is None:
            raise UnsupportedError(f"how large is {name!r} to be? give --devices and --microbatches")
        seconds = settings.pop("seconds", 20.0)
        placements = _placements(devices, settings)
        if settings:
            raise UnsupportedError(
                f"'auto' with offload has no option {next(iter(settings))!r}; its options: chunks, placement, "
                "seconds, recompute"
            )
        found = search_offload(
            devices,
            microbatches,
            costs,
            cap,
            host_budget=host_budget,
            placements=placements,
            offload=offload.select != "off",
            recompute=recompute,
            seconds=seconds,
        )
        plan = found.plan
    else:
        options = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        base = load_schedule(
            name, devices, microbatches, options=options, dialect=dialect, costs=costs, yes=yes
        ).schedule
        select = int(offload.select) if offload.select.isdecimal() else offload.select

        def over(schedule: Schedule) -> list[int]:
            free = plan_offload(schedule, costs, select, None, host_budget)
            return [] if cap is None else over_cap(free.peaks, cap)

        plans = recompute_plans(
            base, costs, recompute, lambda schedule: plan_offload(schedule, costs, select, cap, host_budget), over
        )
        plan = fastest_within(plans, lambda plan: 0.0 if plan.keeps_cap else max(plan.peaks))
        plan = with_early_recompute(plan)
        if not plan.keeps_cap:
            raise UnsupportedError(
                f"nothing brings {name!r} within the memory cap of {memory_cap} with offload {offload.select} and recompute "
                f"{recompute}: its peak is {max(plan.peaks):.6g}, "
                f"and what is in the way is: {plan.binds or 'what runs at the time'}; raise the cap, or take another schedule"
            )
    validate(plan.schedule, costs, cap, host_budget, microbatch_order=False)
    return Loaded(plan.schedule, costs, cap, plan=plan, offload_search=found)


def _search(
    devices: int,
    microbatches: int,
    costs: Costs,
    memory_cap: float | tuple[float, ...] | None,
    settings: dict[str, object],
) -> Loaded:
    """The fastest schedule that a search finds; a search made before is not made again."""
    unknown = sorted(set(settings) - {"chunks", "max_chunks", "placement", "seconds", "effort", "seed"})
    if unknown:
        raise UnsupportedError(
            f"'auto' has no option {unknown[0]!r}; its options: chunks, placement (v, interleaved, linear), "
            "max_chunks, seconds, effort, seed"
        )
    result = search_schedule(
        num_devices=devices,
        num_microbatches=microbatches,
        costs=replace(costs, channel=None),  # of no use to it, and results kept before are found again
        memory_cap=memory_cap,
        placements=_placements(devices, settings),
        cache=ResultCache(),
        **settings,
    )
    return Loaded(result.schedule, costs, memory_cap, result)


def _placements(devices: int, settings: dict[str, object]) -> tuple[Placement, ...] | None:
    """What ``-o placement`` and ``--chunks`` leave to search; ``None`` for all that the search considers by default."""
    kind, chunks = settings.pop("placement", None), settings.pop("chunks", None)
    return None if kind is None and chunks is None else searched_placements(devices, kind, chunks)


def read_schedule(
    path: Path, dialect: Dialect, microbatches: int | None = None, yes: bool = False
) -> tuple[Table, Schedule]:
    """A file's table and the schedule in it, not yet validated; ``microbatches`` overrides what the table seems to say.

    Raises:
        ScheduleFormatError: the file cannot be read as a schedule.
        UnsupportedError: as ``check_size``.
    """
    text = read_schedule_file(path)
    try:
        table = read_table(text, dialect)
        placement = table.placement()
    except ScheduleFormatError as error:
        raise ScheduleFormatError(f"{path}: {error}") from error
    count = table.num_microbatches() if microbatches is None else microbatches
    header = table.header
    check_size(placement.num_devices, count * header.pieces, placement.num_chunks, yes, fitted=False)
    schedule = Schedule(
        path.stem, placement, count, table.orders, header.pieces, header.updates, header.vocabulary_barriers
    )
    return table, schedule


def _likely_chunks(name: str, settings: Mapping[str, object]) -> int:
    """Stages per device, or pieces of as many microbatches; told without building anything."""
    said = {"chunks": 1, "max_chunks": 1, "pieces": 1, "waves": 2}
    counts = [settings[option] * each for option, each in said.items() if isinstance(settings.get(option), int)]
    return max([*counts, 1]) if counts else 2 if name == AUTO else family(name).chunks or 2


def is_file(name: str) -> bool:
    """Whether a user who typed ``name`` means a file rather than a family."""
    return name.endswith((".csv", ".txt")) or Path(name).is_file()


def check_offload_ratio(names: Sequence[str], ratio: float | None, select: str) -> None:
    """Raises UnsupportedError when no schedule of those named sends anything to the host."""
    if ratio is None or select != OFF:
        return
    if not any(is_file(name) or (name != AUTO and family(name).offloads) for name in names):
        raise UnsupportedError(
            f"--offload-ratio {ratio:g} says how fast activations go to the host, and nothing sends any; give --offload too"
        )


def with_channel(costs: Costs, ratio: float | None) -> Costs:
    """The costs with the channel of an offload ratio; without one with their own, or that of ratio 1.

    Raises:
        CostsError: the ratio is no number of at least 0.
    """
    if ratio is None and costs.channel is not None:
        return costs
    known = costs.channel or Channel(0.0)
    try:
        channel = Channel.of_ratio(1.0 if ratio is None else ratio, costs, known.duplex, known.switches)
    except CostsError:
        if ratio is None:  # nobody asked for it
            return costs
        raise
    return replace(costs, channel=channel)


def parse_costs(text: str, p2p: float | None) -> Costs:
    """Costs from ``F,I,W`` or a JSON file; ``p2p`` overrides the file's.

    Raises:
        CostsError: neither, or a price is not a finite number of at least 0.
    """
    if p2p is not None and not (math.isfinite(p2p) and p2p >= 0):
        raise CostsError(f"--p2p {p2p}: give seconds of at least 0")
    if text.endswith(".json") or Path(text).is_file():
        costs = Costs.from_json(text)
        return costs if p2p is None else replace(costs, p2p=p2p)
    try:
        forward, backward_input, backward_weight = map(float, text.split(","))
    except ValueError:
        raise CostsError(f"--costs {text!r}: give three numbers F,I,W as in 1,1,1, or a JSON file") from None
    prices = (forward, backward_input, backward_weight)
    if not all(math.isfinite(price) and price >= 0 for price in prices) or not any(prices):
        raise CostsError(f"--costs {text!r}: give three numbers of at least 0, not all of them 0")
    return Costs(*prices, p2p=p2p or 0.0)


def console() -> Console:
    """For what a command answers. A file or a pipe has no width, so tables are not cut there to a terminal's default."""
    out = Console(highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _WIDTH_OF_FILES
    return out


def print_facts(out: Console, told: Iterable[tuple[str, str]]) -> None:
    """A name and what is to be said of it per line; what is long goes on under its own beginning, but not in files."""
    fits = None if out.width == _WIDTH_OF_FILES else max(20, out.width - _NAMES - 1)
    for name, fact in told:
        lines = [fact] if fits is None else wrap(fact, fits, break_long_words=False, break_on_hyphens=False) or [""]
        for line in lines:
            out.print(f"{name:<{_NAMES}} {line}".rstrip(), soft_wrap=True, markup=False)
            name = ""


def print_json(result: object) -> None:
    """Raises:
    CostsError: there are numbers in it that JSON has not.
    """
    try:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))
    except ValueError:
        raise CostsError("the result holds infinite numbers, which JSON has not; give costs nearer to 1") from None


def fail(error: PipememError) -> NoReturn:
    """One red line on stderr, and the exit code of the error."""
    report_error(str(error))
    raise typer.Exit(INVALID if isinstance(error, ScheduleError) else UNUSABLE)


def report_error(message: str) -> None:
    Console(stderr=True, highlight=False).print(Text(f"error: {message}", style="red"), soft_wrap=True)


def report_lines(lines: Sequence[str]) -> None:
    out = Console(stderr=True, highlight=False)
    for line in lines:
        out.print(Text(line), soft_wrap=True)


def report_note(message: str) -> None:
    Console(stderr=True, highlight=False).print(Text(f"note: {message}", style="yellow"), soft_wrap=True)


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
