"""All settings of a run's schedule.

A field of ``Request`` is an argument of ``enable()``. Its metadata give the ``--pipemem-*`` flag, the help text and the reader
of its value. Flags, the ``schedule:`` section of a run's YAML file and the documents' list of flags are made from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.family import Family
from megatron_pipemem.schedule.memory_cap import MemoryCap, parse_bytes, parse_caps
from megatron_pipemem.schedule.options import (
    AUTO,
    EARLY_WEIGHTS,
    MESSAGE_SHAPES,
    OFF,
    OFFLOAD,
    RANDOM,
    RECOMPUTE,
    SLICE_CUTS,
    STOCK,
    TOKENS,
    VOCABULARY,
    WEIGHT_INPUTS,
    RandomStreams,
    SliceCut,
    VocabularyCut,
    WeightInputs,
    early_weights,
    searched_placements,
    slice_counts,
)
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM

PROFILE = "profile"
FILE_SUFFIX = ".csv"

DEFAULT_HOST_SHARE = 0.5
"""Default share of the host's available memory for activations."""

MicrobatchCosts = str | Callable[[object], object]
"""``tokens``, ``FLOPs``, a JSON file, ``module:function``, or the function itself."""

Reader = Callable[[str, Any], Any]
"""A function that reads a value; its first argument is the flag's name for messages. It returns a read value unchanged."""


@dataclass(frozen=True)
class Flag:
    """Describe the ``--pipemem-*`` flag of a field."""

    help: str
    metavar: str = ""
    """Form of the value; empty for a switch."""
    name: str = ""
    """Name with its dashes; by default made from the field's name."""
    read: Reader | None = None
    kind: type | None = None
    """Type of the value, if argparse converts it."""
    repeated: bool = False
    """Whether the flag is given once for every ``KEY=VALUE``."""
    page: str = ""
    """Page of the documents about the flag."""


@cache
def flags_of(request: type) -> Mapping[str, Flag]:
    """Return the flags of a dataclass like ``Request``, by the names of their fields."""
    own_first = sorted(fields(request), key=lambda each: each.name not in request.__annotations__)
    found = {each.name: each.metadata["flag"] for each in own_first if "flag" in each.metadata}
    return MappingProxyType(
        {
            name: flag if flag.name else replace(flag, name=f"--pipemem-{name.replace('_', '-')}")
            for name, flag in found.items()
        }
    )


def _field(default: Any, help: str, metavar: str = "", choices: Sequence[str] = (), **told: Any) -> Any:
    """Return a field with a flag. ``choices`` lists all values, if they are few."""
    if choices:
        told["read"] = _one_of(choices)
    flag = Flag(help, metavar or "|".join(choices), **told)
    how: dict[str, Any] = {"default_factory": type(default)} if isinstance(default, dict) else {"default": default}
    return field(**how, metadata={"flag": flag})


def _one_of(choices: Sequence[str]) -> Reader:
    def read(flag: str, value: Any) -> str:
        if str(value) not in choices:
            raise UnsupportedError("bad-choice", f"{flag} {value!r} is none of {', '.join(choices)}")
        return str(value)

    return read


def _caps(flag: str, value: Any) -> MemoryCap | None:
    return value if value is None or isinstance(value, MemoryCap) else parse_caps(value)


def _bytes(flag: str, value: Any) -> float | None:
    return None if value is None else parse_bytes(flag, value if isinstance(value, str) else f"{value:f}B")


def _sent(flag: str, value: Any) -> str | int:
    """Return the value of ``--pipemem-offload`` after a check. Commands that simulate also accept a number of chunks."""
    return value if isinstance(value, int) else _one_of(OFFLOAD)("offload", value)


def _pieces(flag: str, value: Any) -> int | None:
    if value is not None and value < 1:
        raise UnsupportedError("bad-number", f"{flag} {value}: give at least 1")
    return value


def _early(flag: str, value: Any) -> str:
    early_weights(value, 0, 0)  # refuses other modules
    return value


def _switch(flag: str, value: Any) -> bool:
    if value not in (0, 1, False, True):
        raise UnsupportedError("bad-choice", f"{flag} {value!r} is neither 0 nor 1")
    return bool(value)


