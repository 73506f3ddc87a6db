"""All settings of a run's schedule (``Request``), and the flags with which users give them.

Every field of ``Request`` is an argument of ``enable()``. The metadata of a field describe its ``--pipemem-*`` flag
(if it has one), with the help text and a function that reads the value. The command line, the keys of a run's
YAML file and the documents' list of flags are generated from the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.family import Family
from megatron_pipemem.schedule.memory_cap import MemoryCap, parse_bytes, parse_caps
from megatron_pipemem.schedule.options import (
    AUTO,
    COUNT,
    EARLY_WGRAD,
    MESSAGE_SHAPES,
    OFF,
    OFFLOAD,
    POSITIVE,
    RANDOM,
    RECOMPUTE,
    SLICE_CUTS,
    STOCK,
    TOKENS,
    VOCABULARY,
    WGRAD_INPUTS,
    RandomStreams,
    SliceCut,
    VocabularyCut,
    WgradInputs,
    early_wgrad,
    searched_placements,
    slice_counts,
)
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM

PROFILE = "profile"
CUT_OF_FLAGS = "given"
FILE_SUFFIX = ".csv"

DEFAULT_HOST_SHARE = 0.5
"""The share of a host's available memory that offloaded activations may use by default."""

MicrobatchCosts = str | Callable[[object], object]
"""``tokens``, ``FLOPs``, a JSON file, ``module:function``, or the function itself."""

Reader = Callable[[str, Any], Any]
"""A function ``(flag, value)`` that converts and checks a value. Its messages begin with ``flag``. It returns a value
that has been converted before unchanged."""


@dataclass(frozen=True)
class Flag:
    """The description of a field's ``--pipemem-*`` flag."""

    help: str
    metavar: str = ""
    """The form of the value in the help, as in ``off|1|2``; empty for a flag without a value."""
    name: str = ""
    """The flag with its dashes. By default it is made from the field's name."""
    read: Reader | None = None
    repeated: bool = False
    """Whether the flag is given once for every ``KEY=VALUE``."""
    page: str = ""
    """The page of the documents about the flag."""


FORMER_NAMES = MappingProxyType(
    {
        "early_weights": "early_wgrad",
        "random": "rng",
        "vocab_parallel": "vocab_cut",
        "weight_inputs": "wgrad_inputs",
    }
)
"""The names of fields by those of earlier versions, which are refused."""


@cache
def flags_of(request: type) -> Mapping[str, Flag]:
    """Return the flags of ``Request`` or a similar dataclass, by the names of the fields.

    The class's own fields come before inherited ones, and fields without a flag are left out.
    """
    own_first = sorted(fields(request), key=lambda attribute: attribute.name not in request.__annotations__)
    flags = {attribute.name: attribute.metadata["flag"] for attribute in own_first if "flag" in attribute.metadata}
    return MappingProxyType(
        {
            name: flag if flag.name else replace(flag, name=f"--pipemem-{name.replace('_', '-')}")
            for name, flag in flags.items()
        }
    )


def _field(default: Any, help: str, metavar: str = "", choices: Sequence[str] = (), **settings: Any) -> Any:
    """Return a dataclass field with a flag. Without ``choices`` its value is not restricted."""
    if choices:
        settings["read"] = _one_of(choices)
    flag = Flag(help, metavar or "|".join(choices), **settings)
    how: dict[str, Any] = {"default_factory": type(default)} if isinstance(default, dict) else {"default": default}
    return field(**how, metadata={"flag": flag})


def _one_of(choices: Sequence[str]) -> Reader:
    def read(flag: str, value: Any) -> str:
        if str(value) not in choices:
            raise UnsupportedError(
                "bad-choice", f"{flag} {shortened(value)} is none of {', '.join(choices)}; give one of these"
            )
        return str(value)

    return read


def _optional(read: Reader) -> Reader:
    return lambda flag, value: None if value is None else read(flag, value)


@_optional
def _caps(flag: str, value: Any) -> MemoryCap:
    return value if isinstance(value, MemoryCap) else parse_caps(value)


@_optional
def _bytes(flag: str, value: Any) -> float:
    return parse_bytes(flag, value if isinstance(value, str) else f"{value:f}B")


def _sent(flag: str, value: Any) -> str | int:
    """Return the value of ``--pipemem-offload``, or raise an UnsupportedError if it is not allowed.

    Commands that simulate also give a number of chunks, which is returned unchecked.
    """
    return value if isinstance(value, int) else _one_of(OFFLOAD)("offload", value)


