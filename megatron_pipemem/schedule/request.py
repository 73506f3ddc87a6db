"""Describe what a user asks of the schedules of a run, as far as it can be judged before anything is built.

The launcher asks here before it starts a run, and the run itself when it starts, so that both refuse the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import MemoryCap, parse_caps
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.slices import TOKENS
from megatron_pipemem.schedule.core.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.features.windows import UPDATE_EVERY
from megatron_pipemem.schedule.options import (
    AUTO,
    OFF,
    STOCK,
    VOCABULARY,
    check_effort,
    searched_placements,
    slice_counts,
)
from megatron_pipemem.schedule.registry import check_options, chunks_per_device, family
from megatron_pipemem.schedule.schedule_file import schedule_of_file

PROFILE = "profile"
FILE_SUFFIX = ".csv"

SEARCH_OPTIONS = ("chunks", "placement", "seconds", "effort", "seed", "period", "slices")


@dataclass(frozen=True)
class Request:
    """Describe what a user asks of the schedules of a run.

    Args:
        name: a family, ``auto`` for a search, the path of a file, or ``stock`` for Megatron's own schedule.
        memory_cap: the most a device may hold; ``None`` for no limit.
        options: of the family or of the search.
        offload: which activations wait on the host, see ``plan_offload``.
        recompute: what runs again, see ``options.RECOMPUTE``.
        bounds_host: whether the host's memory is limited by the user.
        barriers: of vocabulary parallelism; 0 for embedding and head as parts of the first and the last stage.
        vocabulary: how it is cut, see ``options.VOCABULARY``; ``auto`` as long as nobody has decided.
        file: the schedule of a file, read and proved.
    """

    name: str
    memory_cap: MemoryCap | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    offload: str | int = OFF
    recompute: str = "none"
    bounds_host: bool = False
    barriers: int = 0
    vocabulary: str = OFF
    file: Schedule | None = None

    @classmethod
    def of(
        cls,
        name: str,
        memory_cap: float | str | None = None,
        costs: str = "unit",
        options: Mapping[str, Any] | None = None,
        offload: str = OFF,
        recompute: str = "none",
        bounds_host: bool = False,
        vocabulary: str = OFF,
    ) -> Request:
        """Return what a run asks, judged as far as it can be; a file is read and proved here, once.

        Args:
            name: see the class, as for the others.
            memory_cap: as ``parse_caps`` reads it.
            costs: ``unit``, ``profile`` or a JSON file.
            options: of the schedule.
            offload: see the class.
            recompute: see the class.
            bounds_host: see the class.
            vocabulary: see the class.

        Raises:
            PipememError: its parts do not go together, or the file must not run.
        """
        cap = None if memory_cap is None else parse_caps(memory_cap)
        request = cls(name, cap, dict(options or {}), offload, recompute, bounds_host, vocabulary=vocabulary)
        _check(request, costs)
        file = None
        if name.endswith(FILE_SUFFIX):
            file = schedule_of_file(name, None if cap is None or request.plans_offload else cap.amount)
            check_barriers(name, file.vocabulary_barriers, vocabulary)
            if file.vocabulary_barriers:
                return replace(request, file=file).decided(file.vocabulary_barriers)
        barriers = 0 if vocabulary in (OFF, AUTO) else BARRIERS_OF_ALGORITHM[int(vocabulary)]
        return replace(request, barriers=barriers, file=file)

    def decided(self, barriers: int) -> Request:
        """Return the request, with the vocabulary cut so, or not at all."""
        return replace(self, barriers=barriers, vocabulary=str(_algorithm(barriers)) if barriers else OFF)

    @property
    def cuts_vocabulary(self) -> bool:
        """Return whether the vocabulary is cut over the pipeline, or may be."""
        return self.vocabulary != OFF

    @property
    def searches_period(self) -> bool:
        """Return whether an order is to be searched for whose steps follow each other soonest without a barrier."""
        return self.searches and bool(self.options.get("period"))

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """Numbers of slices of a microbatch among which a search chooses."""
        return slice_counts(self.options.get("slices", 1)) if self.searches else (1,)

    @property
    def searches(self) -> bool:
        """Return whether an order is to be searched for."""
        return self.name == AUTO and self.file is None

    @property
    def plans_offload(self) -> bool:
        """Return whether anything is to be added to what a schedule says itself."""
        return self.offload != OFF or self.recompute != "none"

    @property
    def chooses_offload(self) -> bool:
        """Return whether what is offloaded or recomputed is searched for together with the order."""
        is_open = self.offload in (OFF, AUTO) and self.recompute in ("none", AUTO)
        return self.searches and self.plans_offload and is_open and self.memory_cap is not None

    @property
    def in_bytes(self) -> bool:
        """Return whether there is a cap in bytes."""
        return self.memory_cap is not None and self.memory_cap.in_bytes

    @property
    def cap_in_units(self) -> float | tuple[float, ...] | None:
        """The cap in activation units, if there is one."""
        return None if self.memory_cap is None or self.memory_cap.in_bytes else self.memory_cap.amount

    def caps(self, num_devices: int) -> tuple[float, ...] | None:
        """Return the cap of every device, or ``None`` without one.

        Raises:
            UnsupportedError: there are not as many as devices.
        """
        return None if self.memory_cap is None else self.memory_cap.of(num_devices)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether weights change in the middle of the schedule."""
        return not self.searches and self.file is None and family(self.name).asynchronous

    @property
    def may_split(self) -> bool:
        """Return whether the schedule may have I and W, so that layers must be able to split their backwards."""
        if self.file is not None:
            return self.file.splits_backward
        return self.searches or family(self.name).splits_backward

    @property
    def may_offload(self) -> bool:
        """Return whether activations may leave the device."""
        if self.file is not None:
            return self.offload != OFF or self.file.offloads
        return self.offload != OFF or (not self.searches and family(self.name).offloads)

    @property
    def may_recompute(self) -> bool:
        """Return whether the schedule may run a forward, or part of one, again."""
        return self.recompute != "none" or (self.file is not None and bool(self.file.recomputed))

    @property
    def replicas(self) -> int:
        """Replicas of the model that the schedule runs."""
        if self.file is not None:
            return self.file.placement.replicas
        return 1 if self.searches else family(self.name).replicas

    @property
    def chunks(self) -> int:
        """Model chunks per rank and replica to ask Megatron for when the user does not say how the model is cut."""
        if self.file is not None:
            return self.file.placement.num_chunks // self.file.placement.replicas
        if self.searches:
            return searched_placements(1, self.options.get("placement"), self.options.get("chunks"))[0].num_chunks
        return chunks_per_device(self.name, **self.options) // family(self.name).replicas

    @property
    def is_round_robin(self) -> bool:
        """Return whether Megatron's own placement is all that can come."""
        if self.file is not None:
            return self.file.placement.is_round_robin
        if self.searches:
            return self.options.get("placement") in ("interleaved", "linear") or self.chunks == 1
        return self.options.get("placement", family(self.name).placement) in ("linear", "interleaved")


