"""What a user asks of a run, checked as far as it can be without torch and Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.memory_cap import parse_bytes
from megatron_pipemem.schedule.core.slices import SLICE_CUTS, TOKENS
from megatron_pipemem.schedule.options import (
    AUTO,
    MESSAGE_SHAPES,
    OFF,
    OFFLOAD,
    RANDOM,
    RECOMPUTE,
    STOCK,
    WEIGHT_INPUTS,
    early_weights,
)
from megatron_pipemem.schedule.overlap import check_overlaps
from megatron_pipemem.schedule.registry import register_module
from megatron_pipemem.schedule.request import Request, check_slice_cut, check_vocab_parallel, check_weighs, prices_of
from megatron_pipemem.schedule.text.weights_file import read_microbatch_costs

MicrobatchCosts = str | Callable[[object], object]
"""``tokens``, ``FLOPs``, a JSON file, ``module:function``, or the function itself."""


@dataclass(frozen=True)
class OffloadSettings:
    """Say how activations leave the device, or are made again.

    Args:
        mode: ``off`` for what the schedule itself says and no more, ``half`` for the longest-lived half of every
            device's chunks, ``full`` for all of them, ``auto`` for what a memory cap needs.
        recompute: ``none``, ``selective`` for the cheap parts of every stage, ``full`` for all of it, ``auto`` for whichever of
            these a memory cap needs, per stage.
        host_memory: bytes per node, shared by its ranks; ``None`` for ``DEFAULT_HOST_SHARE`` of what is available.
        bandwidth: bytes per second to pretend on CPU ranks, each way; ``None`` for as fast as memory is.
        min_bytes: storages below this stay on the device; a copy costs the host a few microseconds however small it is.
        guard: overwrite what has left with NaN, and compare checksums of what left and what returned. Slow; finds users
            of memory that is away.
        ratio: the seconds of a round trip of a layer's activations over those of its F, I and W; ``None`` to measure it.
        switches: groups of ranks of a node, counted on every node from 0, whose devices share a channel to the host.
    """

    mode: str = "off"
    recompute: str = "none"
    host_memory: float | None = None
    bandwidth: float | None = None
    min_bytes: int = 1 << 16
    guard: bool = False
    ratio: float | None = None
    switches: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, mode: str, recompute: str, host_memory: str | None, options: Mapping[str, Any]) -> OffloadSettings:
        """Read what a user wrote.

        Args:
            mode: see the class.
            recompute: see the class.
            host_memory: ``64GiB``, ``800MiB``, ``123456B``.
            options: ``bandwidth`` and ``min_bytes`` (``1GiB``, ``64KiB``, ``100B``), ``guard`` (0 or 1), ``ratio``,
                ``switches`` (``[[0, 1], [2, 3]]``).

        Raises:
            UnsupportedError: one of them is nothing of the kind.
        """
        for what, given, allowed in (("offload", mode, OFFLOAD), ("recompute", recompute, RECOMPUTE)):
            if given not in allowed:
                raise UnsupportedError("bad-choice", f"--pipemem-{what} {given!r} is none of {', '.join(allowed)}")
        readers = {
            "bandwidth": _bytes,
            "min_bytes": lambda what, value: int(_bytes(what, value)),
            "guard": _switch,
            "ratio": _positive,
            "switches": _groups,
        }
        assert set(readers) < {each.name for each in fields(cls)}
        unknown = sorted(set(options) - set(readers))
        if unknown:
            raise UnsupportedError(
                "unknown-option", f"activation offload has no option {unknown[0]!r}; its options: {', '.join(readers)}"
            )
        read: dict[str, Any] = {name: readers[name](f"offload option {name}", value) for name, value in options.items()}
        budget = None if host_memory is None else _bytes("--pipemem-host-memory", host_memory)
        return cls(mode, recompute, budget, **read)


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Args:
        schedule: name of a schedule family, path of a schedule file (``.csv``), ``auto`` for the fastest schedule that a
            search finds within ``memory_cap``, or ``stock`` to leave Megatron's own schedule in place and only observe it.
        memory_cap: the most any rank may hold, in activation units (``0.6``), or for ``auto`` in bytes (``"6GiB"``,
            ``"800MiB"``, ``"123456B"``), one for all pipeline ranks or one each (``"0.5,0.6,0.6,0.7"``); a schedule that needs
            more is refused.
        costs: ``unit``, a JSON file of costs, or ``profile`` to measure them in the run itself. They price the predicted
            bubble, and ``auto`` searches for them.
        trace: directory for timelines of plan and run.
        report: JSON file that sets counted bytes, measured bubbles and losses against the plan.
        options: options of the schedule family, for example ``group_size``; for ``auto`` see ``SEARCH_OPTIONS``.
        offload: ``off``, ``half``, ``full`` or ``auto``: which activations wait on the host for their backward, beside what
            the schedule itself says.
        host_memory: bytes per node for that (``"64GiB"``), shared by its ranks.
        recompute: ``none``, ``selective``, ``full`` or ``auto``: what of which stages runs again before its backward.
        offload_options: see ``OffloadSettings.of``.
        vocab_parallel: cut the embedding and the LM head over the pipeline's ranks: ``off``, the algorithm of arXiv
            2411.05288, ``1`` (two barriers) or ``2`` (one barrier, one microbatch less in flight), or ``auto`` to choose by the
            model's sizes and layout, ``costs`` and ``memory_cap``.
        vocab_piece_tokens: compute the logits of a cut head for so many tokens at a time, which bounds what they take in fp32;
            ``None`` for all tokens of a microbatch.
        weight_inputs: what waits for W of tensors that sequence parallelism gathers, see ``options.WEIGHT_INPUTS``.
        early_weights: modules whose weight gradients are computed in I, see ``options.early_weights``.
        single_queue: order what ranks launch for one hardware queue each, also where ``CUDA_DEVICE_MAX_CONNECTIONS`` is not 1.
        random: what first weights and dropout depend on: ``stock`` for Megatron's streams of every rank, or ``layerwise``
            for the seed, the iteration, the microbatch and the layer alone, so that every schedule trains the same from step 0.
        message_shapes: how ranks learn the shapes of messages under ``variable_seq_lengths``: ``step`` for all of a step at its
            start, from the tokens that the first stage passes to the model, or ``message`` for each from a header.
        microbatch_costs: what microbatches that are not alike cost: ``tokens``, ``FLOPs``, a JSON file of weights,
            ``module:function`` or a function of what the data iterator yields. Every training step is then planned for its own.
        slice_cut: how sequences are cut where the schedule has slices: ``tokens`` for slices of equally many tokens, or
            ``flops`` for slices whose forwards take equally many FLOPs.
        overlap_steps: let every rank begin a training step as soon as it has done its own part of the one before, without
            waiting for the others; training stays the same to the bit.
        train_steps: training steps of the run, for asynchronous schedules: the last one reads no data of a next one.
            Megatron's own training loop tells it by itself.
        schedule_module: Python file (``mine.py``) or module (``package.module``) that adds the schedule to the table.
    """

    schedule: str
    memory_cap: float | str | None = None
    costs: str = "unit"
    trace: str | None = None
    report: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    offload: str = "off"
    host_memory: str | None = None
    recompute: str = "none"
    offload_options: Mapping[str, Any] = field(default_factory=dict)
    vocab_parallel: str = OFF
    vocab_piece_tokens: int | None = None
    weight_inputs: str = AUTO
    early_weights: str = AUTO
    single_queue: bool = False
    random: str = STOCK
    message_shapes: str = "step"
    microbatch_costs: MicrobatchCosts | None = None
    slice_cut: str = TOKENS
    overlap_steps: bool = False
    train_steps: int | None = None
    schedule_module: str | None = None

    @cached_property
    def offload_settings(self) -> OffloadSettings:
        """Return what is said about the host.

        Raises:
            UnsupportedError: one of it is nothing of the kind.
        """
        return OffloadSettings.of(self.offload, self.recompute, self.host_memory, self.offload_options)

    @property
    def outputs(self) -> list[Path]:
        """The files that show whether report and timelines can be written."""
        return outputs(self.report, self.trace)

    @cached_property
    def request(self) -> Request | None:
        """For the schedules of the run, ``None`` for stock's own. A schedule file is read when this is asked first.

        Raises:
            PipememError: settings that cannot be or go together.
        """
        if self.schedule_module is not None:
            register_module(self.schedule_module)
        offload = self.offload_settings
        check_vocab_parallel(self.vocab_parallel, self.vocab_piece_tokens)
        for name, allowed in (
            ("random", RANDOM),
            ("message_shapes", MESSAGE_SHAPES),
            ("slice_cut", SLICE_CUTS),
            ("weight_inputs", WEIGHT_INPUTS),
        ):
            if getattr(self, name) not in allowed:
                raise UnsupportedError("bad-choice", f"{name} {getattr(self, name)!r} is none of {', '.join(allowed)}")
        early_weights(self.early_weights, 0, 0)
        if self.schedule != STOCK:
            prices_of(self.costs)
        if self.single_queue and self.schedule == STOCK:
            raise UnsupportedError(
                "not-for-stock",
                f"--pipemem-single-queue orders schedules of this package, and {STOCK} is Megatron's own; "
                "leave one of them out",
            )
        searched = {"period": True} if self.overlap_steps and self.schedule == AUTO else {}
        options = {**searched, **(self.options or {})}
        asked = (self.schedule, self.memory_cap, self.costs, options, offload.mode, offload.recompute)
        request = Request.of(*asked, offload.host_memory is not None, self.vocab_parallel)
        if self.microbatch_costs is not None:
            check_weighs(self.schedule, request)
            if isinstance(self.microbatch_costs, str):
                read_microbatch_costs(self.microbatch_costs)
        check_slice_cut(self.schedule, request, self.slice_cut)
        if self.overlap_steps:
            check_overlaps(self.schedule, request, self.microbatch_costs is not None)
        return None if self.schedule == STOCK else request


def outputs(report: str | Path | None, trace: str | Path | None) -> list[Path]:
    """Return the files that show whether a run's report and its folder of timelines can be written."""
    files = [] if report is None else [Path(report)]
    return files if trace is None else [*files, Path(trace) / "run.html"]


def _bytes(what: str, value: object) -> float:
    return parse_bytes(what, value if isinstance(value, str) else f"{value}B")


def _switch(what: str, value: object) -> bool:
    if value not in (0, 1, False, True):
        raise UnsupportedError("bad-choice", f"{what} {value!r} is neither 0 nor 1")
    return bool(value)


def _groups(what: str, value: object) -> tuple[tuple[int, ...], ...]:
    groups = value if isinstance(value, (list, tuple)) else [None]
    members = [each for group in groups for each in (group if isinstance(group, (list, tuple)) else [None])]
    if len(set(map(str, members))) < len(members) or not all(type(each) is int and each >= 0 for each in members):
        raise UnsupportedError(
            "bad-syntax",
            f"{what} {value!r} are no groups of ranks of a node, each in one of them; write [[0, 1], [2, 3]]",
        )
    return tuple(map(tuple, groups))


def _positive(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf"):
        raise UnsupportedError("bad-number", f"{what} {value!r} is no positive number")
    return number
