"""The search over all placements: starting orders for each, their improvement, and the best result.

One placement with a number of slices is searched by an ``Exploration``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from operator import itemgetter
from random import Random
from typing import Any

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.bounds import least_held
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import rare_collection, tell
from megatron_pipemem.schedule.memory_cap import MemoryCap, loosened, per_device, unreachable
from megatron_pipemem.schedule.options import AUTO, SEARCH_SECONDS, check_effort, check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import synchronous_families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.search.exploration import EXACT, PASSES_TO_SOLVE, Clock, Exploration, SearchStep
from megatron_pipemem.search.improve import Timetable
from megatron_pipemem.search.problem import better_full
from megatron_pipemem.search.result import Candidate, ResultCache, SearchResult, fastest_first, to_json

logger = logging.getLogger(__name__)

Shape = tuple[Placement, Units]
"""A placement, and the units of a step."""

MAX_CHUNKS = 8
"""The most stages per device of the placements that are tried by default."""

# Passes of all starts that are justified at effort 1, in at least one start.
_PASSES_TO_JUSTIFY = 20_000
# Passes of random list schedules, and the number of leading placements that get them, if the best is far from its bound.
_PASSES_TO_VARY = 100_000
_PLACEMENTS_TO_VARY = 3
_EFFORT_WHEN_FAR = 2
_SHARE_OF_OTHERS = 0.2
# The most states of all exact searches at effort 1: half a second.
_STATES = 4000
# Orders within this factor of the best makespan are polished, which gains one or two per cent.
_WORTH_POLISHING = 1.02


@rare_collection()
def search_schedule(
    *,
    num_devices: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    placements: Sequence[Placement] | None = None,
    max_chunks: int = MAX_CHUNKS,
    seconds: float = SEARCH_SECONDS,
    effort: float = 1.0,
    seed: int = 0,
    cache: ResultCache | None = None,
    period: bool = False,
    slices: int | Sequence[int] = 1,
) -> SearchResult:
    """Find the fastest schedule under a memory cap.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m`` of one step.
        costs: seconds and memory of actions; by default unit costs and activation units.
        memory_cap: the most memory of a device after any action, one number or one per device, in activation units or
            in the unit of ``costs.memory`` (bytes). ``None`` is no limit.
        placements: the placements to try. The default is linear, and interleaved, V and wave with up to
            ``max_chunks`` stages per device. If costs are per stage, only placements with as many stages are tried.
        max_chunks: most stages per device. More stages shorten the bubble but send more messages. A model with evenly
            cut layers allows ``layers / p``.
        seconds: time after which improvement stops. A first valid schedule is found even if that takes longer.
        effort: factor of the number of trials, after which the search ends. It also ends if the lower bound is met.
        seed: seed of the random variations. Searches with the same seed have the same result, unless ``seconds`` ends
            them.
        cache: where finished searches are stored and looked up; ``None`` always searches.
        period: whether to minimise the period of steps without a barrier (``consecutive_steps``), and not the makespan of one
            step. ``makespan`` of the result is then the period.
        slices: the number of sequence slices of a microbatch, or several numbers from which the best is chosen. If the
            costs have prices per slice, numbers that do not fit them are left out.

    Returns:
        The best schedule of every placement and number of slices, the fastest first, with proved lower bounds.

    Raises:
        UnsupportedError: no schedule was found that keeps the cap, and the message has the memory of one microbatch
            alone. Or an argument is out of range.
        CostsError: the costs do not fit a placement, or have factors of microbatches.
    """
    clock = Clock(seconds)
    costs = costs or Costs()
    costs.require_alike("the search")
    check_whole("num_devices", num_devices)
    check_whole("num_microbatches", num_microbatches)
    check_whole("max_chunks", max_chunks)
    check_effort(seconds, effort, seed)
    caps = None if memory_cap is None else per_device(memory_cap, num_devices)
    counts = (slices,) if isinstance(slices, int) else tuple(slices)
    if placements is None:
        placements = usual_placements(num_devices, max_chunks, costs, counts)
    if not placements or any(
        placement.num_devices != num_devices or placement.replicas > 1 for placement in placements
    ):
        raise UnsupportedError(
            "unsupported-placement",
            f"placements must have one replica of the model on {num_devices} devices; give at least one such placement",
        )
    shapes = [(placement, Units.equal(num_microbatches, parts)) for placement in placements for parts in counts]
    if len(counts) > 1:
        shapes = [shape for shape in shapes if _misfit(costs, *shape) is None] or shapes
    considered = _explorations(shapes, costs, caps, seed, period)
    question = (num_microbatches, costs, caps, tuple(placements), effort, seed, period, counts)
    recall = partial(_recalled, considered, costs, int(effort * _STATES))
    if cache is not None and (cached := cache.get(question, recall)) is not None:
        return cached
    explorations = _first_orders(considered, clock)
    if not explorations:
        raise UnsupportedError("cap-unreachable", _nothing_fits(shapes, costs, caps))
    _improve(explorations, clock, effort, seed)
    bound = min(exploration.bound for exploration in considered)
    result = SearchResult(fastest_first(_described(explorations, clock)), bound, clock.elapsed, costs)
    logger.info("%s in %.2f s, gap %.2f%%", result.best.found_by, result.seconds, 100 * result.gap)
    if cache is not None and (result.is_optimal or not clock.refused_any):
        cache.put(question, to_json(result))
    return result


def _recalled(explorations: Sequence[Exploration], costs: Costs, most_states: int, values: Any) -> SearchResult:
    """Return the result whose ``to_json`` are ``values``.

    Raise an error if it is not a result of a search by these explorations. ``most_states`` limits exact searches, which
    prove bounds again.
    """
    candidates: list[Candidate] = []
    missing = {(e.placement.name, e.placement.devices, e.units): e for e in reversed(explorations)}
    for row in values["candidates"]:
        schedule = Schedule.from_csv(row["orders"], name=AUTO)
        exploration = missing.pop((row["placement"], schedule.placement.devices, schedule.units), None)
        if exploration is None:
            raise ValueError("it has a placement that is not searched, or twice the same")
        schedule = replace(schedule, placement=exploration.placement)
        candidates.append(exploration.recalled(row, schedule, most_states))
    bound = float(values["lower_bound"])
    highest = min(candidate.makespan for candidate in candidates) * EXACT
    least = min(exploration.bound for exploration in explorations) / EXACT
    if not least <= bound <= highest or not all(e.proves(bound, most_states) for e in explorations):
        raise ValueError(f"its bound {bound:.6g} is false")
    return SearchResult(fastest_first(candidates), bound, 0.0, costs)


def _explorations(
    shapes: Sequence[Shape],
    costs: Costs,
    caps: tuple[float, ...] | None,
    seed: int,
    period: bool,
) -> list[Exploration]:
    """Return an exploration for every placement and number of slices with which one microbatch keeps the caps.

    Under caps and without slices, there is a second exploration if ``better_full`` has any stages. It has full
    backwards there.
    """
    explorations = []
    for number, (placement, units) in enumerate(shapes):
        tell(partial("bounds of {} placements, {} left".format, len(shapes), len(shapes) - number))
        explore = partial(Exploration, placement, units, costs, caps, seed, period=period)
        try:
            explorations.append(explore())
        except UnsupportedError:
            continue  # one microbatch exceeds a cap
        if caps is not None and units.are_whole and (full := better_full(placement, costs)):
            explorations.append(explore(full=full))
    return explorations


def _first_orders(explorations: Sequence[Exploration], clock: Clock) -> list[Exploration]:
    """Find starting orders (one simple order, and those of families), and return the explorations that have any."""
    # The smallest problems first.
    for exploration in sorted(explorations, key=lambda e: e.num_passes):
        exploration.take_first(clock)
        if exploration.has_orders:
            break
    for number, exploration in enumerate(explorations):
        activity = f"orders of families on {len(explorations) - number} more placements"
        clock.state = partial(_standing, activity, explorations)
        exploration.take_families(tuple(synchronous_families(exploration.units)) if clock.seconds else (), clock)
    return [exploration for exploration in explorations if exploration.has_orders]


def _improve(explorations: Sequence[Exploration], clock: Clock, effort: float, seed: int) -> None:
    """Try all methods that find better orders, first those that gain most for their time."""
    clock.state = partial(_standing, "improving the orders of families", explorations)
    _justify_starts(explorations, clock, effort)
    _solve_small(explorations, clock, effort)
    clock.state = partial(_standing, "trying random orders", explorations)
    _vary_starts(explorations, clock, effort, seed)
    clock.state = partial(_standing, "trying periodic orders", explorations)
    leader = min(explorations, key=lambda e: e.makespan)
    if not leader.is_periodic:
        leader.polish(clock, effort * (_EFFORT_WHEN_FAR if leader.is_far_from_bound else _SHARE_OF_OTHERS))
    for other in sorted(explorations, key=lambda e: e.makespan)[:_PLACEMENTS_TO_VARY]:
        if not other.units.are_whole and other is not leader and other.can_beat(min(e.makespan for e in explorations)):
            other.polish(clock, effort)
    _explore_periodic(explorations, clock, effort)


def _described(explorations: Sequence[Exploration], clock: Clock) -> list[Candidate]:
    """Return the best schedule of every placement and number of slices for which there is time, and of at least one."""
    candidates: list[Candidate] = []
    for exploration in sorted(explorations, key=lambda e: e.makespan):
        shape = exploration.placement, exploration.units
        if any((candidate.schedule.placement, candidate.schedule.units) == shape for candidate in candidates):
            continue
        if not candidates or clock.allows(SearchStep.DESCRIBE, 0, exploration.num_passes):
            with clock.step(SearchStep.DESCRIBE, exploration.num_passes):
                candidates.append(exploration.candidate())
    return candidates


def _standing(activity: str, explorations: Sequence[Exploration]) -> str:
    reached, bound = [e.makespan for e in explorations if e.has_orders], min(e.bound for e in explorations)
    return f"{activity}; best makespan so far {min(reached):.6g}, lower bound {bound:.6g}" if reached else activity


def usual_placements(
    num_devices: int, max_chunks: int, costs: Costs, slices: Sequence[int] = (1,)
) -> tuple[Placement, ...]:
    """Return the placements that a search tries by default: linear, interleaved, V and wave, if they fit the costs.

    A V comes first, because its schedules keep most caps.
    """
    p, usual = num_devices, []
    for chunks in (*range(min(2, max_chunks), 0, -1), *range(3, max_chunks + 1)):
        if chunks % 2 == 0:
            usual.append(Placement.wave(p, chunks))
        usual.append(Placement.interleaved(p, chunks))
    return fitting(usual, costs, slices)


def fitting(placements: Sequence[Placement], costs: Costs, slices: Sequence[int] = (1,)) -> tuple[Placement, ...]:
    """Return the placements that the costs fit with any of the numbers of slices. Raise a CostsError if none does."""
    fitting_placements: list[Placement] = []
    problem = None
    for placement, parts in product(placements, slices):
        if placement in fitting_placements:
            continue
        error = _misfit(costs, placement, Units.equal(1, parts))
        if error is None:
            fitting_placements.append(placement)
        problem = problem or error
    if not fitting_placements:
        stages = ", ".join(map(str, sorted({placement.num_stages for placement in placements})))
        raise CostsError(
            "costs-mismatch",
            f"the costs fit no placement of {stages} stages: {problem}; give costs for one of these numbers of stages",
        )
    return tuple(fitting_placements)


def _misfit(costs: Costs, placement: Placement, units: Units) -> CostsError | None:
    """Return (not raise) the CostsError if the costs do not fit a placement with these units; ``None`` if they fit."""
    try:
        costs.seconds(placement, units)
        costs.memory_changes(placement, units=units)
        costs.transfer_seconds(placement, units=units)
        for source, destination in pairwise(placement.devices):
            costs.link_seconds(source, destination)
    except CostsError as error:
        return error
    return None


def _nothing_fits(shapes: Sequence[Shape], costs: Costs, caps: Sequence[float] | None) -> str:
    needs = [least_held(placement, units, costs) for placement, units in shapes]
    limits = caps or (math.inf,) * len(needs[0])
    # The placement that exceeds its caps least, and the device that exceeds its cap most.
    lacking = [[need - loosened(cap) for need, cap in zip(needed, limits, strict=True)] for needed in needs]
    closest = min(range(len(needs)), key=lambda index: max(lacking[index]))
    device = lacking[closest].index(max(lacking[closest]))
    in_bytes = costs.memory is not None
    cap = "inf" if caps is None else MemoryCap(limits[device], in_bytes)
    needed = MemoryCap(needs[closest][device], in_bytes)
    if max(lacking[closest]) <= 0:
        return (
            f"no schedule was found that keeps the memory cap of {cap} on pipeline rank {device}, although one microbatch "
            f"alone takes {needed}; make I and W of the costs' memory give back all that F takes, or raise the cap"
        )
    return unreachable(cap, device, needed)


def _justify_starts(explorations: Sequence[Exploration], clock: Clock, effort: float) -> None:
    """Justify starting orders while there is time: first those of families, the fastest first, then greedy orders."""

    def starts() -> Iterator[tuple[Exploration, str, Timetable]]:
        offered = [(seconds, i, name, table) for i, e in enumerate(explorations) for seconds, name, table in e.starts]
        for _, index, name, table in sorted(offered, key=itemgetter(0, 1)):
            yield explorations[index], name, table
        for exploration in sorted(explorations, key=lambda e: e.bound):
            if can_win(exploration) and exploration.may_justify(clock):
                for name, table in exploration.more_starts():
                    yield exploration, name, table

    def can_win(exploration: Exploration) -> bool:
        return exploration.can_beat(min(e.makespan for e in explorations))

    justified = 0
    for exploration, name, table in starts():
        if justified > effort * _PASSES_TO_JUSTIFY:
            return
        if can_win(exploration) and exploration.may_justify(clock):
            exploration.justify(name, table, clock)
            justified += exploration.num_passes // exploration.units.parts


def _solve_small(explorations: Sequence[Exploration], clock: Clock, effort: float) -> None:
    """Search placements with at most 128 passes exactly, if they can still win."""
    states = int(effort * _STATES)
    for exploration in sorted(explorations, key=lambda e: e.num_passes):
        if exploration.num_passes > PASSES_TO_SOLVE or states <= 0 or not exploration.may_justify(clock):
            return
        reached = min(e.makespan for e in explorations)
        if exploration.can_beat(reached):
            states -= exploration.solve(reached, states)


def _vary_starts(explorations: Sequence[Exploration], clock: Clock, effort: float, seed: int) -> None:
    """Try random greedy orders in the three best placements, as long as the best makespan is far from its bound."""
    rng, tried = Random(seed), 0
    while tried < effort * _PASSES_TO_VARY:
        leaders = sorted(explorations, key=lambda e: e.makespan)[:_PLACEMENTS_TO_VARY]
        if not leaders[0].is_far_from_bound:
            return
        exploration = rng.choice(leaders)
        if not exploration.may_justify(clock):
            return
        exploration.try_random(rng, clock)
        tried += exploration.num_passes


def _explore_periodic(explorations: Sequence[Exploration], clock: Clock, effort: float) -> None:
    """Try periodic orders: with full effort in the placement that is most likely to win, and with less in others."""

    def explore(exploration: Exploration, share: float) -> None:
        reached = min(e.makespan for e in explorations)
        # A placement whose bound is not below the makespan of another one cannot win.
        if exploration.can_beat(reached):
            exploration.explore(clock, effort * share, reached if share < 1 else math.inf)
            if exploration.leaves_idle and exploration.makespan < reached * _WORTH_POLISHING:
                exploration.polish(clock, effort * share)

    periodic = sorted((e for e in explorations if e.is_periodic), key=lambda e: e.bound)
    leader = min(explorations, key=lambda e: e.makespan)
    in_full = periodic[0] if leader.is_periodic else None
    for exploration in periodic:
        explore(exploration, 1.0 if exploration is in_full else _SHARE_OF_OTHERS)
    leader = min(explorations, key=lambda e: e.makespan)
    if in_full is None and leader.is_periodic:
        explore(leader, 1.0)
