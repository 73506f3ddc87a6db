"""Simulate changes of a run with its own measured times: other schedules, other layers per stage, offload, and more.

Every change is simulated alone, and compared with the run's own schedule, simulated with the same times. Other
divisions of the layers are priced by the layers of the measured step. Middle stages have only layers, so they give the
time of a layer. The rest of the first and the last stage is embedding and head, which stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import ASSUMED_RATIO, Knowledge, Shape, action_memory, pass_memory
from megatron_pipemem.errors import PipememError
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.features.vocabulary.orders import with_barriers
from megatron_pipemem.model import layout
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import MEMORY, PLAIN, RECOMPUTE, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.display import doing
from megatron_pipemem.schedule.measured import MeasuredStep
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import PartPrices, even_layers
from megatron_pipemem.schedule.registry import megatrons_own, synchronous_families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Measured, Timeline, simulate
from megatron_pipemem.schedule.stream import stream
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM, VocabularyCosts
from megatron_pipemem.tools.planner.replay import family_options, family_schedule

_PIECES = 12
"""The number of pieces of a stage whose layers are unknown, so that 2, 3 or 4 stages can share them."""


def _parts_of(values: Sequence[float], counts: Sequence[int], least: float = -inf) -> PartPrices:
    """Split measured values of stages into values of their layers, and the rest of the first and the last stage.

    ``values`` has a value per stage, and ``counts`` the number of layers per stage. A layer of a middle stage has the
    mean of its stage. A layer of the first or last stage has the median of the middle stages, but no more than the mean
    of its own stage. The rest is at least ``least``.
    """
    each = [value / count for value, count in zip(values, counts, strict=True) if count]
    inner = [value / count for value, count in zip(values[1:-1], counts[1:-1], strict=True) if count]
    usual = median(inner) if inner else min(each, key=abs, default=0.0)
    prices, ends = [], [0.0, 0.0]
    for stage, (value, count) in enumerate(zip(values, counts, strict=True)):
        is_end = stage in (0, len(values) - 1)
        price = min(usual, value / count, key=abs) if is_end and count else usual if is_end else value / max(count, 1)
        prices += [price] * count
        if is_end:
            ends[stage > 0] = max(least, value - price * count)
    return PartPrices(tuple(prices), first=ends[0], last=ends[1])


WORTH = 0.01
"""The least gain of a change that is shown, as a fraction of the step: the accuracy of measured times."""
SAME_MEMORY, MORE_MEMORY, OFFLOAD = "schedule", "schedule with more memory", "schedule with offload"
_ORDERS = (SAME_MEMORY, OFFLOAD, MORE_MEMORY)
"""Kinds of changes with a new order of actions, the simplest first."""
_CHUNKS = (2, 3, 4)
_ORDERING_SECONDS = 0.5
_LARGEST_SEARCH, _LARGEST_OFFLOAD = 20_000, 8_000  # actions of a step


@dataclass(frozen=True)
class Change:
    """One change of a run, with its predicted seconds and peak memory."""

    kind: str  # of the change; best_changes returns at most one per kind
    what: str  # the change in words
    flags: str  # the flags that make it; empty if there are none
    seconds: float  # of the pipeline's step with the change
    peak: float  # peak memory of a device with the change, in the unit of ``Case.in_bytes``
    note: str = ""  # assumptions
    effort: int = 0  # among about equally fast changes the least is offered: twice the chunks, plus 1 for a search


@dataclass(frozen=True)
class Case:
    """The measured step of a run, and other facts of the run that changes depend on."""

    step: MeasuredStep
    layers: tuple[int, ...] | None = None  # of every stage; ``None`` if unknown
    memory: Mapping[Kind, tuple[float, ...]] | None = None
    """By kind of action, the change of the device's bytes, one value per stage and slice. ``None``: activation units."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Changes that the run's configuration excludes, by name, with the reason (``mcore.report.run_report``)."""
    ordered: bool = False  # whether its microbatches are already ordered by their costs
    outside: float = 0.0  # seconds of a training step outside the pipeline: optimizer, reductions, logging
    mtp_layers: int = 0  # of multi-token prediction, which stay on the last stage
    is_stock: bool = False  # whether Megatron's own schedule ran, so that flags of ours must name a schedule
    search_seconds: float = 2.0  # for each search of an order; 0 for none
    bubble_rate: float | None = None  # of the run; ``None`` to take the rate of the step
    bytes_of_1f1b: float | None = None  # the peak of 1F1B for the model; ``None`` if it is unknown
    held: tuple[tuple[int, ...], ...] | None = None  # counted bytes per device after every pass of the step
    peaks: tuple[int, ...] = ()  # the most bytes counted per device, messages included; empty without ``held``

    @property
    def schedule(self) -> Schedule:
        return self.step.schedule

    @property
    def in_bytes(self) -> bool:
        return self.memory is not None

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The layers of every stage of one replica; 12 equal pieces for each if the layers are unknown."""
        return (self.layers or (_PIECES,) * self.schedule.num_stages)[: self.schedule.placement.model_stages]

    @cached_property
    def measured(self) -> Costs:
        """The measured costs of layers, embedding and head (``PartPrices``), of messages, and of vocabulary passes."""
        stages, placement = len(self.counts), self.schedule.placement
        seconds, costs, memory = self.step.of_stages(), self.step.costs(), None
        if self.memory is not None:
            memory = {kind: _parts_of(each[:stages], self.counts) for kind, each in pass_memory(self.memory).items()}
        forward, inputs, weights = (
            _parts_of(seconds[kind][:stages], self.counts, 0.0) for kind in (Kind.F, Kind.I, Kind.W)
        )
        found = Costs(
            forward,
            inputs,
            weights,
            costs.p2p,
            memory,
            vocabulary=costs.vocabulary,
            microbatch=costs.microbatch,
        )
        if not costs.have_exchanges:
            return found
        apart = costs.exchange_seconds(placement)
        there, back = (_parts_of(apart[kind][:stages], self.counts, 0.0) for kind in (Kind.F, Kind.I))
        return replace(found, forward_exchange=there, backward_exchange=back)

    @property
    def passes(self) -> PartPrices:
        """The measured seconds of F, I and W together, of layers, embedding and head."""
        found = self.measured.part_prices
        assert found is not None, "all three are prices of parts"
        return found

    @cached_property
    def own(self) -> Timeline:
        """The timeline of the run's own schedule, simulated with its measured times."""
        memory = None if self.memory is None else action_memory(self.memory, self.schedule.slices)
        return simulate(self.schedule, self.step.costs(memory))

    @property
    def as_ran(self) -> Timeline:
        """The timeline of the measured step, with the run's bubble rate and counted bytes."""
        measured = Measured(self.bubble_rate, self.held, self.bytes_of_1f1b, bool(self.peaks))
        timeline = replace(self.step.timeline(self.own.costs), measured=measured)
        return replace(timeline, peaks=self.peaks) if self.peaks else timeline

    @property
    def as_planned(self) -> Timeline:
        """``own`` with the counted peaks of the run, for pictures beside ``as_ran``."""
        if not (self.in_bytes and self.peaks):
            return self.own
        measured = Measured(bytes_of_1f1b=self.bytes_of_1f1b, has_counted_peaks=True)
        return replace(self.own, peaks=self.peaks, measured=measured)

    @property
    def cap(self) -> str:
        """The simulated peak of the run as a value of ``--pipemem-memory-cap``, in bytes or in activation units."""
        return f"{self.own.peak:.0f}B" if self.in_bytes else f"{self.own.peak:.4g}"

    def flags(self, *flags: str) -> str:
        """Return these flags as one text.

        For a run with Megatron's own schedule, add ``--pipemem-schedule`` with our schedule of the same order.
        """
        stock = megatrons_own(self.schedule.placement.num_chunks)
        ours = f"--pipemem-schedule {stock}" if self.is_stock else ""
        return " ".join(filter(None, (ours, *flags)))

    def cut(self, placement: Placement, with_ends: bool = True) -> tuple[int, ...]:
        """Return the number of layers of every stage of a placement, balanced by the measured times.

        Without ``with_ends``, the times of embedding and head are left out. If the run's layers are unknown, return
        equal numbers of pieces.
        """
        if self.layers is None:
            return even_layers(sum(self.counts), placement.num_stages)
        from megatron_pipemem.model.partition import Loads, partition  # numpy takes a while to load

        passes = self.passes
        ends = (passes.embedding, passes.head) if with_ends else (0.0, 0.0)
        return partition(Loads(passes.layers, *ends), placement)

    def layout_flag(self, counts: tuple[int, ...]) -> str:
        """Return Megatron's flag for these layers per stage.

        The text is empty if the numbers are equal, or if the run's layers are unknown.
        """
        if self.layers is None or len(set(counts)) == 1:
            return ""
        slices = (*counts[:-1], counts[-1] + bool(self.mtp_layers))
        return f'--{layout.FLAG} "{layout.written(slices, self.mtp_layers)}"'


