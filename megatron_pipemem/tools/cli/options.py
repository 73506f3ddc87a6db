"""Options that several commands share, their completion in the shell, and early checks of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_suffix, check_writable
from megatron_pipemem.schedule.options import AUTO, COUNT, SLICE_CUTS, TOKENS, Limit
from megatron_pipemem.schedule.registry import families, register_module
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.size import check_affordable
from megatron_pipemem.search import MAX_CHUNKS

Dialect = Literal["auto", "pipemem", "torch", "torch-new", "torch-old"]
NAME_HELP = "A schedule of `pipemem schedules`, a file of `pipemem check --write` or of torch, or `auto` for a search."
DIALECT_HELP = "Letters of the file. By default they are detected and reported."


def at_least_one(parameter: typer.CallbackParam, count: int | None) -> int | None:
    """Return the value of an option, ``None`` if it is not given. Raise an ``UnsupportedError`` if it is less than 1."""
    return None if count is None else int(COUNT.read(parameter.opts[0], count))


DEVICES = typer.Option("--devices", "-p", callback=at_least_one, help="Pipeline ranks.")
MICROBATCHES = typer.Option("--microbatches", "-m", callback=at_least_one, help="Microbatches of one step.")
Devices = Annotated[int | None, DEVICES]
Microbatches = Annotated[int | None, MICROBATCHES]
MemoryCapText = Annotated[
    str | None,
    typer.Option(
        "--memory-cap",
        metavar="X|XGiB|X,X,...",
        help="Highest memory of a device, or one cap per device; 1 is the peak of 1F1B. Bytes need --costs FILE with memory.",
    ),
]
ScheduleModules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule-module",
        metavar="FILE.py|package.module",
        callback=lambda targets: [*map(register_module, targets or ())],
        is_eager=True,  # before a name is looked up
        help="Add the schedules of a Python file or module; repeatable.",
    ),
]
PORT = Limit(1, (1 << 16) - 1)
"""The ports that a flag may name."""
Yes = Annotated[bool, typer.Option("--yes", help="Continue even if it takes long or needs much memory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The options for the size of a schedule: devices, microbatches, chunks and memory."""

    devices: Devices = None
    microbatches: Microbatches = None
    chunks: Annotated[
        int | None, typer.Option("--chunks", "-v", help="Stages per device, if the schedule allows several numbers.")
    ] = None
    memory_cap: MemoryCapText = None
    options: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the schedule; repeatable."),
    ] = None
    yes: Yes = False
    modules: ScheduleModules = None


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The options for the costs of a model's layers and LM head."""

    costs: Annotated[
        str,
        typer.Option(
            metavar="F,I,W|FILE",
            help="Seconds of one device's share for forward, input gradient and weight gradient; or a JSON file.",
        ),
    ] = "1,1,1"
    p2p: Annotated[
        float | None, typer.Option(help="Time of one message between two devices, in the unit of --costs.")
    ] = None
    vocab_cut: Annotated[
        Literal["off", "1", "2", "auto"],
        typer.Option(
            help="Cut the LM head over all devices: by Algorithm 1 (two barriers) or 2 (one barrier) of arXiv 2411.05288, or "
            "by the best way for --head-cost."
        ),
    ] = "off"
    head_cost: Annotated[
        str | None,
        typer.Option(
            metavar="X|Xlayers",
            help="Forward and backward of the whole LM head: seconds as in --costs, or layers (with --layers). "
            "Default: that of FILE, or 0 with `off` and one device's share of the layers with `1` and `2`.",
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(help="Layers of the model, so that --head-cost 2.5layers has a time; `auto` may move them."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Question(Prices, Size):
    """The options of a simulation."""

    offload: Annotated[
        str,
        typer.Option(
            metavar="off|half|full|auto|N",
            help="Send activations to host memory: half or all chunks, N of every device, or the fewest that keep the cap.",
        ),
    ] = "off"
    offload_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="K",
            help="Seconds to copy activations to the host and back, per second of their F, I and W. Default: that of the "
            "costs, or 1.",
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="X|XGiB", help="Highest host memory of a device, in the unit of the memory cap."),
    ] = None
    attention_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="A",
            help="Share of F's seconds in causal attention over the whole sequence. If sequences are cut into slices, "
            "later slices then take longer. Default: all slices take equally long.",
        ),
    ] = None
    exchange_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="A",
            help="Share of F and I in which the tokens of experts travel. Forwards and backwards then run in pairs, and one "
            "computes while the tokens of the other travel. Default: that of the costs.",
        ),
    ] = None
    slice_cut: Annotated[
        str,
        typer.Option(
            metavar="|".join(SLICE_CUTS),
            help="How to cut sequences into slices: equal numbers of tokens, or equal seconds of F. Needs --attention-share.",
        ),
    ] = TOKENS


