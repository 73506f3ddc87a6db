"""Schedules that a search makes for the memory cap and the costs of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.agreement import decided_by_rank_zero, tell
from megatron_pipemem.mcore.asynchronous.source import AsynchronousSource
from megatron_pipemem.mcore.offload_source import OffloadSource
from megatron_pipemem.mcore.sources import (
    ONE_BY_ONE,
    FamilySource,
    FileSource,
    MemoryDeltas,
    Plan,
    Shape,
    Source,
    microbatches_of_the_run,
    with_messages,
)
from megatron_pipemem.mcore.step.offloading import Offloading
from megatron_pipemem.mcore.vocabulary.source import VocabularySource, check_vocab_parallel
from megatron_pipemem.schedule.core.action import VOCABULARY, Kind
from megatron_pipemem.schedule.core.bounds import lower_bound
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import MemoryCap, format_bytes, loosened, parse_caps
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Order, Schedule
from megatron_pipemem.schedule.core.simulator import held_after, peaks
from megatron_pipemem.schedule.families.serial_orders import serial_schedule
from megatron_pipemem.schedule.features.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.features.vocabulary.search import search_vocabulary
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.options import AUTO, OFF, searched_placements
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.request import (
    FILE_SUFFIX,
    check_barriers,
    check_request,
    check_search_options,
    prices_of,
)
from megatron_pipemem.schedule.search import SearchResult, search_schedule
from megatron_pipemem.schedule.search.cache import ResultCache
from megatron_pipemem.schedule.search.problem import better_full

logger = logging.getLogger(__name__)

_SEARCHES_FOR_A_CAP = 4
_SECONDS = 10.0


class _Found(NamedTuple):
    """What world rank 0 tells the others."""

    csv: str
    lower_bound: float
    seconds: float
    notes: str = ""


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
        check_search_options(options)
        self._kind = options.get("placement")
        self._asked_chunks = options.get("chunks")
        self.chunks = searched_placements(1, self._kind, self._asked_chunks)[0].num_chunks
        self.seconds, self._seed = options.get("seconds", _SECONDS), options.get("seed", 0)
        self.is_round_robin = self._kind in ("interleaved", "linear") or self.chunks == 1
        self._cap = memory_cap
        self._in_bytes = memory_cap is not None and memory_cap.in_bytes
        self._changes: MemoryDeltas | None = None
        self.choose_among = self._fastest
        self._chosen: dict[tuple[int, int], Placement] = {}
        # What the choice of the placement has found, on the rank that searches.
        self._answers: dict[tuple[Placement, int, int], _Found] = {}

    @property
    def needs_bytes(self) -> bool:
        return self._in_bytes and self._changes is None and self.costs.memory is None

    def measured(self, costs: Costs | None, changes: MemoryDeltas | None) -> None:
        super().measured(costs, changes)
        self._answers.clear()
        if changes is not None:
            self._changes = changes

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        chosen = [placement for (devices, _), placement in self._chosen.items() if devices == num_devices]
        if chunks is None and chosen:
            return chosen[-1]
        if None not in (chunks, self._asked_chunks) and chunks != self._asked_chunks:
            raise UnsupportedError(
                f"the option chunks={self._asked_chunks} of schedule {AUTO} asks for {self._asked_chunks} model chunks per "
                f"pipeline rank, and the model has {chunks}; leave the option out, or cut the model accordingly "
                "(--num-virtual-stages-per-pipeline-rank)"
            )
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
        found = Plan(schedule, costs, self.priced_by, reason, result.lower_bound, result.seconds, result.notes)
        return self._if_faster(found, before, minimum_gain)

    def likely(self, shape: Shape) -> Schedule:
        if not self.needs_bytes:
            return super().likely(shape)
        # Nobody knows yet how much of it the cap will allow.
        placement = self.placement(shape.num_devices, shape.chunks)
        result = decided_by_rank_zero(lambda: _found(self._search_within(None, [placement], shape.num_microbatches)))
        return Schedule.from_csv(result.csv, name=AUTO)

    def _choose(self, num_devices: int, chunks: int) -> Placement:
        candidates = searched_placements(num_devices, self._kind, chunks)
        if len(candidates) == 1:
            return candidates[0]
        chosen = self.choose_among(candidates, microbatches_of_the_run() or 4 * num_devices)
        tell(logger, "placement %s for %d pipeline ranks with %d chunks each", chosen.name, num_devices, chunks)
        return chosen

    def _fastest(self, placements: Sequence[Placement], num_microbatches: int) -> Placement:
        """Raises:
        UnsupportedError: no schedule of any of the placements keeps the cap.
        """
        if self.needs_bytes:
            return placements[0]  # a V: the same bytes on every device, so the most is made of a cap not yet known
        self._check_cap(placements[0])

        def index_of_fastest() -> int:
            result = self._search_within(self._cap and self._cap.amount, placements, num_microbatches)
            best = result.best.schedule.placement
            if not self._in_bytes:
                self._answers[best, num_microbatches, self.barriers] = _found(result)
            return placements.index(best)

        return placements[decided_by_rank_zero(index_of_fastest)]

    def _search(self, placement: Placement, num_microbatches: int) -> _Found:
        """The fastest schedule whose whole program keeps the cap."""
        key = placement, num_microbatches, self.barriers
        if key in self._answers:
            return self._answers[key]
        if not self._in_bytes:
            result = self._search_within(self._cap and self._cap.amount, [placement], num_microbatches)
            return _found(result)
        # Messages are posted between the actions that a search knows, so some bytes come on top of what it counts.
        caps = allowed = self._cap.of(placement.num_devices)
        why = f"{_SEARCHES_FOR_A_CAP} searches found schedules that exceed it with their messages"
        seconds = 0.0
        for _ in range(_SEARCHES_FOR_A_CAP):
            try:
                result = self._search_within(caps, [placement], num_microbatches)
            except UnsupportedError as error:
                why = str(error)
                break
            seconds += result.seconds
            held = self._program_peaks(result.schedule)
            if all(peak <= cap for peak, cap in zip(held, allowed, strict=True)):
                return _found(result)._replace(seconds=seconds)
            caps = [cap - max(0, peak - most) for cap, peak, most in zip(caps, held, allowed, strict=True)]
        logger.warning("memory cap of %s: %s (%s)", self._cap, ONE_BY_ONE, why)
        costs = self._search_costs(placement)
        serial = serial_schedule(placement, num_microbatches, full=better_full(placement, costs))
        bound = lower_bound(placement, num_microbatches, costs)
        return _Found(serial.to_csv(), bound, seconds, ONE_BY_ONE)

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
        if self.barriers and not schedule.vocabulary_barriers:
            schedule = with_vocabulary(schedule, self.barriers, self.costs)
        changes = self._changes
        if changes is None:
            changes = self.costs.memory_changes(schedule.placement)
        elif Kind.B not in changes:
            changes = {**changes, Kind.B: tuple(map(sum, zip(changes[Kind.I], changes[Kind.W], strict=True)))}
        return [max(held_after(actions, changes), default=0) for actions in self._lowered(schedule)]

    def _lowered(self, schedule: Schedule) -> tuple[Order, ...]:
        return lower(schedule, single_queue=self.single_queue, costs=self.costs).actions

    def _check_cap(self, placement: Placement) -> None:
        """Refuse a cap below what one microbatch alone holds.

        Raises:
            UnsupportedError: no schedule of this placement keeps the cap.
        """
        if self._cap is None:
            return
        serial = serial_schedule(placement, 1, full=better_full(placement, self._search_costs(placement)))
        held = self._program_peaks(serial) if self._in_bytes else peaks(serial.orders, placement, Costs())
        caps = self._cap.of(placement.num_devices)
        over = [device for device, cap in enumerate(caps) if held[device] > loosened(cap)]
        if not over:
            return
        worst = max(over, key=lambda device: held[device])
        needed = format_bytes(held[worst]) if self._in_bytes else f"{held[worst]:.4g}"
        raise UnsupportedError(
            f"no schedule keeps a memory cap of {self._cap}: pipeline rank {worst} holds {needed} for one "
            f"microbatch alone; raise --pipemem-memory-cap to at least {needed}, take smaller microbatches, or recompute "
            "activations"
        )


def _found(result: SearchResult) -> _Found:
    """The bound of the placement that the model then has, also where others were tried."""
    return _Found(result.schedule.to_csv(), result.best.lower_bound, result.seconds)


def source_of(
    schedule: str,
    memory_cap: float | str | None,
    costs: str,
    options: Mapping[str, object],
    offloading: Offloading | None = None,
    vocab_parallel: str = OFF,
    vocab_piece_tokens: int | None = None,
) -> Source:
    """The source that settings of ``plugin.Settings`` ask for.

    Args:
        schedule: see there, as for the next three.
        memory_cap: a cap of the whole plan.
        costs: prices.
        options: of the schedule.
        offloading: what is to leave the device or to be computed again; ``None`` for nothing but what the schedule says.
        vocab_parallel: see ``plugin.Settings``.
        vocab_piece_tokens: see there.

    Raises:
        UnknownScheduleError: no such family.
        UnsupportedError: a cap, an option or a file that does not go with the schedule.
        CostsError: a file of costs that cannot be read.
    """
    check_vocab_parallel(vocab_parallel, vocab_piece_tokens)
    plans_offload = offloading is not None and offloading.settings.plans
    check_request(schedule, memory_cap, costs, options, plans_offload, vocab_parallel)
    source = _source_without_vocabulary(schedule, memory_cap, costs, options, offloading)
    check_barriers(schedule, source.barriers, vocab_parallel)
    if vocab_parallel != OFF:
        # What a search finds keeps its cap already.
        units = None if memory_cap is None or schedule == AUTO else parse_caps(memory_cap).amount
        return VocabularySource(source, vocab_parallel, units, vocab_piece_tokens)
    return source


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
    units = None if cap is None else cap.amount
    if schedule.endswith(FILE_SUFFIX):
        return FileSource(schedule, units, prices, priced_by)
    kind = AsynchronousSource if family(schedule).asynchronous else FamilySource
    return kind(schedule, units, options, prices, priced_by)