def best_changes(case: Case) -> list[Change]:
    """Return the best change of every kind that saves at least ``WORTH`` of the step.

    Changes that need no more memory than the run come first, then the fastest. A new order is left out if a
    simpler kind (``_ORDERS``) saves about as much. There are no changes for schedules with replicas, asynchronous
    updates or slices.
    """
    if case.schedule.placement.replicas > 1 or case.schedule.updates is not None or case.schedule.slices > 1:
        return []
    by_kind: dict[str, list[Change]] = {}
    for change in _all(case):
        by_kind.setdefault(change.kind, []).append(change)
    worth = case.own.makespan * (1 - WORTH)
    best = map(_best, by_kind.values())
    found = sorted((each for each in best if each.seconds <= worth), key=lambda each: each.seconds)
    # Among new orders, keep one only if it gains more than every simpler one.
    kept: list[Change] = []
    for each in found:
        simpler = _ORDERS[: _ORDERS.index(each.kind)] if each.kind in _ORDERS else ()
        if all(each.seconds <= other.seconds * (1 - WORTH) for other in found if other.kind in simpler):
            kept.append(each)
    return sorted(kept, key=lambda each: (each.peak > loosened(case.own.peak), each.seconds))


def _best(changes: list[Change]) -> Change:
    """Return the simplest of the changes that are at most ``WORTH`` slower than the fastest."""
    enough = min(each.seconds for each in changes) * (1 + WORTH)
    return min((each for each in changes if each.seconds <= enough), key=lambda each: (each.effort, each.seconds))


