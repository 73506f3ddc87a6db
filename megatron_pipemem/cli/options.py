"""Define the options that several commands share, and let a command take a group of them as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.options import SLICE_CUTS, TOKENS
from megatron_pipemem.schedule.registry import register_module

Dialect = Literal["auto", "pipemem", "torch", "torch-new", "torch-old"]
NAME_HELP = "A schedule of `pipemem schedules`, a file of `pipemem check --write` or of torch, or `auto` for a search."
DIALECT_HELP = "Letters of the file; by default they are detected, and said."


def at_least_one(parameter: typer.CallbackParam, count: int | None) -> int | None:
    """Return the value of an option.

    Raises:
        UnsupportedError: it is less than 1.
    """
    if count is not None and count < 1:
        raise UnsupportedError("bad-number", f"{parameter.opts[0]} must be at least 1, not {count}")
    return count


DEVICES = typer.Option("--devices", "-p", callback=at_least_one, help="Pipeline ranks.")
MICROBATCHES = typer.Option("--microbatches", "-m", callback=at_least_one, help="Microbatches of one step.")
Devices = Annotated[int | None, DEVICES]
Microbatches = Annotated[int | None, MICROBATCHES]
MemoryCapText = Annotated[
    str | None,
    typer.Option(
        "--memory-cap",
        metavar="X|XGiB|X,X,...",
        help="The most a device may hold, or one cap per device; 1 is the peak of 1F1B. Bytes need --costs FILE with memory.",
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
Yes = Annotated[bool, typer.Option("--yes", help="Go on although it takes long, or much memory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Say how large a schedule is to be, as typed.

    Args:
        devices: pipeline ranks; a file has its own number.
        microbatches: of one step; a file has its own number.
        chunks: stages per device, where the schedule leaves a choice.
        memory_cap: activation units, bytes with a unit, or one cap per device.
        options: ``KEY=VALUE`` of the family or of the search.
        yes: go on although it takes long or much memory.
        modules: that add schedules.
    """

    devices: Devices = None
    microbatches: Microbatches = None
    chunks: Annotated[
        int | None, typer.Option("--chunks", "-v", help="Stages per device, where the schedule has a choice.")
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
    """Say what the layers and the head of a model take, as typed.

    Args:
        costs: seconds ``F,I,W``, or a JSON file.
        p2p: seconds of one message between two devices.
        vocab_parallel: how the head is cut over all devices.
        head_cost: seconds of the whole head, or as many ``layers``.
        layers: of the model.
    """

    costs: Annotated[
        str,
        typer.Option(
            metavar="F,I,W|FILE", help="Seconds of one device's share: forward, input and weight gradient; or JSON."
        ),
    ] = "1,1,1"
    p2p: Annotated[float | None, typer.Option(help="Seconds of one message between two devices.")] = None
    vocab_parallel: Annotated[
        Literal["off", "1", "2", "auto"],
        typer.Option(
            help="Cut the LM head over all devices: by Algorithm 1 (two barriers) or 2 (one barrier) of arXiv 2411.05288, or "
            "whatever is best for --head-cost."
        ),
    ] = "off"
    head_cost: Annotated[
        str | None,
        typer.Option(
            metavar="X|Xlayers",
            help="Forward and backward of the whole LM head: seconds as in --costs, or layers (with --layers). "
            "Default: none with `off`, else one device's share of the layers.",
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Layers of the model: prices --head-cost, and lets `auto` move them.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Question(Prices, Size):
    """Say what is to be simulated, as typed.

    Args:
        offload: which activations make a round trip to the host.
        offload_ratio: seconds of that over those of their F, I and W.
        host_memory: the most that the host holds.
        attention_share: of F's seconds, the part that is causal attention.
        slice_cut: ``tokens`` or ``flops``, see ``slice_tokens``.
    """

    offload: Annotated[
        str,
        typer.Option(
            metavar="off|half|full|auto|N",
            help="Send activations to host memory: half or all chunks, N of every device, or as few as keep the cap.",
        ),
    ] = "off"
    offload_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="K",
            help="Seconds of activations to the host and back over those of their F, I and W (default 1, or the costs').",
        ),
    ] = None
    host_memory: Annotated[
        str | None, typer.Option(metavar="X|XGiB", help="The most host memory of a device, in the unit of the cap.")
    ] = None
    attention_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="A",
            help="Of F's seconds, the part that is causal attention over the whole sequence: where sequences are cut into "
            "slices, later ones then take longer. Default: slices take as long.",
        ),
    ] = None
    slice_cut: Annotated[
        str,
        typer.Option(
            metavar="|".join(SLICE_CUTS),
            help="With an attention share, how sequences are cut into slices: equally many tokens, or equal time of F.",
        ),
    ] = TOKENS


def takes_group(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take the fields of its one dataclass argument as options."""
    hints, own = get_type_hints(command, include_extras=True), signature(command).parameters
    name, group = next((name, hint) for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint))
    of_group = get_type_hints(group, include_extras=True)
    members = [Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default) for each in fields(group)]

    @wraps(command)
    def call(**given: Any) -> None:
        asked = group(**{each.name: given.pop(each.name) for each in members})
        command(**{name: asked}, **given)

    taken = {
        each.name: each.replace(kind=Parameter.KEYWORD_ONLY, annotation=(hints | of_group)[each.name])
        for parameter in own.values()
        for each in (members if parameter.name == name else [parameter])
    }
    made: Any = call  # typer reads its options from these attributes
    made.__signature__ = signature(command).replace(parameters=list(taken.values()))
    made.__annotations__ = {name: each.annotation for name, each in taken.items()}
    return made


def is_file(name: str) -> bool:
    """Return whether a user who typed ``name`` means a file rather than a family."""
    return name.endswith((".csv", ".txt")) or "/" in name or Path(name).is_file()
