"""Schedules that a search makes for the memory cap and the costs of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.agreement import decided_by_rank_zero
from megatron_pipemem.mcore.asynchronous.source import AsynchronousSource
from megatron_pipemem.mcore.offload_source import OffloadSource
from megatron_pipemem.mcore.offloading import Offloading
from megatron_pipemem.mcore.sources import (
    FILE_SUFFIX,
    Changes,
    FamilySource,
    FileSource,
    Plan,
    Shape,
    Source,
    microbatches_of_the_run,
    with_messages,
)
from megatron_pipemem.mcore.vocabulary.source import OFF, VocabularySource, check_vocab_parallel
from megatron_pipemem.schedule.action import VOCABULARY, Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.memory_cap import MemoryCap, format_bytes, parse_caps
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.plain import serial_schedule
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.search import SearchResult, search_schedule
from megatron_pipemem.schedule.search.cache import ResultCache
from megatron_pipemem.schedule.simulator import held_after, peaks
from megatron_pipemem.schedule.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.vocabulary.search import search_vocabulary

logger = logging.getLogger(__name__)

AUTO = "auto"
PROFILE = "profile"

_CAP_TOLERANCE = 1e-9
_SEARCHES_FOR_A_CAP = 4
_SECONDS = 10.0


class _Found(NamedTuple):
    """What world rank 0 tells the others."""

    csv: str
    lower_bound: float
    seconds: float


class SearchSource(Source):
    """The fastest schedules that a search finds within a memory cap, for the costs known so far.

    World rank 0 searches and the others take over what it found. The placement is chosen when the model is built, because
    layers cannot move afterwards; all later searches keep it.

    Args:
        memory_cap: ``None`` for no limit. With a cap in bytes and costs without bytes, the first step runs one microbatch
            after another, which holds least, so that its bytes can be counted.
        costs: what to search for.
        priced_by: where ``costs`` are from.
        options: ``placement`` (``v``, ``interleaved`` or ``linear``; default the one that the search likes best), ``chunks``
            (model chunks per rank, default 2), ``seconds`` (time of one search, default 10), ``seed``.

    Attributes:
        choose_among: ``choose_among(placements, num_microbatches)`` is the one of the placements to build the model for: that
            of the fastest schedule, unless who plans with this source's schedules has another in mind.

    Raises:
        UnsupportedError: an unknown option or value.
    """

    may_split = True

    def __init__(self, memory_cap: MemoryCap | None, costs: Costs, priced_by: str, options: Mapping[str, object]):
        super().__init__(AUTO, costs, priced_by)
        unknown = sorted(set(options) - {"placement", "chunks", "seconds", "seed"})
        if unknown:
            raise UnsupportedError(
                f"schedule 'auto' has no option {unknown[0]!r}; its options: placement, chunks, seconds, seed"
            )
        self._kind = options.get("placement")
        if self._kind not in (None, "v", "interleaved", "linear"):
            raise UnsupportedError(f"placement {self._kind!r} is none of v, interleaved, linear")
        self.chunks = _number(options, "chunks", 1 if self._kind == "linear" else 2, int)
        self.seconds = _number(options, "seconds", _SECONDS, float)
        self._seed = _number(options, "seed", 0, int)
        self.is_round_robin = self._kind in ("interleaved", "linear") or self.chunks == 1
        self._cap = memory_cap
        self._in_bytes = memory_cap is not None and memory_cap.in_bytes
        self._changes: Changes | None = None
        self.choose_among = self._fastest
        self._chosen: dict[tuple[int, int], Placement] = {}
        # What the choice of the placement has found, on the rank that searches.
        self._answers: dict[tuple[Placement, int], _Found] = {}

    @property
    def needs_bytes(self) -> bool:
        return self._in_bytes and self._changes is None and self.costs.memory is None

    def measured(self, costs: Costs | None, changes: Changes | None) -> None:
        super().measured(costs, changes)
        self._answers.clear()
        if changes is not None:
            self._changes = changes

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        chosen = [placement for (devices, _), placement in self._chosen.items() if devices == num_devices]
        if chunks is None and chosen:
            return chosen[-1]
        key = (num_devices, chunks or self.chunks)
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def plan(self, shape: Shape, reason: str, before: Plan | None = None, minimum_gain: float = 0.0) -> Plan:
        placement = self.placement(shape.num_devices, shape.chunks)
        if self.needs_bytes:
            schedule = serial_schedule(placement, shape.num_microbatches, f"{AUTO} (counting bytes)")
            return Plan(schedule, self.costs, self.priced_by, "one microbatch at a time, to count bytes")
        self._check_cap(placement)
        result = decided_by_rank_zero(lambda: self._search(placement, shape.num_microbatches))
        schedule = Schedule.from_csv(result.csv, name=AUTO)
        costs = self._search_costs(placement)
        found = Plan(schedule, costs, self.priced_by, reason, result.lower_bound, result.seconds)
        if before is not None:
            kept = replace(found, schedule=before.schedule, reason=f"{reason}; no schedule is that much faster")
            if found.timeline.makespan > kept.timeline.makespan * (1 - minimum_gain):
                return kept
        return found

    def _choose(self, num_devices: int, chunks: int) -> Placement:
        if (chunks == 1) != (self._kind == "linear") and self._kind is not None:
            needed = "1 model chunk" if self._kind == "linear" else "at least 2 model chunks"
            raise UnsupportedError(
                f"placement {self._kind} needs {needed} per pipeline rank, not {chunks}; change "
                "--num-virtual-stages-per-pipeline-rank or --pipemem-option placement"
            )
        if chunks == 1:
            return Placement.linear(num_devices)
        candidates = {
            "v": Placement.wave(num_devices, chunks),
            "interleaved": Placement.interleaved(num_devices, chunks),
        }
        if self._kind is not None:
            return candidates[self._kind]
        chosen = self.choose_among(list(candidates.values()), microbatches_of_the_run() or 4 * num_devices)
        logger.info("placement %s for %d pipeline ranks with %d chunks each", chosen.name, num_devices, chunks)
        return chosen

    def _fastest(self, placements: Sequence[Placement], num_microbatches: int) -> Placement:
        """Raises:
        UnsupportedError: no schedule of any of the placements keeps the cap.
        """
        if self.needs_bytes:
            return placements[0]  # the same bytes on every device, so the most is made of a cap that is not yet known
        self._check_cap(placements[0])

        def index_of_fastest() -> int:
            result = self._search_within(self._cap and self._cap.amount, placements, num_microbatches)
            best = result.best.schedule
            if not self._in_bytes:
                found = _Found(best.to_csv(), result.best.lower_bound, result.seconds)
                self._answers[best.placement, num_microbatches] = found
            return placements.index(best.placement)

        return placements[decided_by_rank_zero(index_of_fastest)]

    def _search(self, placement: Placement, num_microbatches: int) -> _Found:
        """The fastest schedule whose whole program keeps the cap."""
        if (placement, num_microbatches) in self._answers:
            return self._answers[placement, num_microbatches]
        if not self._in_bytes:
            result = self._search_within(self._cap and self._cap.amount, [placement], num_microbatches)
            return _Found(result.schedule.to_csv(), result.lower_bound, result.seconds)
        # Messages are posted between the actions that a search knows, so some bytes come on top of what it counts.
        caps = allowed = self._cap.of(placement.num_devices)
        for _ in range(_SEARCHES_FOR_A_CAP):
            try:
                result = self._search_within(caps, [placement], num_microbatches)
            except UnsupportedError:
                break
            held = self._program_peaks(result.schedule)
            if all(peak <= cap for peak, cap in zip(held, allowed, strict=True)):
                return _Found(result.schedule.to_csv(), result.lower_bound, result.seconds)
            caps = [cap - max(0, peak - most) for cap, peak, most in zip(caps, held, allowed, strict=True)]
        serial = serial_schedule(placement, num_microbatches)
        return _Found(serial.to_csv(), lower_bound(placement, num_microbatches, self._search_costs(placement)), 0.0)

    def _search_within(
        self, memory_cap: float | Sequence[float] | None, placements: Sequence[Placement], num_microbatches: int
    ) -> SearchResult:
        search = partial(search_vocabulary, barriers=self.barriers) if self.barriers else search_schedule
        return search(
            num_devices=placements[0].num_devices,
            num_microbatches=num_microbatches,
            costs=self._search_costs(placements[0]),
            memory_cap=memory_cap,
            placements=placements,
            seconds=self.seconds,
            seed=self._seed,
            cache=ResultCache(),
        )

    def _search_costs(self, placement: Placement) -> Costs:
        """Seconds, and what counts against the cap: bytes, or activation units."""
        if not self._in_bytes:
            return replace(self.costs, memory=None)
        if self._changes is None:
            return self.costs
        memory = with_messages(self._changes, placement)
        # Of the vocabulary's passes and collectives every device has its own.
        memory |= {kind: self._changes[kind][: placement.num_devices] for kind in VOCABULARY & set(self._changes)}
        return replace(self.costs, memory=memory)

    def _program_peaks(self, schedule: Schedule) -> list[float]:
        """The most bytes every device holds, between messages too."""
        if self.barriers and not schedule.vocabulary:
            schedule = with_vocabulary(schedule, self.barriers, self.costs)
        changes = self._changes
        if changes is None:
            changes = self.costs.memory_changes(schedule.placement)
        elif Kind.B not in changes:
            changes = {**changes, Kind.B: tuple(map(sum, zip(changes[Kind.I], changes[Kind.W], strict=True)))}
        return [max(held_after(actions, changes), default=0) for actions in lower(schedule).actions]

    def _check_cap(self, placement: Placement) -> None:
        """Refuse a cap below what one microbatch alone holds.

        Raises:
            UnsupportedError: no schedule of this placement keeps the cap.
        """
        if self._cap is None:
            return
        serial = serial_schedule(placement, 1)
        held = self._program_peaks(serial) if self._in_bytes else peaks(serial.orders, placement, Costs())
        caps = self._cap.of(placement.num_devices)
        over = [device for device, cap in enumerate(caps) if held[device] > cap + _CAP_TOLERANCE]
        if not over:
            return
        worst = max(over, key=lambda device: held[device])
        needed = format_bytes(held[worst]) if self._in_bytes else f"{held[worst]:.4g}"
        raise UnsupportedError(
            f"no schedule keeps a memory cap of {self._cap}: pipeline rank {worst} holds {needed} for one "
            f"microbatch alone; raise --pipemem-memory-cap to at least {needed}, take smaller microbatches, or recompute "
            "activations"
        )


def source_of(
    schedule: str,
    memory_cap: float | str | None,
    costs: str,
    options: Mapping[str, object],
    offloading: Offloading | None = None,
    vocab_parallel: str = OFF,
) -> Source:
    """The source that settings of ``plugin.Settings`` ask for.

    Args:
        schedule: see there, as for the next three.
        memory_cap: a cap of the whole plan.
        costs: prices.
        options: of the schedule.
        offloading: what is to leave the device or to be computed again; ``None`` for nothing but what the schedule says.
        vocab_parallel: see ``plugin.Settings``.

    Raises:
        UnknownScheduleError: no such family.
        UnsupportedError: a cap, an option or a file that does not go with the schedule.
        CostsError: a file of costs that cannot be read.
    """
    check_vocab_parallel(vocab_parallel)
    if vocab_parallel != OFF and offloading is not None and offloading.settings.plans:
        raise UnsupportedError(
            "offload and recomputation are not planned together with vocabulary passes; pass --pipemem-vocab-parallel off, or "
            "--pipemem-offload off and --pipemem-recompute none with Megatron's own --recompute-* flags"
        )
    if schedule != AUTO and not schedule.endswith(FILE_SUFFIX) and family(schedule).asynchronous:
        _check_alone(schedule, costs, offloading, vocab_parallel)
    source = _source_without_vocabulary(schedule, memory_cap, costs, options, offloading)
    if vocab_parallel != OFF:
        # What a search finds keeps its cap already.
        units = None if memory_cap is None or schedule == AUTO else parse_caps(memory_cap).amount
        return VocabularySource(source, vocab_parallel, units)
    if source.barriers:
        raise UnsupportedError(
            f"{schedule} is a schedule for a vocabulary cut over the pipeline; pass --pipemem-vocab-parallel "
            f"{3 - source.barriers}"
        )
    return source


def _check_alone(schedule: str, costs: str, offloading: Offloading | None, vocab_parallel: str) -> None:
    """Raises:
    UnsupportedError: an asynchronous schedule is asked to go with something that plans a step as one that ends empty.
    """
    for asked, off in (
        (offloading is not None and offloading.settings.plans, "--pipemem-offload off and --pipemem-recompute none"),
        (vocab_parallel != OFF, "--pipemem-vocab-parallel off"),
        (costs == PROFILE, "--pipemem-costs unit or a file"),
    ):
        if asked:
            raise UnsupportedError(
                f"schedule {schedule!r} leaves microbatches in flight between steps, which offload, recomputation, "
                f"vocabulary parallelism and profiles do not know; pass {off}"
            )


def _source_without_vocabulary(
    schedule: str,
    memory_cap: float | str | None,
    costs: str,
    options: Mapping[str, object],
    offloading: Offloading | None,
) -> Source:
    cap = None if memory_cap is None else parse_caps(memory_cap)
    if offloading is None or not offloading.settings.plans:
        return _source_of(schedule, cap, costs, options)
    base = _source_of(schedule, None, costs, options)
    if not isinstance(base, SearchSource):
        return OffloadSource(base, offloading, cap)
    source = OffloadSource(base, offloading, cap, base.seconds)
    if source.searches:
        base.choose_among = source.fastest
    return source


def _source_of(schedule: str, cap: MemoryCap | None, costs: str, options: Mapping[str, object]) -> Source:
    prices, priced_by = prices_of(costs)
    if schedule == AUTO:
        return SearchSource(cap, prices, priced_by, options)
    if cap is not None and cap.in_bytes:
        raise UnsupportedError(
            f"a memory cap in bytes ({cap}) needs --pipemem-schedule auto, which fits a schedule to it, "
            f"or --pipemem-offload; {schedule!r} is what it is, so give the cap in activation units (1.0 is what 1F1B's "
            "first rank holds)"
        )
    units = None if cap is None else cap.amount
    if schedule.endswith(FILE_SUFFIX):
        if options:
            raise UnsupportedError(
                f"a schedule file has no options; drop --pipemem-option {next(iter(options))}={next(iter(options.values()))}"
            )
        return FileSource(schedule, units, prices, priced_by)
    kind = AsynchronousSource if family(schedule).asynchronous else FamilySource
    return kind(schedule, units, options, prices, priced_by)


def prices_of(costs: str) -> tuple[Costs, str]:
    """The costs that a run begins with, and where they are from.

    Raises:
        CostsError: a file that cannot be read.
    """
    return (Costs(), "unit") if costs in ("unit", PROFILE) else (Costs.from_json(costs), "file")


def _number(options: Mapping[str, object], name: str, default: float, kind: type):
    try:
        value = kind(options.get(name, default))
    except (TypeError, ValueError):
        value = -1
    if value < 0 or (name != "seed" and value == 0):
        raise UnsupportedError(f"option {name}={options[name]!r} of schedule 'auto' is no positive number")
    return value