def _all(case: Case) -> Iterator[Change]:
    """Yield every change that the run's configuration allows; if it refuses other schedules, only other layers."""
    yield from _layouts(case)
    if "schedules" in case.refused:
        return
    with doing("simulating other schedules"):
        orders = [_order(case, *found) for found in _orders(case)]
    yield from (change for change, _ in orders)
    yield from _offloads(case, orders)
    yield from _without(case)
    yield from _vocabularies(case)
    yield from _ordered(case)


def _layouts(case: Case) -> Iterator[Change]:
    """Yield the run's schedule with other layers per stage, balanced by the measured times of layers.

    Yield nothing if the layers are unknown or balanced already, or if the run recomputes, offloads or cuts the
    vocabulary.
    """
    placement = case.schedule.placement
    if case.layers is None or _is_extended(case.schedule):
        return
    counts = case.cut(placement)
    if counts != case.layers:
        timeline = simulate(case.schedule, case.measured.with_parts(cut=counts))
        words = f"other layers per stage: {', '.join(map(str, counts))} in place of {', '.join(map(str, case.layers))}"
        yield Change("layout", words, case.layout_flag(counts), timeline.makespan, timeline.peak)


def _orders(case: Case) -> Iterator[tuple[str, Schedule, Costs, tuple[int, ...]]]:
    """Yield name, schedule, costs and layers of possible families, and of orders searched within the run's peak memory.

    The run's own order is left out. So are families with ``outclassed_by`` and those that are asynchronous, offload, or have
    slices or replicas. Long steps are not searched.
    """
    own, p, m = case.schedule, case.schedule.num_devices, case.schedule.num_microbatches
    barriers = own.vocabulary_barriers
    for each in synchronous_families():
        if each.outclassed_by and not (own.pairs and each.has_room_for_pairs):
            continue
        if (
            p < each.min_devices
            or m < each.fewest_microbatches(p)
            or (each.splits_backward and "split" in case.refused)
        ):
            continue
        for chunks in _CHUNKS if "chunks" in each.options else (None,):
            with suppress(PipememError):
                placement = each.placement_on(p, family_options(chunks))
                if _may_place(case, placement, each.name):
                    costs, counts = _cut_for(case, placement)
                    schedule = with_barriers(family_schedule(each.name, p, m, chunks, costs), barriers, costs)
                    if own.pairs:
                        schedule = with_pairs(schedule, costs).schedule
                    if (schedule.placement.devices, schedule.orders) != (own.placement.devices, own.orders):
                        yield each.name, schedule, costs, counts
    if case.search_seconds > 0 and 3 * m * 2 * p <= _LARGEST_SEARCH and "split" not in case.refused:
        for placement in {own.placement, Placement.v_shape(p)}:
            if _may_place(case, placement, AUTO):
                costs, counts = _cut_for(case, placement)
                cap = MemoryCap(case.own.peak, case.in_bytes)
                request = Request.for_search(cap, {"seconds": case.search_seconds}, barriers)
                request = replace(request, pairs=bool(own.pairs))
                with suppress(PipememError):
                    found = choose(
                        request, Shape(p, None, m), Knowledge(replace(costs, microbatch=None), placement=placement)
                    )
                    yield AUTO, found.schedule, costs, counts