def takes_group(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's one dataclass argument by an option for each field of the dataclass."""
    hints, own = get_type_hints(command, include_extras=True), signature(command).parameters
    name, group = next((name, hint) for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint))
    of_group = get_type_hints(group, include_extras=True)
    members = [Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default) for field in fields(group)]

    @wraps(command)
    def call(**values: Any) -> None:
        instance = group(**{member.name: values.pop(member.name) for member in members})
        command(**{name: instance}, **values)

    taken = {
        option.name: option.replace(kind=Parameter.KEYWORD_ONLY, annotation=(hints | of_group)[option.name])
        for parameter in own.values()
        for option in (members if parameter.name == name else [parameter])
    }
    made: Any = call  # typer reads its options from these attributes
    made.__signature__ = signature(command).replace(parameters=list(taken.values()))
    made.__annotations__ = {name: option.annotation for name, option in taken.items()}
    return made


def is_file(name: str) -> bool:
    """Return whether ``name`` is the path of a schedule file, and not the name of a schedule."""
    return name.endswith((".csv", ".txt")) or "/" in name or Path(name).is_file()


_SCHEDULE_FILES = (".csv", ".txt")


def complete_families(incomplete: str) -> list[tuple[str, str]]:
    """Return ``(name, summary)`` of all schedules whose name begins with ``incomplete``."""
    return [(family.name, family.summary) for family in families() if family.name.startswith(incomplete)]


def complete_schedules(incomplete: str) -> list[tuple[str, str]]:
    """Return schedules, schedule files, folders and ``auto`` that begin with ``incomplete``, with descriptions.

    For an empty text there are no files and folders.
    """
    completions = complete_families(incomplete)
    if AUTO.startswith(incomplete):
        completions.append((AUTO, "the fastest that a search finds"))
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") else typed.parent
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        completion = f"{path}/" if path.is_dir() else str(path)
        if completion.startswith(incomplete) and incomplete and (path.is_dir() or path.suffix in _SCHEDULE_FILES):
            completions.append((completion, "a folder" if path.is_dir() else "a schedule file"))
    return completions


def check_size(devices: int, microbatches: int, chunks: int, yes: bool, fitted: bool = True) -> None:
    """Raise an ``UnsupportedError`` if a schedule of this size takes long to build, unless ``yes``.

    ``fitted`` is whether the time grows with the cube of the number of devices (``size.is_fitted``).
    """
    if not yes:
        counts = f"{devices} devices and {microbatches} microbatches"
        if chunks > MAX_CHUNKS:
            counts = f"{devices} devices, {microbatches} microbatches and {chunks} chunks or slices"
        check_affordable(devices, microbatches, chunks, f"{counts} make", fitted)


def check_steps(schedule: Schedule, steps: int, yes: bool) -> None:
    """Raise an ``UnsupportedError`` if ``steps`` steps of a schedule take long to simulate, unless ``yes``."""
    if not yes:
        placement, counts = schedule.placement, f"--steps {steps} of {schedule.num_microbatches} microbatches"
        check_affordable(
            placement.num_devices, len(schedule.units) * steps, placement.num_chunks, f"{counts} make", fitted=False
        )


def check_output(path: Path | None, suffixes: Sequence[str], kind: str) -> None:
    """Check, before a command computes, that its output file has one of the suffixes and can be written.

    ``kind`` names the content of the file in messages, such as "a run".
    """
    if path is not None:
        check_suffix(path, suffixes, kind)
        check_writable(path)


def check_layers(layers: int | None, stages: int) -> None:
    """Raise an ``UnsupportedError`` if the model has fewer layers than stages."""
    if layers is not None and layers < stages:
        raise UnsupportedError(
            "too-few-layers",
            f"--layers {layers}: the schedule cuts the model into {stages} stages of at least one layer each; give "
            "more layers, or fewer --devices or --chunks",
        )