def check_vocab_parallel(vocab_parallel: str, piece_tokens: int | None = None) -> None:
    """Raises:
    UnsupportedError: no such algorithm, or pieces of no tokens or of an uncut head.
    """
    if str(vocab_parallel) not in VOCABULARY:
        raise UnsupportedError(
            "bad-choice", f"--pipemem-vocab-parallel {vocab_parallel!r} is none of {', '.join(VOCABULARY)}"
        )
    if piece_tokens is None:
        return
    if piece_tokens < 1:
        raise UnsupportedError("bad-number", f"--pipemem-vocab-piece-tokens {piece_tokens}: give at least 1")
    if vocab_parallel == OFF:
        raise UnsupportedError(
            "needs-option",
            "--pipemem-vocab-piece-tokens is about a head cut over the pipeline; pass --pipemem-vocab-parallel 1, 2 or auto, "
            "or leave it out",
        )


def check_search_options(options: Mapping[str, Any], allowed: Sequence[str] = SEARCH_OPTIONS) -> None:
    """Raises:
    UnsupportedError: ``auto`` has no such option, or not with that value.
    """
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise UnsupportedError(
            "unknown-option", f"schedule 'auto' has no option {unknown[0]!r}; its options: {', '.join(allowed)}"
        )
    searched_placements(1, options.get("placement"), options.get("chunks"))
    check_effort(options.get("seconds", 0), options.get("effort", 0), options.get("seed", 0))
    slice_counts(options.get("slices", 1))
    if not isinstance(period := options.get("period", False), bool):
        raise UnsupportedError("bad-choice", f"period of a search must be true or false, not {period!r}")


def check_barriers(name: str, barriers: int, vocab_parallel: str) -> None:
    """Refuse a schedule whose vocabulary passes are others than those that are asked for.

    Args:
        name: of the schedule.
        barriers: of its passes; 0 when it has none, so that any can be added.
        vocab_parallel: ``off``, ``1``, ``2`` or ``auto``.

    Raises:
        UnsupportedError: others are asked for, or none.
    """
    if barriers and vocab_parallel not in (AUTO, str(_algorithm(barriers))):
        raise UnsupportedError(
            "conflicting-options",
            f"{name} is a schedule for a vocabulary cut over the pipeline; pass --pipemem-vocab-parallel "
            f"{_algorithm(barriers)}, not {vocab_parallel}",
        )


def check_weighs(schedule: str, request: Request) -> None:
    """Check a schedule by the name that the user gave, and what is asked of it.

    Raises:
        UnsupportedError: steps of this schedule cannot be planned for the weights of their microbatches.
    """
    if schedule == STOCK:
        raise UnsupportedError(
            "not-for-stock",
            "--pipemem-microbatch-costs orders microbatches for schedules of this package, and stock is Megatron's own; leave "
            "one of them out",
        )
    if request.is_asynchronous:
        raise UnsupportedError(
            "conflicting-features",
            f"schedule {schedule!r} runs forwards of the next step, whose microbatches nobody has weighed; drop "
            "--pipemem-microbatch-costs, or take a synchronous schedule",
        )