def _order(
    case: Case, name: str, schedule: Schedule, costs: Costs, counts: tuple[int, ...]
) -> tuple[Change, tuple[Schedule, Costs]]:
    timeline, placement = simulate(schedule, costs), schedule.placement
    flags = [f"--pipemem-schedule {name}"]
    if name == AUTO:
        flags += [f"--pipemem-memory-cap {case.cap}", "--pipemem-costs profile"]
        flags.append(f"--pipemem-option placement={placement.name}")
    if placement.num_chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {placement.num_chunks}")
    flags.append(case.layout_flag(counts))
    count = placement.num_chunks
    differs = count != case.schedule.placement.num_chunks
    chunks = f", {count} chunk{'s' * (count > 1)} per rank" if count > 1 or differs else ""
    words = f"schedule {name}{chunks}{' in a V' if placement.name == 'v' else ''}"
    split = schedule.splits_backward and case.step.splits_fused
    note = (
        "the run did not split its backward: the times of I and W are parts of its time, and all bytes that F keeps "
        "are assumed to wait for W"
        if split
        else ""
    )
    kind = SAME_MEMORY if timeline.peak <= loosened(case.own.peak) else MORE_MEMORY
    effort = 2 * placement.num_chunks + (name == AUTO)
    change = Change(kind, words, " ".join(filter(None, flags)), timeline.makespan, timeline.peak, note, effort)
    return change, (schedule, costs)


def _offloads(case: Case, orders: list[tuple[Change, tuple[Schedule, Costs]]]) -> Iterator[Change]:
    """Yield the fastest schedule that needs more memory than the run, offloaded until it needs no more.

    ``orders`` has the simulated orders, each as a change with its schedule and costs. At most one change is yielded,
    and none if the step is long, or if the run recomputes, offloads or cuts the vocabulary.
    """
    faster = [each for each in orders if each[0].kind == MORE_MEMORY]
    if not faster or _is_extended(case.schedule) or "offload" in case.refused:
        return
    fastest, (schedule, costs) = min(faster, key=lambda each: each[0].seconds)
    if sum(map(len, schedule.orders)) > _LARGEST_OFFLOAD:
        return
    costs = replace(costs, channel=Channel.of_ratio(ASSUMED_RATIO, costs))
    request = Request.for_order(schedule, MemoryCap(case.own.peak, case.in_bytes))
    shape = Shape(schedule.num_devices, None, schedule.num_microbatches)
    with suppress(PipememError), doing(f"planning the offload of {schedule.name}"):
        timeline = choose(request, shape, Knowledge(costs)).timeline
        flags = f"{fastest.flags} --pipemem-offload auto --pipemem-memory-cap {case.cap}"
        note = "copies to the host and back are assumed to take as long as computing with the copied activations"
        yield Change(
            OFFLOAD,
            f"{fastest.what}, with the excess of its activations on the host",
            flags,
            timeline.makespan,
            timeline.peak,
            note,
        )