def _groups(flag: str, value: Any) -> tuple[tuple[int, ...], ...]:
    groups = value if isinstance(value, (list, tuple)) else [None]
    members = [each for group in groups for each in (group if isinstance(group, (list, tuple)) else [None])]
    if len(set(map(str, members))) < len(members) or not all(type(each) is int and each >= 0 for each in members):
        raise UnsupportedError(
            "bad-syntax",
            f"{flag} {value!r} are no groups of ranks of a node, each in one of them; write [[0, 1], [2, 3]]",
        )
    return tuple(map(tuple, groups))


def _ratio(flag: str, value: Any) -> float | None:
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if number is not None and not 0 < number < math.inf:
        raise UnsupportedError("bad-number", f"{flag} {value!r} is no positive number")
    return number


def _least_bytes(flag: str, value: Any) -> int:
    return value if isinstance(value, int) else int(parse_bytes(flag, value))


@dataclass(frozen=True)
class TransferOptions:
    """Options of the copies of activations to the host and back."""

    # Bytes per second to emulate on CPU ranks, each way; ``None`` for the speed of the memory.

    bandwidth: float | None = field(default=None, metadata={"read": _bytes})
    # Smaller storages stay on the device, because even a small copy costs the host a few microseconds.
    min_bytes: int = field(default=1 << 16, metadata={"read": _least_bytes})
    # Overwrite copied memory with NaN, and compare checksums after a round trip. This is slow, and finds code that uses memory
    # while it is on the host.
    guard: bool = field(default=False, metadata={"read": _switch})
    # Seconds of a round trip of a layer's activations, per second of its F, I and W; ``None`` to measure it.
    ratio: float | None = field(default=None, metadata={"read": _ratio})
    # Groups of ranks of a node, counted on every node from 0, whose devices share a channel to the host.
    switches: tuple[tuple[int, ...], ...] = field(default=(), metadata={"read": _groups})

    @classmethod
    def of(cls, flag: str, given: Any) -> TransferOptions:
        """Return the options from their names and values, or raise an UnsupportedError for a wrong one.

        Values are like ``1GiB`` or ``64KiB`` for ``bandwidth`` and ``min_bytes``, 0 or 1 for ``guard``, and
        ``[[0, 1], [2, 3]]`` for ``switches``.
        """
        if isinstance(given, cls):
            return given
        readers: dict[str, Reader] = {each.name: each.metadata["read"] for each in fields(cls)}
        unknown = sorted(set(given) - set(readers))
        if unknown:
            raise UnsupportedError(
                "unknown-option", f"activation offload has no option {unknown[0]!r}; its options: {', '.join(readers)}"
            )
        return cls(**{name: readers[name](f"offload option {name}", value) for name, value in given.items()})


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The part of a request that a run's YAML file can give too, as keys of its ``schedule:`` section."""

    costs: str = _field(
        "unit",
        "seconds of the passes, for the predicted bubble and for auto: equal (default), measured in the run, or those of a "
        "JSON file",
        "unit|profile|FILE",
    )
    options: dict[str, Any] = _field(
        {}, "option of the schedule, for example group_size=6", "KEY=VALUE", name="--pipemem-option", repeated=True
    )
    vocab_parallel: VocabularyCut = _field(
        OFF,
        "cut embedding and LM head over the pipeline's ranks, by Algorithm 1 (two barriers, two microbatches more in flight) "
        "or Algorithm 2 (one barrier, one microbatch more) of arXiv 2411.05288; auto: whichever of the three the model's sizes "
        "and layout, the costs and the cap call for",
        choices=VOCABULARY,
        page="vocabulary.md",
    )
    weight_inputs: WeightInputs = _field(
        AUTO,
        "form in which inputs of linear layers that sequence parallelism gathers are kept until W: sharded: this rank's "
        "shards, which W gathers again; gathered: the whole tensors; auto (default): sharded where the tensor-parallel "
        "ranks are of one node",
        choices=WEIGHT_INPUTS,
        page="what-runs-where.md#what-waits-for-w",
    )
    early_weights: str = _field(
        AUTO,
        "modules whose weight gradients are computed in I, so that their inputs are not kept until W; auto (default): the "
        "second matrix of experts that are narrower than the model",
        f"auto|none|{','.join(EARLY_WEIGHTS)}",
        read=_early,
        page="what-runs-where.md#what-waits-for-w",
    )
    random: RandomStreams = _field(
        STOCK,
        "source of initial weights and dropout: stock: Megatron's streams of every rank; layerwise: the seed, the "
        "iteration, the microbatch and the layer alone, so that every schedule, stock included, trains the same from step 0",
        choices=RANDOM,
        page="troubleshooting.md#my-loss-differs-from-1f1bs-at-step-1",
    )
    slice_cut: SliceCut = _field(
        TOKENS,
        "how sequences are cut where the schedule has slices: tokens: slices of equally many tokens; flops: slices whose "
        "forwards take equally many FLOPs, since later ones attend to more keys (default: tokens)",
        choices=SLICE_CUTS,
        page="long-sequences.md",
    )
    overlap_steps: bool = _field(
        False,
        "let every rank begin a step as soon as it has done its own part of the one before: no rank waits for another one "
        "between steps, and training stays the same to the bit",
        page="other-schedules.md#steps-without-a-barrier",
    )