def check_slice_cut(schedule: str, request: Request, cut: str) -> None:
    """Check how a schedule is to cut sequences into slices.

    Args:
        schedule: by the name that the user gave.
        request: what is asked of it.
        cut: ``tokens``, which is the default and goes with everything, or ``flops``.

    Raises:
        UnsupportedError: this schedule cuts none, so that it is no matter how.
    """
    if cut == TOKENS:
        return
    slices: object = 1
    if request.file is not None:
        slices = request.file.slices
    elif schedule != STOCK:
        slices = request.options.get("slices", 1 if request.searches else family(schedule).slices)
    if slices == 1:
        raise UnsupportedError(
            "no-slices",
            f"--pipemem-slice-cut {cut} says how sequences are cut into slices, and schedule {schedule!r} leaves them whole; "
            "add --pipemem-option slices=4 to one that takes it, or leave it out",
        )


def check_replicas(placement: Placement) -> None:
    """Raises:
    UnsupportedError: there are replicas of the model elsewhere than Megatron can build them.
    """
    if placement.replicas == 1:
        return
    if placement.name != "bidirectional":
        raise UnsupportedError(
            "unsupported-placement",
            f"{placement.replicas} replicas of the model run in opposite directions only, stage r and stage p-1-r on device r; "
            "this placement has them elsewhere",
        )
    if placement.num_devices == 1:
        raise UnsupportedError(
            "no-pipeline",
            "two replicas of the model need at least two pipeline ranks; pass --pipeline-model-parallel-size 2 or more, or "
            "another schedule",
        )


def prices_of(costs: str) -> tuple[Costs, str]:
    """Return the costs that a run begins with, and where they are from.

    Raises:
        CostsError: a file that cannot be read, or that weighs microbatches, which every step does anew.
    """
    if costs in ("unit", PROFILE):
        return Costs(), "unit"
    found = Costs.from_json(costs)
    found.require_alike(f"{costs}: a run")
    return found, "file"


def _check(request: Request, costs: str) -> None:
    """Refuse a request whose parts do not go together."""
    name, options, cap = request.name, request.options, request.memory_cap
    if name == STOCK:
        _check_stock(request)
        return
    if request.cuts_vocabulary and request.plans_offload:
        raise UnsupportedError(
            "conflicting-features",
            "offload and recomputation are not planned together with vocabulary passes; pass --pipemem-vocab-parallel off, or "
            "--pipemem-offload off and --pipemem-recompute none with Megatron's own --recompute-* flags",
        )
    if request.in_bytes and name != AUTO and not request.plans_offload:
        raise UnsupportedError(
            "unit-mismatch",
            f"a memory cap in bytes ({cap}) needs --pipemem-schedule auto, which fits a schedule to it, "
            f"or --pipemem-offload; {name!r} is what it is, so give the cap in activation units (1.0 is what 1F1B's "
            "first rank holds)",
        )
    if name == AUTO:
        check_search_options(options)
    elif name.endswith(FILE_SUFFIX):
        if options:
            raise UnsupportedError(
                "options-of-file",
                f"a schedule file has no options; drop --pipemem-option {next(iter(options))}={next(iter(options.values()))}",
            )
    else:
        check_options(name, options)
        if request.is_asynchronous:
            _check_asynchronous(request, costs)
        chunks_per_device(name, **options)  # which refuses options that the family has not


def _check_stock(request: Request) -> None:
    if request.plans_offload:
        raise UnsupportedError(
            "not-for-stock",
            "Megatron's own schedule has no place for offload or recomputation of ours; name another one, for example "
            "--pipemem-schedule 1f1b, or use Megatron's own flags",
        )
    if request.cuts_vocabulary:
        raise UnsupportedError(
            "not-for-stock",
            "Megatron's own schedules have no passes for a cut vocabulary; take a schedule of this package, or pass "
            "--pipemem-vocab-parallel off",
        )


def _check_asynchronous(request: Request, costs: str) -> None:
    """Refuses what plans a step as one that ends empty, and an option that the training loop decides."""
    for asked, off in (
        (request.plans_offload, "--pipemem-offload off and --pipemem-recompute none"),
        (request.cuts_vocabulary, "--pipemem-vocab-parallel off"),
        (costs == PROFILE, "--pipemem-costs unit or a file"),
    ):
        if asked:
            raise UnsupportedError(
                "conflicting-features",
                f"schedule {request.name!r} leaves microbatches in flight between steps, which offload, recomputation, "
                f"vocabulary parallelism and profiles do not know; pass {off}",
            )
    if UPDATE_EVERY in request.options:
        raise UnsupportedError(
            "has-own-flag",
            f"{UPDATE_EVERY} of schedule {request.name!r} is the number of microbatches of a step here; drop the option and "
            "choose --global-batch-size",
        )


def _algorithm(barriers: int) -> int:
    return next(algorithm for algorithm, count in BARRIERS_OF_ALGORITHM.items() if count == barriers)