def _without(case: Case) -> Iterator[Change]:
    """Yield up to three changes: no recomputation, no offload, and no barrier between steps.

    The first two are for runs that recompute or offload, and the third for runs whose configuration allows it.
    """
    schedule, costs = case.schedule, case.own.costs
    for kind, dropped, words, flags in (
        ("recompute", RECOMPUTE, "nothing recomputed", "--pipemem-recompute none"),
        ("offload", MEMORY, "nothing offloaded", "--pipemem-offload off"),
    ):
        orders = tuple(tuple(action for action in order if action.kind not in dropped) for order in schedule.orders)
        if orders != schedule.orders:
            with suppress(PipememError):
                timeline = simulate(replace(schedule, orders=orders), costs)
                yield Change(kind, words, flags, timeline.makespan, timeline.peak)
    if "overlap" in case.refused:
        return
    with suppress(PipememError):
        found = stream(schedule, costs, [case.outside] * schedule.num_devices)
        seconds = case.own.makespan - (found.synchronous - found.period)
        words, flags = "steps without a barrier between them", case.flags("--pipemem-overlap-steps")
        yield Change("no barrier", words, flags, seconds, case.own.peak)


def _vocabularies(case: Case) -> Iterator[Change]:
    """Yield the run's schedule with embedding and head cut over all devices, once for each algorithm.

    Yield nothing if the configuration refuses it, if the head takes no time, or if the run recomputes, offloads or cuts
    the vocabulary already.
    """
    whole, placement = case.passes, case.schedule.placement
    if "vocabulary" in case.refused or _is_extended(case.schedule) or whole.head <= 0:
        return
    counts = case.counts if case.layers is None else case.cut(placement, with_ends=False)
    costs = case.measured.with_parts(cut=counts, first=0.0, last=0.0)
    message = max(case.step.p2p().values(), default=0.0)
    for algorithm, barriers in BARRIERS_OF_ALGORITHM.items():
        with suppress(PipememError):
            passes = VocabularyCosts.of_head(
                whole.head, placement.num_devices, barriers, embedding=whole.embedding, collectives=message
            )
            priced = replace(costs, vocabulary=passes, microbatch=None)
            timeline = simulate(with_barriers(case.schedule, barriers, priced), priced)
            flags = case.flags(f"--pipemem-vocab-parallel {algorithm}", case.layout_flag(counts))
            note = "a collective is assumed to take as long as a message, and the shards' logits are not counted"
            words = "embedding and head cut over all ranks"
            yield Change("vocabulary", words, flags, timeline.makespan, timeline.peak, note)


def _ordered(case: Case) -> Iterator[Change]:
    """Yield the run's schedule with microbatches ordered by their costs, if these differ and are not ordered yet."""
    if case.ordered or case.own.costs.microbatch is None:
        return
    from megatron_pipemem.search.step_plan import plan_step  # only here, because numpy takes long to load

    with suppress(PipememError):
        plan = plan_step(case.schedule, case.own.costs, seconds=_ORDERING_SECONDS)
        words, flags = "microbatches ordered by their costs", case.flags("--pipemem-microbatch-costs FLOPs")
        yield Change("microbatches", words, flags, plan.makespan, case.own.peak)


def _cut_for(case: Case, placement: Placement) -> tuple[Costs, tuple[int, ...]]:
    """Return costs and layers per stage for a placement: the run's layers if it has as many stages, else balanced ones."""
    counts = case.counts if placement.num_stages == len(case.counts) else case.cut(placement)
    return case.measured.with_parts(cut=counts), counts


def _may_place(case: Case, placement: Placement, name: str) -> bool:
    """Return whether the run's configuration and its number of layers allow a placement for the schedule ``name``.

    Placements with replicas of the model are not allowed.
    """
    if placement.replicas > 1 or (case.layers is not None and placement.num_stages > sum(case.layers) + 2):
        return False
    if placement.num_chunks > 1 and name != megatrons_own(placement.num_chunks) and "reordered" in case.refused:
        return False
    return placement.is_round_robin or "v" not in case.refused


def _is_extended(schedule: Schedule) -> bool:
    """Return whether a schedule has other actions than forwards and backwards, such as recomputation or offload."""
    return any(action.kind not in PLAIN for order in schedule.orders for action in order)