CAP = Flag(
    "the most that a rank may hold: activation units, or, with auto, bytes of activations; one for all pipeline ranks, or one "
    "each. A schedule that needs more is refused",
    "X|XGiB|XMiB|XB|X,X,...",
    read=_caps,
)
SENT = Flag(
    "which activations wait on the host for their backward, in addition to those of the schedule itself",
    "|".join(OFFLOAD),
    read=_sent,
    page="offload.md",
)
WEIGHTS = Flag(
    "costs of microbatches that differ (packed or long documents): every training step then runs them in the order, "
    "and by the schedule, that suit them; a function takes an item of the data iterator",
    "FLOPs|tokens|FILE.json|module:function",
    page="unequal-microbatches.md",
)
"""Flags whose values are text in a YAML file, and may have other types in a program."""


@dataclass(frozen=True, kw_only=True)
class Request(ScheduleOptions):
    """All settings of a run's schedule.

    The meaning of a field is that of its flag: ``memory_cap`` is ``--pipemem-memory-cap``, as on the page of ``pipemem run``.
    Values are read when a request is made. ``conflicts.check`` checks that they fit together.
    """

    schedule: str = field(
        kw_only=False,
        metadata={
            "flag": Flag(
                "schedule to run: a family, a schedule file, auto for a search, or stock to keep and measure Megatron's own",
                "NAME|FILE.csv|auto|stock",
                page="choosing-a-schedule.md",
            )
        },
    )
    memory_cap: MemoryCap | None = field(kw_only=False, default=None, metadata={"flag": CAP})
    schedule_module: str | None = _field(
        None,
        "add the schedules of a Python file or module, so that one can be named",
        "FILE.py|package.module",
        page="adding-a-schedule.md",
    )
    offload: str | int = field(default=OFF, metadata={"flag": SENT})
    host_memory: float | None = _field(
        None,
        "host memory per node for offloaded activations, shared by its ranks (default: "
        f"{DEFAULT_HOST_SHARE:g} of the available memory)",
        "XGiB",
        read=_bytes,
    )
    recompute: str = _field(
        "none",
        "parts of a forward that run again before its backward: the cheap ones of every stage (norms, activation functions, "
        "unfused attention), or all; auto: those that a memory cap needs, per stage",
        choices=RECOMPUTE,
    )
    offload_options: TransferOptions = field(
        default=TransferOptions(),
        metadata={
            "flag": Flag(
                "ratio, min_bytes, guard, switches, and bandwidth for CPU ranks",
                "KEY=VALUE",
                name="--pipemem-offload-option",
                repeated=True,
                read=TransferOptions.of,
            )
        },
    )
    trace: str | None = _field(
        None,
        "write timelines of the plan and of the last step as it ran: an HTML page, a picture, a Perfetto trace",
        "DIR",
    )
    report: str | None = _field(
        None,
        "write losses, predicted and counted peak bytes, predicted and measured bubbles as JSON, for pipemem report",
        "FILE",
    )
    vocab_piece_tokens: int | None = _field(
        None,
        "compute the cut head's logits for N tokens at a time, which bounds their bytes in fp32 (default: all)",
        "N",
        kind=int,
        read=_pieces,
    )
    single_queue: bool = _field(
        False,
        "launch the actions of a rank in the order for one hardware queue, as is done anyway on GPUs with "
        "CUDA_DEVICE_MAX_CONNECTIONS=1, and in the first steps on every GPU",
        page="how-it-works.md#one-hardware-queue-per-rank",
    )
    message_shapes: str = _field(
        "step",
        "how ranks learn the shapes of messages under variable_seq_lengths: step: all of a step at its start, from the tokens "
        "that the first stage passes to the model; message: each from a header, which every receive waits for",
        choices=MESSAGE_SHAPES,
        page="how-it-works.md#microbatches-that-differ",
    )
    microbatch_costs: MicrobatchCosts | None = field(default=None, metadata={"flag": WEIGHTS})
    train_steps: int | None = None
    """Training steps of the run, for asynchronous schedules, whose last step reads no data of a next one. Megatron's own
    training loop sets it."""
    file: Schedule | None = None
    """The schedule of a file, read and proved; ``conflicts.check`` fills it in."""

    def __post_init__(self) -> None:
        for name, flag in flags_of(Request).items():
            if flag.read is not None:
                object.__setattr__(self, name, flag.read(flag.name, getattr(self, name)))

    @classmethod
    def for_search(cls, cap: MemoryCap, options: Mapping[str, Any], barriers: int = 0) -> Request:
        """Return the request for the fastest order within a cap, with a vocabulary cut with so many barriers."""
        return cls(AUTO, cap, options=dict(options)).decided(barriers)

    @classmethod
    def for_order(cls, schedule: Schedule, cap: MemoryCap) -> Request:
        """Return the request for a fixed order, with as much of it on the host as a cap needs."""
        return cls(schedule.name, cap, offload=AUTO, file=schedule)

    def decided(self, barriers: int) -> Request:
        """Return the request with the vocabulary cut with so many barriers; 0 leaves it whole."""
        cut = cast(VocabularyCut, str(algorithm_of(barriers)) if barriers else OFF)
        return replace(self, vocab_parallel=cut)

    def without_offload(self) -> Request:
        """Return the request for the schedule without offload and recomputation, which keep its cap later."""
        return replace(self, memory_cap=None, offload=OFF, recompute="none") if self.plans_offload else self

    @property
    def is_stock(self) -> bool:
        """Return whether Megatron's own schedule runs."""
        return self.schedule == STOCK

    @property
    def barriers(self) -> int:
        """Return the barriers of vocabulary parallelism; 0 if the vocabulary is whole or not decided yet."""
        return 0 if self.vocab_parallel in (OFF, AUTO) else BARRIERS_OF_ALGORITHM[int(self.vocab_parallel)]

    @property
    def outputs(self) -> list[Path]:
        """Return the files that show whether report and timelines can be written."""
        return outputs(self.report, self.trace)

    @property
    def cuts_vocabulary(self) -> bool:
        """Return whether the vocabulary is cut over the pipeline, or may be."""
        return self.vocab_parallel != OFF

    @property
    def searches_period(self) -> bool:
        """Return whether a search minimizes the period of steps without a barrier."""
        return self.searches and bool(self.options.get("period", self.overlap_steps))

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """The numbers of slices of a microbatch among which a search chooses."""
        return slice_counts(self.options.get("slices", 1)) if self.searches else (1,)

    @property
    def slices(self) -> int:
        """Return the number of sequence slices of a microbatch, or the largest one that a search may choose."""
        if self.file is not None:
            return self.file.slices
        if self.family is None:
            return max(self.slice_counts)
        given = self.options.get("slices", self.family.slices)
        return given if isinstance(given, int) else 1  # which the family refuses

    @property
    def searches(self) -> bool:
        """Return whether the order is searched for."""
        return self.schedule == AUTO and self.file is None

    @property
    def plans_offload(self) -> bool:
        """Return whether offload or recomputation is added to a schedule's own."""
        return self.offload != OFF or self.recompute != "none"

    @property
    def chooses_offload(self) -> bool:
        """Return whether offload or recomputation is searched for together with the order."""
        is_open = self.offload in (OFF, AUTO) and self.recompute in ("none", AUTO)
        return self.searches and self.plans_offload and is_open and self.memory_cap is not None

    @property
    def in_bytes(self) -> bool:
        """Return whether there is a cap in bytes."""
        return self.memory_cap is not None and self.memory_cap.in_bytes

    @property
    def cap_in_units(self) -> float | tuple[float, ...] | None:
        """The cap in activation units, or ``None``."""
        return None if self.memory_cap is None or self.memory_cap.in_bytes else self.memory_cap.amount

    def caps(self, num_devices: int) -> tuple[float, ...] | None:
        """Return the cap of every device, or ``None`` without one.

        Raises:
            UnsupportedError: there are not as many as devices.
        """
        return None if self.memory_cap is None else self.memory_cap.of(num_devices)

    @property
    def family(self) -> Family | None:
        """Return the family that builds the schedule; ``None`` for a search, a file, and Megatron's own schedule.

        Raises:
            UnknownScheduleError: there is none of that name.
        """
        return None if self.searches or self.is_stock or self.file is not None else family(self.schedule)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether weights change in the middle of the schedule."""
        return self.family is not None and self.family.asynchronous

    @property
    def may_split(self) -> bool:
        """Return whether the schedule may have I and W. Layers must then be able to split their backwards."""
        if self.file is not None:
            return self.file.splits_backward
        return self.searches or (self.family is not None and self.family.splits_backward)

    @property
    def may_offload(self) -> bool:
        """Return whether activations may leave the device."""
        if self.file is not None:
            return self.offload != OFF or self.file.offloads
        return self.offload != OFF or (self.family is not None and self.family.offloads)

    @property
    def may_recompute(self) -> bool:
        """Return whether the schedule may run a forward, or part of one, again."""
        return self.recompute != "none" or (self.file is not None and bool(self.file.recomputed))

    @property
    def replicas(self) -> int:
        """Return the number of replicas of the model that the schedule runs."""
        if self.file is not None:
            return self.file.placement.replicas
        return 1 if self.family is None else self.family.replicas

    @property
    def chunks(self) -> int:
        """Return the model chunks per rank and replica to request from Megatron if the user does not cut the model."""
        if self.file is not None:
            return self.file.placement.num_chunks // self.replicas
        if self.searches:
            return searched_placements(1, self.options.get("placement"), self.options.get("chunks"))[0].num_chunks
        return family(self.schedule).chunks_per_device(self.options) // self.replicas

    @property
    def is_round_robin(self) -> bool:
        """Return whether the placement can only be Megatron's own."""
        if self.file is not None:
            return self.file.placement.is_round_robin
        if self.family is None:
            return self.options.get("placement") in ("interleaved", "linear") or self.chunks == 1
        return self.options.get("placement", self.family.placement) in ("linear", "interleaved")


def outputs(report: str | Path | None, trace: str | Path | None) -> list[Path]:
    """Return the files that show whether a run's report and its folder of timelines can be written."""
    files = [] if report is None else [Path(report)]
    return files if trace is None else [*files, Path(trace) / "run.html"]


def prices_of(costs: str) -> tuple[Costs, str]:
    """Return the costs with which a run begins, and their source.

    A file raises a CostsError if it cannot be read, or if it weighs microbatches, because every step weighs its own.
    """
    if costs in ("unit", PROFILE):
        return Costs(), "unit"
    found = Costs.from_json(costs)
    found.require_alike(f"{costs}: a run")
    return found, "file"


def algorithm_of(barriers: int) -> int:
    """Return the algorithm of arXiv 2411.05288 that has so many barriers."""
    return next(algorithm for algorithm, count in BARRIERS_OF_ALGORITHM.items() if count == barriers)