def _early(flag: str, value: Any) -> str:
    early_wgrad(value, 0, 0)  # refuses other modules
    return value


def _switch(flag: str, value: Any) -> bool:
    if value not in (0, 1, False, True):
        raise UnsupportedError("bad-choice", f"{flag} {shortened(value)} is neither 0 nor 1; give one of these")
    return bool(value)


def _groups(flag: str, value: Any) -> tuple[tuple[int, ...], ...]:
    groups = value if isinstance(value, (list, tuple)) else [None]
    members = [member for group in groups for member in (group if isinstance(group, (list, tuple)) else [None])]
    if len(set(map(str, members))) < len(members) or not all(type(member) is int and member >= 0 for member in members):
        raise UnsupportedError(
            "bad-syntax",
            f"{flag} {shortened(value)} is not a list of groups of a node's ranks, with each rank once; write [[0, 1], [2, 3]]",
        )
    return tuple(map(tuple, groups))


def _least_bytes(flag: str, value: Any) -> int:
    return value if isinstance(value, int) else int(parse_bytes(flag, value))


@dataclass(frozen=True)
class TransferOptions:
    """The options of ``--pipemem-offload-option``: how activations are copied to the host and back."""

    # Bytes per second to emulate on CPU ranks, in each direction; ``None`` for the speed of the memory.
    bandwidth: float | None = field(default=None, metadata={"read": _bytes})
    # Tensors with less memory stay on the device, because even a small copy costs the host a few microseconds.
    min_bytes: int = field(default=1 << 16, metadata={"read": _least_bytes})
    # Overwrite copied memory with NaN, and compare checksums after a round trip. This is slow, and finds code that uses memory
    # while it is on the host.
    guard: bool = field(default=False, metadata={"read": _switch})
    # Seconds to copy a layer's activations to the host and back, divided by those of its F, I and W; ``None``: measure.
    ratio: float | None = field(default=None, metadata={"read": _optional(POSITIVE.read)})
    # Groups of ranks of a node, counted on every node from 0, whose devices share a channel to the host.
    switches: tuple[tuple[int, ...], ...] = field(default=(), metadata={"read": _groups})

    @classmethod
    def of(cls, flag: str, options: Any) -> TransferOptions:
        """Return the options in a mapping of names to values, or raise an UnsupportedError for a wrong one.

        Values of ``bandwidth`` and ``min_bytes`` are like ``1GiB`` or ``64KiB``, of ``guard`` 0 or 1, of ``ratio`` a
        positive number, and of ``switches`` lists like ``[[0, 1], [2, 3]]``. ``TransferOptions`` are returned as they
        are. ``flag`` is not used, because messages name the single option.
        """
        if isinstance(options, cls):
            return options
        readers: dict[str, Reader] = {option.name: option.metadata["read"] for option in fields(cls)}
        unknown = sorted(set(options) - set(readers))
        if unknown:
            raise UnsupportedError(
                "unknown-option",
                f"activation offload has no option {shortened(unknown[0])}; its options: {', '.join(readers)}",
            )
        return cls(**{name: readers[name](f"offload option {name}", value) for name, value in options.items()})


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The settings of a request that are also keys of a run's YAML file."""

    costs: str = _field(
        "unit",
        "seconds of the passes: equal (default), measured in the run, or of a JSON file",
        "unit|profile|FILE",
    )
    options: dict[str, Any] = _field(
        {}, "option of the schedule, for example group_size=6", "KEY=VALUE", name="--pipemem-option", repeated=True
    )
    vocab_cut: VocabularyCut = _field(
        OFF,
        "cut embedding and LM head over the pipeline's ranks, by Algorithm 1 (two barriers) or 2 (one) of arXiv 2411.05288; "
        "auto: off, 1 or 2, whichever is fastest",
        choices=VOCABULARY,
        page="vocabulary.md",
    )
    wgrad_inputs: WgradInputs = _field(
        AUTO,
        "inputs of linear layers that are kept until W under sequence parallelism. sharded: this rank's shard, gathered "
        "again for W; gathered: the whole; auto (default): sharded if the tensor-parallel ranks share a node",
        choices=WGRAD_INPUTS,
        page="../benchmarks/notes/gpus.md#what-waits-for-w",
    )
    early_wgrad: str = _field(
        AUTO,
        "modules whose weight gradients are computed in I, so that their inputs are not kept until W; auto (default): the "
        "second matrix of narrow experts, and an earlier W where a rank would hold more than any rank under 1f1b",
        f"auto|none|{','.join(EARLY_WGRAD)}",
        read=_early,
        page="../benchmarks/notes/gpus.md#what-waits-for-w",
    )
    rng: RandomStreams = _field(
        STOCK,
        "source of initial weights and dropout. stock: Megatron's streams of every rank; layerwise: seed, iteration, "
        "microbatch and layer alone, so that every schedule trains the same from step 0",
        choices=RANDOM,
        page="troubleshooting.md#my-loss-differs-from-1f1bs-at-step-1",
    )
    slice_cut: SliceCut = _field(
        TOKENS,
        "how sequences are cut into slices. tokens (default): equally many tokens; flops: equally many FLOPs of a forward",
        choices=SLICE_CUTS,
        page="long-sequences.md",
    )
    overlap_steps: bool = _field(
        False,
        "let every rank begin a step without waiting for other ranks; training stays the same to the bit",
        page="no-barrier.md",
    )


