"""Make costs and a schedule from the options of a command.

A schedule is read from a file, or chosen in the same way as in a run. Its LM head is on the last stage or cut over all
devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_pipemem import part_costs
from megatron_pipemem.choose.choice import choose, vocabulary_ways
from megatron_pipemem.choose.knowledge import Choice, Knowledge, Shape
from megatron_pipemem.conflicts import make_request
from megatron_pipemem.errors import CostsError, ScheduleFormatError, UnsupportedError
from megatron_pipemem.families.interleaved import why_megatron_refuses
from megatron_pipemem.features.slices.prices import slice_costs, slice_tokens
from megatron_pipemem.features.vocabulary.choice import REDISTRIBUTE, choose_vocabulary, head_on_last_stage
from megatron_pipemem.part_costs import PartCosts, even_layers, read_costs, with_cut_head, without_ends
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.csv_format import LETTERS, Table, read_schedule_file, read_table
from megatron_pipemem.schedule.display import LARGEST, shortened
from megatron_pipemem.schedule.memory_cap import MemoryCap, parse_cap, parse_caps
from megatron_pipemem.schedule.options import (
    AUTO,
    OFF,
    SLICE_CUTS,
    STOCK,
    TOKENS,
    parse_options,
    slice_counts,
)
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import family, megatrons_own
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.schedule_file import find_obstacle
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.size import is_fitted
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.search.result import ResultCache
from megatron_pipemem.tools.cli.common import CANNOT_RUN, report_note
from megatron_pipemem.tools.cli.options import Dialect, Prices, Question, Size, check_layers, check_size, is_file


def price_layers(names: Sequence[str], question: Question) -> Costs:
    """Return the costs that the options give, including the seconds of copies to the host.

    Raise an UnsupportedError for an offload ratio if none of the schedules ``names`` offloads.
    """
    check_layers(question.layers, question.devices or 1)
    ratio = question.offload_ratio
    costs = with_channel(parse_costs(question.costs, question.p2p), ratio)
    sends = question.offload != OFF or any(is_file(name) or (name != AUTO and family(name).offloads) for name in names)
    if ratio is not None and not sends:
        raise UnsupportedError(
            "needs-option",
            f"--offload-ratio {ratio:g} is the time of copies to the host, but nothing is offloaded; give --offload too",
        )
    if question.exchange_share is None:
        return costs
    return costs.with_exchanges(question.exchange_share)


def _is_price(number: float) -> bool:
    return 0 <= number < math.inf


def _check_price(option: str, price: float, kind: str) -> None:
    if not _is_price(price):
        raise CostsError("bad-number", f"--{option} {price}: give {kind} of at least 0")


def with_channel(costs: Costs, ratio: float | None) -> Costs:
    """Return the costs with the seconds of copies to the host for an offload ratio.

    The ratio is the seconds of copying activations out and back, per second of their F, I and W. Without a ratio, the costs
    keep their channel; if they have none, the ratio is 1.
    """
    if ratio is None and costs.channel is not None:
        return costs
    if ratio is not None:
        _check_price("offload-ratio", ratio, "a number")
    return replace(costs, channel=replace(costs.channel or Channel(), ratio=1.0 if ratio is None else ratio))


def parse_costs(text: str, p2p: float | None) -> Costs:
    """Return the costs from text ``F,I,W`` or from a JSON file. ``p2p`` replaces the seconds of a message.

    Raise a CostsError for other text, and for prices that are negative or all 0.
    """
    if p2p is not None:
        _check_price("p2p", p2p, "seconds")
    if text.endswith(".json") or Path(text).is_file():
        costs = read_costs(text)
        return costs if p2p is None else replace(costs, p2p=p2p)
    try:
        forward, backward_input, backward_weight = map(float, text.split(","))
    except ValueError:
        raise CostsError(
            "bad-syntax", f"--costs {shortened(text)}: give three numbers F,I,W as in 1,1,1, or a JSON file"
        ) from None
    prices = (forward, backward_input, backward_weight)
    if not all(map(_is_price, prices)) or not any(prices):
        raise CostsError(
            "bad-number", f"--costs {shortened(text)}: give three numbers of at least 0, not all of them 0"
        )
    return Costs(*prices, p2p=p2p or 0.0)


def note_uneven_cuts(costs: Costs, placements: Iterable[Placement]) -> None:
    """Print a note if layers do not divide evenly among stages, and the costs give no layers per stage."""
    if not isinstance(costs, PartCosts):
        return
    layers, splits = len(costs.parts.layers), []
    for stages in sorted({placement.model_stages for placement in placements}):
        counts = Counter(even_layers(layers, stages))
        if len(counts) > 1 and (costs.cut is None or len(costs.cut) != stages):
            groups = " and ".join(f"{number} of {count}" for count, number in counts.items())
            splits.append(f"among {stages} stages ({groups})")
    if splits:
        report_note(
            f"{layers} layers do not divide evenly {', '.join(splits)}; the key layers_per_stage in --costs FILE gives "
            "another cut"
        )


def num_layers(price_options: Prices, costs: Costs) -> int | None:
    """Return the number of the model's layers: that of costs of parts, or else the user's; ``None`` if unknown."""
    return len(costs.parts.layers) if isinstance(costs, PartCosts) else price_options.layers


def head_seconds(price_options: Prices, costs: Costs, schedule: Schedule) -> float | None:
    """Return the seconds of F, I and W together of the whole LM head, for one microbatch.

    Without ``--head-cost`` they are those of the costs; ``None`` if these are not costs of parts. If ``--head-cost``
    counts layers, the head takes as long as so many layers of the costs. Raise an UnsupportedError if ``--head-cost`` is
    no number, or if the model's number of layers is needed and unknown.
    """
    if price_options.head_cost is None:
        return part_costs.head_seconds(costs)
    try:
        amount = float(price_options.head_cost.removesuffix("layers"))
    except ValueError:
        amount = -1.0
    if not 0 <= amount <= LARGEST:
        raise UnsupportedError(
            "bad-number",
            f"--head-cost {shortened(price_options.head_cost)}: give a number from 0 to {LARGEST:g}, as in 2.5 or 2.5layers",
        )
    if not price_options.head_cost.endswith("layers"):
        return amount
    layers = num_layers(price_options, costs)
    if layers is None:
        raise UnsupportedError(
            "needs-option",
            f"--head-cost {price_options.head_cost} counts layers; give the model's number of layers with --layers",
        )
    seconds = without_ends(costs).seconds(schedule.placement, schedule.units)
    return amount * sum(map(sum, (seconds[Kind.F], seconds[Kind.B]))) / layers


def priced_head(price_options: Prices, costs: Costs, schedule: Schedule, barriers: int) -> Costs:
    """Return the costs with the LM head: cut over all devices with 1 or 2 barriers, or on the last stage if 0.

    If the seconds of the head are not given, the costs stay as they are.
    """
    seconds = head_seconds(price_options, costs, schedule)
    if seconds is None:
        return costs
    if barriers:
        return with_cut_head(costs, seconds, schedule.num_devices, barriers)
    if price_options.head_cost is None:  # the costs already include the head
        return costs
    return head_on_last_stage(without_ends(costs), schedule.placement, seconds, units=schedule.units)


def named(name: str, size: Size) -> str:
    """Return ``name``; for ``stock``, print a note and return the family with Megatron's own order for this size.

    Raise an UnsupportedError if Megatron refuses the size.
    """
    if name != STOCK:
        return name
    own = megatrons_own(size.chunks)
    if own != megatrons_own(1) and size.devices and size.microbatches:
        group = _settings(size).get("group_size")
        obstacle = why_megatron_refuses(size.devices, size.microbatches, group if isinstance(group, int) else None)
        if obstacle is not None:
            raise UnsupportedError("needs-microbatches", obstacle)
    report_note(f"{STOCK} is Megatron's own order: {own}, with --chunks {size.chunks or 1}")
    return own


@dataclass(frozen=True)
class Loaded:
    """The request of a command, and the schedule that was chosen for it."""

    request: Request
    shape: Shape
    knowledge: Knowledge  # its costs have memory only if the cap is in bytes
    chosen: Choice

    @property
    def schedule(self) -> Schedule:
        return self.chosen.schedule

    @property
    def memory_cap(self) -> float | tuple[float, ...] | None:
        """The memory cap in the unit of the costs: one number, or one per device; ``None`` without a cap."""
        return None if self.request.memory_cap is None else self.request.memory_cap.amount

    def with_costs(self, request: Request, costs: Costs) -> Loaded:
        """Return the schedule for another request and other costs, in this shape, with this object's memory per action.

        The memory in ``costs`` is not used.
        """
        if self.knowledge.costs.memory is None:
            costs = replace(costs, memory=None)
        knowledge = replace(self.knowledge, costs=costs)
        return Loaded(request, self.shape, knowledge, choose(request, self.shape, knowledge))


def load_schedule(
    name: str,
    size: Size,
    dialect: Dialect = "auto",
    costs: Costs | None = None,
    offload: str = OFF,
    host_memory: str | None = None,
    pairs: bool = True,
) -> Loaded:
    """Return the schedule that the user named, after proving that it is valid, with the request and the costs.

    A file is read. Any other name is built by its family or searched for. Messages in the file are ignored. A note on
    stderr names the letters of the file if they are not this package's. Numbers in ``size`` must equal those of the
    file. ``pairs`` allows pairs if the costs have exchanges. ``offload`` and ``host_memory`` are the values of these
    options. With ``auto`` for both ``name`` and ``offload``, one search chooses both.
    """
    devices, microbatches, settings = size.devices, size.microbatches, _settings(size)
    costs = costs or Costs()
    cap = None if size.memory_cap is None else parse_caps(size.memory_cap)
    if cap is not None and cap.in_bytes and costs.memory is None:
        raise UnsupportedError(
            "unit-mismatch",
            f"--memory-cap {size.memory_cap} is in bytes, but the costs have no bytes; give --costs FILE with memory, "
            "or the cap in activation units (1 is the peak of 1F1B)",
        )
    if cap is None or not cap.in_bytes:
        costs = replace(costs, memory=None)
    recompute = settings.pop("recompute", "none")
    if host_memory is not None and offload == OFF and recompute == "none":
        raise UnsupportedError(
            "needs-option",
            f"--host-memory {host_memory} limits the bytes that --offload sends, and --offload is off; give --offload "
            "too",
        )
    select = int(offload) if offload.isdecimal() else offload
    file = None
    if is_file(name):
        file = _proved(Path(name), dialect, costs, None if select != OFF or recompute != "none" else cap, size.yes)
        _check_counts(name, file, devices, microbatches, settings)
        devices, microbatches = file.num_devices, file.num_microbatches
    elif devices is None or microbatches is None:
        sizes = {"--devices": devices, "--microbatches": microbatches}
        missing = " and ".join(flag for flag, count in sizes.items() if count is None)
        raise UnsupportedError("missing-option", f"the size of {shortened(name)} is missing; give {missing}")
    else:
        check_size(devices, microbatches, _likely_chunks(name, settings), size.yes, is_fitted(name))
    request = make_request(
        name,
        simulated=True,
        memory_cap=cap,
        options=settings,
        offload=select,
        recompute=recompute,
        pairs=pairs and costs.have_exchanges,
        file=file,
    )
    budget = _host_budget(host_memory, costs)
    shape = Shape(devices, None, microbatches)
    knowledge = Knowledge(costs, host_budget=budget, cache=ResultCache())
    return Loaded(request, shape, knowledge, choose(request, shape, knowledge))


def _settings(size: Size) -> dict[str, Any]:
    return parse_options("-o", [*(size.options or ()), *([] if size.chunks is None else [f"chunks={size.chunks}"])])


def _proved(path: Path, dialect: Dialect, costs: Costs, cap: MemoryCap | None, yes: bool) -> Schedule:
    """Return the schedule of a file, after proving that it is valid within the cap.

    Print a note if Megatron cannot run it, but other programs can. ``yes`` allows schedules that take long to build.
    """
    table, schedule = _read(path, dialect, None, yes)
    if table.letters != "pipemem":
        report_note(
            f"{path} is read in the letters of {LETTERS[table.letters]} ({table.reason}); if that is wrong, convert the file "
            "by pipemem check with --dialect and --write"
        )
    validate(schedule, costs, None if cap is None else cap.amount, microbatch_order=False)
    if (obstacle := find_obstacle(table, schedule)) is not None:
        report_note(f"{path} {CANNOT_RUN}: {obstacle.message}")
    return schedule


def _host_budget(host_memory: str | None, costs: Costs) -> float | None:
    budget = None if host_memory is None else parse_cap(host_memory)
    if budget is not None and budget.in_bytes != (costs.memory is not None):
        raise UnsupportedError(
            "unit-mismatch",
            f"--host-memory {host_memory} is not in the unit of the memory cap; give both in bytes, with --costs FILE "
            "with memory, or both in activation units",
        )
    return None if budget is None else budget.amounts[0]


def read_file(name: str, size: Size, dialect: Dialect) -> tuple[Table, Schedule]:
    """Return the table in a schedule file, and its schedule, which is not validated yet.

    A number of microbatches in ``size`` replaces the number that follows from the file. Devices and chunks
    in ``size`` must equal those of the file.
    """
    table, schedule = _read(Path(name), dialect, size.microbatches, size.yes)
    _check_counts(name, schedule, size.devices, None, _settings(size))
    return table, schedule


def _read(path: Path, dialect: Dialect, microbatches: int | None, yes: bool) -> tuple[Table, Schedule]:
    """Return the table in a file, and its schedule, which is not validated.

    ``microbatches`` replaces the number that follows from the table. ``yes`` allows schedules that take long to build.
    """
    text = read_schedule_file(path)
    try:
        table = read_table(text, dialect)
        placement = table.placement()
    except ScheduleFormatError as error:
        raise ScheduleFormatError(error.code, f"{path}: {error}") from error
    units = table.units(microbatches)
    check_size(placement.num_devices, len(units), placement.num_chunks, yes, fitted=False)
    return table, Schedule.of_table(table, path.stem, units)


def _likely_chunks(name: str, settings: Mapping[str, Any]) -> int:
    """Estimate the stages per device from the options, or the slices of a sequence if there are more slices."""
    said = {"chunks": 1, "max_chunks": 1, "slices": 1, "waves": 2}
    if name == AUTO and "slices" in settings:
        settings = {**settings, "slices": max(slice_counts(settings["slices"]))}
    counts = [settings[option] * factor for option, factor in said.items() if isinstance(settings.get(option), int)]
    return max([*counts, 1]) if counts else 2 if name == AUTO else family(name).chunks or 2


def _check_counts(
    name: str, schedule: Schedule, devices: int | None, microbatches: int | None, settings: dict[str, object]
) -> None:
    for unit, expected, actual in (
        ("devices", devices, schedule.num_devices),
        ("microbatches", microbatches, schedule.num_microbatches),
        ("chunks", settings.pop("chunks", None), schedule.placement.num_chunks),
    ):
        if expected not in (None, actual):
            raise UnsupportedError(
                "other-size", f"{name} has {actual} {unit}, not {expected}; leave --{unit} out to take the file's"
            )
    if settings:
        raise UnsupportedError(
            "options-of-file", f"{name} is a file and takes no options; leave -o {next(iter(settings))} out"
        )


def load_and_simulate(
    name: str, question: Question, prices: Costs, as_megatron: bool = False
) -> tuple[Loaded, Timeline, str]:
    """Return the schedule with its LM head, its simulated timeline, and the reason why ``auto`` placed the head there.

    The reason is empty unless ``--vocab-cut`` is ``auto``. With ``as_megatron``, the step is one that Megatron runs
    itself: sizes that it refuses are an UnsupportedError, and 1F1B has no pairs. Otherwise such sizes make a note.
    """
    loaded = load_schedule(
        name,
        question,
        costs=prices,
        offload=question.offload,
        host_memory=question.host_memory,
        pairs=not (as_megatron and name == megatrons_own(1)),
    )
    if loaded.schedule.name == megatrons_own(2) and loaded.schedule.units.are_whole:
        group = loaded.request.options.get("group_size")
        obstacle = why_megatron_refuses(loaded.schedule.num_devices, loaded.schedule.num_microbatches, group)
        if obstacle is not None and as_megatron:
            raise UnsupportedError("needs-microbatches", obstacle)
        if obstacle is not None:
            report_note(f"Megatron refuses these sizes, and this package runs them: {obstacle}")
    note_uneven_cuts(prices, [loaded.schedule.placement])
    loaded, prices, reason = _with_head(loaded, _with_attention(loaded, prices, question), question)
    return loaded, simulate(loaded.schedule, prices), reason


_FINE = 2**20
"""Tokens of a slice if the number is unknown: enough to make rounding of the cuts negligible."""


def _with_attention(loaded: Loaded, prices: Costs, question: Question) -> Costs:
    """Return costs with a price for each slice, if --attention-share makes later slices take longer.

    Without that option or slices, return ``prices``. Raise an UnsupportedError if the schedule comes from a search.
    """
    if question.slice_cut not in SLICE_CUTS:
        raise UnsupportedError(
            "bad-choice", f"--slice-cut {shortened(question.slice_cut)} is not one of {', '.join(SLICE_CUTS)}"
        )
    share, slices = question.attention_share, loaded.schedule.units.parts
    if share is None or slices == 1:
        return prices
    if loaded.request.searches or question.vocab_cut != OFF:
        chooser = "auto searches with" if loaded.request.searches else "--vocab-cut chooses for"
        raise UnsupportedError(
            "conflicting-options",
            f"--attention-share {share:g} makes slices differ, but {chooser} equal slices; leave one of the two out",
        )
    tokens = slice_tokens(slices * _FINE, slices, question.slice_cut, share)
    return slice_costs(prices, loaded.schedule.placement, tokens, share)


def check_attention(question: Question, schedules: Iterable[Schedule]) -> None:
    """Raise an UnsupportedError for --attention-share without slices, or --slice-cut without --attention-share."""
    if question.attention_share is not None and all(schedule.units.are_whole for schedule in schedules):
        raise UnsupportedError(
            "needs-option",
            f"--attention-share {question.attention_share:g} prices slices of sequences, but no schedule has slices; add "
            "-o slices=4 to a schedule that takes it, or leave --attention-share out",
        )
    if question.slice_cut != TOKENS and question.attention_share is None:
        raise UnsupportedError(
            "needs-option",
            f"--slice-cut {question.slice_cut} needs the share of attention in a forward; add "
            "--attention-share .3, for example",
        )


def _with_head(loaded: Loaded, prices: Costs, question: Question) -> tuple[Loaded, Costs, str]:
    schedule, reason = loaded.schedule, ""
    check_layers(question.layers, schedule.placement.model_stages)
    algorithm: str = question.vocab_cut
    if algorithm == "auto":
        seconds = head_seconds(question, prices, schedule)
        if seconds is None:
            raise UnsupportedError(
                "needs-option", "--vocab-cut auto compares the head with the layers; give --head-cost"
            )
        # As in a run: the model is placed before the head is priced.
        loaded = replace(loaded, knowledge=replace(loaded.knowledge, placement=schedule.placement))

        def resolved(request: Request) -> Choice:
            if not request.barriers:
                return loaded.chosen
            return loaded.with_costs(request, priced_head(question, prices, schedule, request.barriers)).chosen

        ways = vocabulary_ways(loaded.request, resolved, lambda barriers, error: None)
        passes = {barriers: way.schedule for barriers, way in ways.items() if barriers}
        alone = replace(without_ends(prices), vocabulary=None)
        layers = None if isinstance(prices, PartCosts) else question.layers
        choice = choose_vocabulary(schedule, alone, seconds, layers=layers, with_passes=passes)
        algorithm, reason = choice.best, choice.reason
        if algorithm == REDISTRIBUTE:
            layout = choice.moved
            assert layout is not None, "redistribution moves layers"
            moved = head_on_last_stage(alone, schedule.placement, seconds, layout, units=schedule.units)
            return loaded, moved, f"{reason}; layers per stage: {', '.join(map(str, layout))}"
    if algorithm == OFF:
        return loaded, priced_head(question, prices, schedule, 0), reason
    barriers = BARRIERS_OF_ALGORITHM[int(algorithm)]
    priced = priced_head(question, prices, schedule, barriers)
    return loaded.with_costs(loaded.request.decided(barriers), priced), priced, reason
