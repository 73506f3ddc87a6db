"""Choose the schedule for a request: ``choose`` is the only way from a request to a schedule.

Rank 0 of a run calls it, and calls it again when the run has measured more. The command line and the planner call it,
too. The search is imported only if a request needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from megatron_pipemem.choose.knowledge import Choice, Knowledge, Shape
from megatron_pipemem.conflicts import check_conflicts
from megatron_pipemem.errors import PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.options import SEARCH_SECONDS
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, family, synchronous_schedules
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.schedule.vocabulary import BARRIERS

EARLIER_WEIGHTS = (
    "W run earlier than in the schedule as published, because a rank would otherwise hold more bytes than any rank under "
    "1f1b; --pipemem-early-wgrad none changes it"
)
"""The note on a schedule whose W have moved (``with_earlier_weights``)."""

_SHARE_ALONE = 0.25
"""The share of a search's time for orders without pairs, if the request has pairs."""


def choose(request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
    """Return the schedule for a request. It is proved, and keeps the memory cap (one in bytes only if bytes are known).

    If the cap or offload needs bytes that the run has not counted yet, the result is a schedule for a step that counts
    them. It runs one microbatch after another, because that needs the least memory.

    Raises:
        UnsupportedError: there is no such schedule, or none keeps the cap. The message has the memory that it needs.
        ScheduleError: a family has built an invalid schedule, or one whose passes exceed the cap.
        CostsError: the costs do not fit the schedule's placement.
    """
    check_conflicts(request)
    if (
        request.searches
        and request.may_cut
        and request.in_bytes
        and (knowledge.is_measuring or knowledge.counted_bytes is not None)
    ):
        raise UnsupportedError(
            "unit-mismatch",
            "a run counts the bytes of whole microbatches, not of slices; give the memory cap in activation units, or leave "
            "the option slices out",
        )
    if shape.forward_only:
        chosen = _forwards(request, shape, knowledge)
    elif request.searches or request.plans_offload or knowledge.lacks_bytes(request):
        chosen = _searched(_within(request, _SHARE_ALONE) if request.pairs else request, shape, knowledge)
    else:
        chosen = _built(request, shape, knowledge)
    if request.pairs and not shape.forward_only and not chosen.schedule.pairs:
        chosen = _with_pairs(chosen, request, shape, knowledge)
    return replace(chosen, priced_by=knowledge.priced_by)


def _within(request: Request, share: float) -> Request:
    """Return the request with a share of its time for searching."""
    if not request.searches:
        return request
    return replace(
        request, options={**request.options, "seconds": share * request.options.get("seconds", SEARCH_SECONDS)}
    )


def _with_pairs(chosen: Choice, request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
    """Return a copy of the choice with pairs: forwards that run together with a backward, where that is faster.

    Costs without exchanges get an assumed share of them. After a search, the orders of all candidates and families
    compete too, and the actions of the fastest are moved. The copy has no bound, which holds only without pairs, and no
    search results.
    """
    from megatron_pipemem.features.pairs import orders

    costs = chosen.costs if chosen.costs.have_exchanges else chosen.costs.with_exchanges(orders.ASSUMED_SHARE)
    counted = knowledge.counted_costs(chosen.schedule.placement, request.in_bytes)
    limited = request.memory_cap is not None and not (request.in_bytes and counted.memory is None)

    def excess(schedule: Schedule) -> tuple[float, ...]:
        return knowledge.excess(request, schedule, counted) if limited else ()

    def keeps_cap(schedule: Schedule) -> bool:
        return not any(excess(schedule))

    alone = [chosen.schedule]
    if chosen.search is not None:
        from megatron_pipemem.choose.searching import candidate_placements

        # The search does not know pairs, and orders that are slower without them may have more room for them.
        alone += [candidate.schedule for candidate in chosen.search.candidates]
        placements = candidate_placements(request, shape, knowledge)
        size = shape.num_devices, shape.num_microbatches
        chunks = max(placement.num_chunks for placement in placements)
        families = chain(*(synchronous_schedules(*size, prices, chunks) for prices in (costs, Costs())))
        alone += (schedule for schedule in families if schedule.placement in placements and orders.may_pair(schedule))
    paired = [orders.with_pairs(schedule, costs, keeps_cap) for schedule in filter(keeps_cap, alone)]
    travel = any(costs.exchange_shares(chosen.schedule.placement))
    if paired and chosen.search is not None and travel and costs.microbatch is None:
        caps, prices = request.caps(shape.num_devices) if limited else None, replace(costs, memory=counted.memory)
        from megatron_pipemem.choose import pairs  # only here, for few runs have pairs

        options = _within(request, 1 - _SHARE_ALONE).options
        limits = options["seconds"], options.get("effort", 1.0), options.get("seed", 0)
        paired.append(pairs.fastest_by_search(paired, prices, caps, excess, *limits))
    schedule = min(paired, key=lambda timeline: timeline.makespan).schedule if paired else chosen.schedule
    validate(schedule, microbatch_order=request.file is None)
    return replace(chosen, schedule=schedule, costs=costs, bound=None, search=None)


def vocabulary_ways[T](
    request: Request, chosen: Callable[[Request], T], refused: Callable[[int, PipememError], None]
) -> dict[int, T]:
    """Return the choice for every number of vocabulary barriers: 0 (no vocabulary passes), 1 and 2 are the keys.

    ``chosen(request)`` returns the choice for a request. If it raises a ScheduleError or UnsupportedError for 1 or 2
    barriers, ``refused`` is called with the number and the error, and the result lacks that number.
    """
    ways = {0: chosen(request.decided(0))}
    for barriers in BARRIERS:
        try:
            ways[barriers] = chosen(request.decided(barriers))
        except (ScheduleError, UnsupportedError) as error:
            refused(barriers, error)
    return ways


def with_barriers(schedule: Schedule, barriers: int, costs: Costs) -> Schedule:
    """Return the schedule with vocabulary passes that have 1 or 2 barriers; with 0 barriers the schedule itself."""
    if not barriers:
        return schedule
    from megatron_pipemem.features.vocabulary import orders

    return orders.with_barriers(schedule, barriers, costs)


def _searched(request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
    from megatron_pipemem.choose import searching  # only here, because it loads the search and offload planning

    if knowledge.lacks_bytes(request):
        return searching.choice_to_count_bytes(request, shape.num_microbatches, knowledge)
    if request.chooses_offload:
        return searching.with_chosen_offload(request, shape, knowledge)
    if request.plans_offload:
        # Activations on the host leave room for what waits.
        base = choose(request.without_offload(), shape, replace(knowledge, predicted_bytes=None))
        return searching.with_planned_offload(base.schedule, request, knowledge)
    return searching.fastest(request, shape, knowledge)


def _built(request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
    if request.file is not None:
        from megatron_pipemem.schedule.schedule_file import check_devices_of_file, check_microbatches_of_file

        check_devices_of_file(request.file, shape.num_devices)
        check_microbatches_of_file(request.file, shape.num_microbatches)
    alone, notes = request.file or _of_family(request, shape, knowledge), ""
    if request.file is None and not request.barriers and knowledge.predicted_bytes is not None:
        earlier = with_earlier_weights(alone, Costs(memory=knowledge.predicted_bytes))
        alone, notes = earlier, EARLIER_WEIGHTS if earlier is not alone else ""
    schedule = with_barriers(alone, request.barriers, knowledge.costs)
    if schedule is not request.file:  # files are proved when they are read
        counted = knowledge.counted_costs(schedule.placement, request.in_bytes)
        cap = None if request.memory_cap is None else request.memory_cap.amount
        validate(schedule, counted, cap, microbatch_order=request.file is None)
    return Choice(schedule, knowledge.costs, notes=notes)


def _of_family(request: Request, shape: Shape, knowledge: Knowledge) -> Schedule:
    """Build the schedule of the requested family."""
    options, accepted = dict(request.options), family(request.schedule).options
    # Replace the default of Megatron by our default, which copes better with an odd last group.
    group_size = None if shape.group_size == shape.num_devices else shape.group_size
    # Options of the user have priority. Without them Megatron's flags give the cut of the model.
    for option, value in (("chunks", shape.chunks), ("group_size", group_size)):
        if option in accepted and value is not None:
            options.setdefault(option, value)
    return build_schedule(
        request.schedule,
        num_devices=shape.num_devices,
        num_microbatches=shape.num_microbatches,
        memory_cap=request.cap_in_units,
        costs=knowledge.costs,
        **options,
    )


def _forwards(request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
    """Return the choice for an evaluation step: the forwards of the family's schedule, if it can be built."""
    bare, schedule = request.without_offload(), None
    if bare.family is not None:
        # The family may require numbers of microbatches that hold for training only.
        with suppress(UnsupportedError):
            schedule = _of_family(bare, shape, knowledge).forward_only()
    if schedule is None:
        assert knowledge.placement is not None, "the model has been built"
        name = f"{request.schedule} (forward only)"
        schedule = forward_schedule(knowledge.placement, shape.num_microbatches, name)
    return Choice(with_barriers(schedule, request.barriers, knowledge.costs), knowledge.costs)


def forward_schedule(placement: Placement, num_microbatches: int, name: str = "forward only") -> Schedule:
    """Return a schedule of forwards only: a device always runs the deepest of its stages whose input has arrived.

    The deepest stage is the one nearest to the loss. Inputs arrive as if all forwards took equally long, and messages
    no time. Microbatches are assigned to replicas of the model in turn.
    """
    replicas, shares = placement.replicas, [0] * placement.replicas
    for microbatch in range(num_microbatches):
        shares[microbatch % replicas] += 1
    done = [0] * placement.num_stages
    orders: list[list[Action]] = [[] for _ in placement.stages]
    while sum(done) < num_microbatches * placement.model_stages:
        before = tuple(done)
        for device, stages in enumerate(placement.stages):
            for stage in sorted(stages, key=lambda stage: -(stage % placement.model_stages)):
                replica, previous = placement.replica_of(stage), placement.previous_stage(stage)
                arrived = shares[replica] if previous is None else before[previous]
                if before[stage] < arrived:
                    orders[device].append(Action(Kind.F, stage, before[stage] * replicas + replica))
                    done[stage] += 1
                    break
    return Schedule(name, placement, Units.equal(num_microbatches), tuple(map(tuple, orders)))