CAP = Flag(
    "the most activations that a rank may hold, in activation units, or (with auto or offload) in bytes; one for all "
    "pipeline ranks, or one per rank",
    "X|XGiB|XMiB|XB|X,X,...",
    read=_caps,
)
SENT = Flag(
    "the activations that are copied to the host until their backward",
    "|".join(OFFLOAD),
    read=_sent,
    page="offload.md",
)
WEIGHTS = Flag(
    "costs of microbatches that differ, for an order per step; a function is called with an item of the data iterator",
    "FLOPs|tokens|FILE.json|module:function",
    page="unequal-microbatches.md",
)
"""Flags of fields that take text in a YAML file, and in a program also objects of other types."""


@dataclass(frozen=True, kw_only=True)
class Request(ScheduleOptions):
    """All settings of a run's schedule.

    A field has the meaning of its flag: ``memory_cap`` is ``--pipemem-memory-cap``, which ``pipemem run --help``
    explains. The constructor converts and checks every value. ``conflicts.check`` checks that the values fit together.
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
        "a Python file or module with schedules that --pipemem-schedule can name",
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
        "parts of a forward that run again before its backward: the cheap ones (norms, activation functions, unfused "
        "attention), or all; auto: those that a memory cap needs, per stage",
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
        "write timelines of the plan and of the last step: an HTML page, a picture, a Perfetto trace",
        "DIR",
    )
    report: str | None = _field(
        None,
        "write losses, peaks and bubbles, predicted and measured, as JSON for pipemem report",
        "FILE",
    )
    vocab_piece_tokens: int | None = _field(
        None,
        "compute the cut head's logits for N tokens at a time (default: all), which bounds their fp32 bytes",
        "N",
        read=_optional(COUNT.read),
    )
    single_queue: bool = _field(
        False,
        "run the order for one hardware queue, as GPUs do anyway with CUDA_DEVICE_MAX_CONNECTIONS=1",
        page="how-it-works.md#one-hardware-queue-per-rank",
    )
    layout: str = _field(
        CUT_OF_FLAGS,
        "layers of every stage. given (default): by Megatron's flags; auto: those with the shortest simulated step, in place "
        "of all flags that cut the model, also for stock's schedules",
        choices=(CUT_OF_FLAGS, AUTO),
        page="stock-megatron.md#layers-per-stage",
    )
    message_shapes: str = _field(
        "step",
        "how ranks learn the shapes of messages under variable_seq_lengths. step (default): all at the start of a step; "
        "message: each from a header, which every receive waits for",
        choices=MESSAGE_SHAPES,
        page="how-it-works.md#microbatches-that-differ",
    )
    microbatch_costs: MicrobatchCosts | None = field(default=None, metadata={"flag": WEIGHTS})
    train_steps: int | None = None
    """The number of training steps of the run. Asynchronous schedules need it, because the last step must not read data
    of a next one. Megatron's own training loop sets it."""
    pairs: bool = False
    """Whether forwards run together with backwards (``Schedule.pairs``): Megatron's own flag
    ``--overlap-moe-expert-parallel-comm``."""
    graphs: bool = False
    """Whether every pass is captured as a CUDA graph: Megatron's own flag ``--cuda-graph-impl`` (``captures_passes``)."""
    file: Schedule | None = None
    """The schedule in the file that ``schedule`` names, read and proved. ``conflicts.check`` sets it."""

    def __post_init__(self) -> None:
        for name, flag in flags_of(Request).items():
            if flag.read is not None:
                object.__setattr__(self, name, flag.read(flag.name, getattr(self, name)))

    @classmethod
    def for_search(cls, cap: MemoryCap, options: Mapping[str, Any], barriers: int = 0) -> Request:
        """Return the request for the fastest order within a cap, with 0, 1 or 2 vocabulary barriers (0: no cut)."""
        return cls(AUTO, cap, options=dict(options)).decided(barriers)

    @classmethod
    def for_order(cls, schedule: Schedule, cap: MemoryCap) -> Request:
        """Return the request for a given order, with as much offload as it needs to keep a cap."""
        return cls(schedule.name, cap, offload=AUTO, file=schedule)

    def decided(self, barriers: int) -> Request:
        """Return a copy of the request with 1 or 2 vocabulary barriers, or with an uncut vocabulary (0)."""
        cut = cast(VocabularyCut, str(algorithm_of(barriers)) if barriers else OFF)
        return replace(self, vocab_cut=cut)

    def without_offload(self) -> Request:
        """Return a copy without offload, recomputation and cap, if the request asks for offload or recomputation, or itself.

        A schedule is chosen for the returned request first. Then offload and recomputation are planned, so that it keeps the
        cap of the original request.
        """
        return replace(self, memory_cap=None, offload=OFF, recompute="none") if self.plans_offload else self

    @property
    def is_stock(self) -> bool:
        """Return whether Megatron's own schedule is requested."""
        return self.schedule == STOCK

    @property
    def barriers(self) -> int:
        """Return the number of vocabulary barriers; 0 if the vocabulary is not cut, or ``auto`` is not decided yet."""
        return 0 if self.vocab_cut in (OFF, AUTO) else BARRIERS_OF_ALGORITHM[int(self.vocab_cut)]

    @property
    def outputs(self) -> list[Path]:
        """Return the files to check before a run: if they can be written, its report and timelines can be written, too."""
        files = [] if self.report is None else [Path(self.report)]
        return files if self.trace is None else [*files, Path(self.trace) / "run.html"]

    @property
    def cuts_vocabulary(self) -> bool:
        """Return whether embedding and LM head are, or may be, cut over the pipeline's ranks."""
        return self.vocab_cut != OFF

    @property
    def searches_period(self) -> bool:
        """Return whether a search minimizes the time from step to step without a barrier, and not that of one step."""
        return self.searches and bool(self.options.get("period", self.overlap_steps))

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """Return the numbers of sequence slices among which a search chooses; ``(1,)`` if nothing is searched for."""
        return slice_counts(self.options.get("slices", 1)) if self.searches else (1,)

    @property
    def may_cut(self) -> bool:
        """Return whether microbatches are cut into parts, or may be by a search."""
        if self.file is not None:
            return not self.file.units.are_whole
        if self.family is None:
            return max(self.slice_counts) > 1
        requested = self.options.get("slices", self.family.slices)
        return isinstance(requested, int) and requested > 1  # the family refuses a value of another type

    @property
    def searches(self) -> bool:
        """Return whether the schedule is found by a search (``auto``)."""
        return self.schedule == AUTO and self.file is None

    @property
    def plans_offload(self) -> bool:
        """Return whether the flags ask for offload or recomputation, in addition to that of the schedule itself."""
        return self.offload != OFF or self.recompute != "none"

    @property
    def chooses_offload(self) -> bool:
        """Return whether a search chooses the order together with ``auto`` offload or recomputation, to keep a cap."""
        is_open = self.offload in (OFF, AUTO) and self.recompute in ("none", AUTO)
        return self.searches and self.plans_offload and is_open and self.memory_cap is not None

    @property
    def in_bytes(self) -> bool:
        """Return whether there is a memory cap, and it is in bytes."""
        return self.memory_cap is not None and self.memory_cap.in_bytes

    @property
    def cap_in_units(self) -> float | tuple[float, ...] | None:
        """Return the memory cap if it is in activation units, else ``None``."""
        return None if self.memory_cap is None or self.memory_cap.in_bytes else self.memory_cap.amount

    def caps(self, num_devices: int) -> tuple[float, ...] | None:
        """Return the memory cap of every device, in bytes or activation units as given; ``None`` without a cap.

        Raises:
            UnsupportedError: the number of caps differs from that of devices.
        """
        return None if self.memory_cap is None else self.memory_cap.of(num_devices)

    @property
    def family(self) -> Family | None:
        """Return the family that builds the schedule; ``None`` for a search, a file, and Megatron's own schedule.

        Raises:
            UnknownScheduleError: there is no family of that name.
        """
        return None if self.searches or self.is_stock or self.file is not None else family(self.schedule)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether the schedule is asynchronous: weights change while microbatches are in the pipeline."""
        return self.family is not None and self.family.asynchronous

    @property
    def may_split(self) -> bool:
        """Return whether the schedule may have I and W. The model's layers must then support split backwards."""
        if self.file is not None:
            return self.file.splits_backward
        return self.searches or (self.family is not None and self.family.splits_backward)

    @property
    def has_only_passes(self) -> bool:
        """Return whether the schedule surely has no other actions than forwards and whole backwards of microbatches.

        All microbatches are then equal, in one step at a time and on one replica of the model.
        """
        return not self.may_split and self._has_equal_passes

    def captures_passes(self, cuda_graph_impl: object) -> bool:
        """Return whether this value of Megatron's flag asks us to capture passes, and not Megatron to capture layers.

        Transformer Engine's graphs of layers stay as they are where it can capture them.
        """
        return cuda_graph_impl == "local" or (cuda_graph_impl == "transformer_engine" and not self.has_only_passes)

    def with_graphs(self, cuda_graph_impl: object) -> Request:
        """Return a copy that captures passes if this value of Megatron's flag asks us to, unless it is Megatron's own."""
        return replace(self, graphs=not self.is_stock and self.captures_passes(cuda_graph_impl))

    @property
    def may_be_captured(self) -> bool:
        """Return whether the host surely does nothing between the passes of a training step that a graph cannot hold.

        Each rank then has one stage, and nothing is measured.
        """
        placement = self.options.get("placement", self.family.placement) if self.family else None
        linear = (self.file.placement.name if self.file else placement) == "linear"
        measured = (self.report, self.trace, self.costs if self.costs == PROFILE else None)
        return linear and self._has_equal_passes and not any(measured)

    @property
    def _has_equal_passes(self) -> bool:
        others = (self.may_offload, self.may_recompute, self.cuts_vocabulary, self.is_asynchronous, self.searches)
        unequal = (
            self.may_cut,
            self.microbatch_costs is not None,
            self.overlap_steps,
            self.replicas > 1,
            self.pairs,
        )
        return not any((*others, *unequal))

    @property
    def may_offload(self) -> bool:
        """Return whether the schedule may copy activations to the host."""
        if self.file is not None:
            return self.offload != OFF or self.file.offloads
        return self.offload != OFF or (self.family is not None and self.family.offloads)

    @property
    def may_recompute(self) -> bool:
        """Return whether the schedule may recompute forwards or parts of them."""
        return self.recompute != "none" or (self.file is not None and bool(self.file.recomputed))

    @property
    def replicas(self) -> int:
        """Return the number of replicas of the model in the schedule's placement; 1 unless it is bidirectional."""
        if self.file is not None:
            return self.file.placement.replicas
        return 1 if self.family is None else self.family.replicas

    @property
    def chunks(self) -> int:
        """Return the model chunks per rank (and replica) that the schedule has if no flag gives their number.

        Raise an UnknownScheduleError for Megatron's own schedule, which has no fixed number.
        """
        if self.file is not None:
            return self.file.placement.num_chunks // self.replicas
        if self.searches:
            return searched_placements(1, self.options.get("placement"), self.options.get("chunks"))[0].num_chunks
        return family(self.schedule).chunks_per_device(self.options) // self.replicas

    @property
    def is_round_robin(self) -> bool:
        """Return whether the placement is surely Megatron's own: stage ``s`` on rank ``s % p``."""
        if self.file is not None:
            return self.file.placement.is_round_robin
        if self.family is None:
            return self.options.get("placement") in ("interleaved", "linear") or self.chunks == 1
        return self.options.get("placement", self.family.placement) in ("linear", "interleaved")


def algorithm_of(barriers: int) -> int:
    """Return the algorithm of arXiv 2411.05288 with this number of barriers: 2 has one barrier, and 1 has two."""
    return next(algorithm for algorithm, count in BARRIERS_OF_ALGORITHM.items() if count == barriers)
