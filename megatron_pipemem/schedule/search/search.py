"""The search: a portfolio of starts for every placement, each improved, the best kept."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.bounds import lower_bound, one_microbatch
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import AUTO, check_effort
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.rare_collection import rare_collection
from megatron_pipemem.schedule.registry import Family, synchronous_families
from megatron_pipemem.schedule.search.cache import ResultCache
from megatron_pipemem.schedule.search.clock import Clock, Step
from megatron_pipemem.schedule.search.exact import solve
from megatron_pipemem.schedule.search.improve import Timetable, as_soon_as_possible, justify
from megatron_pipemem.schedule.search.portfolio import (
    family_starts,
    first_start,
    fusable,
    list_schedules,
    random_list_schedule,
    shortened,
)
from megatron_pipemem.schedule.search.problem import keeps_memory_exactly, make_problem, to_schedule
from megatron_pipemem.schedule.search.result import Candidate, SearchResult
from megatron_pipemem.schedule.search.robust import most_robust
from megatron_pipemem.schedule.simulator import simulate

if TYPE_CHECKING:
    from megatron_pipemem.schedule.search.periodic import Block
    from megatron_pipemem.schedule.search.problem import Problem

logger = logging.getLogger(__name__)

_POLISHED = ", polished"
MAX_CHUNKS = 8
"""Stages per device up to which placements are considered by default."""

_EXACT = 1 + 1e-6
# Families of many stages take long; the other half of the time is for better orders.
_SHARE_OF_MANY_CHUNKS = 0.5
# Microbatches with which blocks are compared, per device: enough to start up and run dry, which is all that differs.
_MICROBATCHES_PER_DEVICE = 2
# Passes scheduled over all trials at effort 1; a trial costs about ten microseconds per pass.
_PASSES_TO_TRY = 100_000
_FEWEST_TRIALS, _MOST_TRIALS = 16, 120
_FINALISTS = 6
# More have too many cyclic orders to list.
_CHUNKS_OF_A_CYCLE = 2
# Passes of all starts that are justified at effort 1, but at least one start.
_PASSES_TO_JUSTIFY = 20_000
# Of random list schedules, tried where the best so far is so many times its bound, in so many placements.
_PASSES_TO_VARY = 100_000
_FAR_FROM_BOUND = 1.03
_PLACEMENTS_TO_VARY = 3
_EFFORT_WHEN_FAR = 2
_SHARE_OF_OTHERS = 0.2
# Problems with so few passes are tried exactly, all together with so many states at effort 1: half a second.
_PASSES_TO_SOLVE = 128
_STATES = 4000
# Of the time that a longer interval idles, at least so much is left when justification has filled what it can.
_LEFT_IDLE = 1 / 6
# Times the best makespan; polishing saves a point or two.
_WORTH_POLISHING = 1.02
# Passes justified again with a part of them frozen, where the steady state idles.
_PASSES_TO_POLISH = 150_000
# Under a cap that makes the steady state idle, intervals multiply what there is to try.
_EFFORT_WHEN_IDLE = 4


@rare_collection()
def search_schedule(
    *,
    num_devices: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    placements: Sequence[Placement] | None = None,
    max_chunks: int = MAX_CHUNKS,
    seconds: float = 20.0,
    effort: float = 1.0,
    seed: int = 0,
    cache: ResultCache | None = None,
) -> SearchResult:
    """Find the fastest schedule under a memory cap.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m`` of one step.
        costs: what actions take and hold; default unit costs and activation units.
        memory_cap: the most a device may hold after any action, one number or one per device: in activation units, or in
            the unit of ``costs.memory`` where the costs have one (bytes). ``None`` is no limit.
        placements: which to consider; default linear, and interleaved, V and wave with up to ``max_chunks`` stages per
            device, of these the ones that costs per stage are for.
        max_chunks: more stages per device shorten the bubble at the price of more messages; a model whose layers are to be
            shared out evenly has at most ``layers / p``.
        seconds: stop improving after so long. A valid schedule always comes first.
        effort: multiplies the number of trials; the search ends by itself after them, or when it meets the bound.
        seed: of the random variations. Two searches that ``seconds`` does not cut give the same result for one seed.
        cache: where finished searches are kept and looked up; ``None`` searches afresh.

    Returns:
        The best schedule of every placement, the fastest first, with certified lower bounds.

    Raises:
        UnsupportedError: no schedule of any of the placements fits the cap; the message says what is needed at least. Or an
            argument is out of range.
        CostsError: the costs do not fit a placement.
    """
    clock = Clock(seconds)
    costs = costs or Costs()
    if num_devices < 1 or num_microbatches < 1:
        raise UnsupportedError(
            f"{num_devices} devices and {num_microbatches} microbatches are no step; give at least 1 of each"
        )
    check_effort(seconds, effort, seed)
    caps = _checked_caps(memory_cap, num_devices)
    if not isinstance(max_chunks, int) or max_chunks < 1:
        raise UnsupportedError(f"max_chunks must be a whole number of at least 1, not {max_chunks!r}")
    if placements is None:
        placements = _usual_placements(num_devices, max_chunks, costs)
    if not placements or any(
        placement.num_devices != num_devices or placement.replicas > 1 for placement in placements
    ):
        raise UnsupportedError(f"give at least one placement, of one model copy on {num_devices} devices each")
    question = (num_microbatches, costs, caps, tuple(placements), effort, seed)
    if cache is not None and (known := cache.get(question)) is not None:
        return known
    explorations = []
    for placement in placements:
        needed = one_microbatch(placement, costs)
        if caps is None or all(loosened(cap) >= need for cap, need in zip(caps, needed, strict=True)):
            explorations.append(_Exploration(placement, num_microbatches, costs, caps, seed))
    if not explorations:
        raise UnsupportedError(_nothing_fits(placements, costs, memory_cap))
    considered = explorations
    # The quickest to say something about.
    min(explorations, key=lambda e: e.num_passes).take_first(clock)
    families = tuple(synchronous_families()) if seconds else ()
    for exploration in explorations:
        exploration.take_families(families, clock)
    explorations = [exploration for exploration in explorations if exploration.found_any]
    if not explorations:
        raise UnsupportedError(_nothing_fits(placements, costs, memory_cap))
    _justify_starts(explorations, clock, effort)
    _solve_small(explorations, clock, effort)
    _vary_starts(explorations, clock, effort, seed)
    leader = min(explorations, key=lambda e: e.makespan)
    if not leader.is_periodic:
        leader.polish(clock, effort * (_EFFORT_WHEN_FAR if leader.is_far_from_bound else _SHARE_OF_OTHERS))
    _explore_periodic(explorations, clock, effort)
    candidates = []
    for exploration in sorted(explorations, key=lambda e: e.makespan):
        if not candidates or clock.allows(Step.DESCRIBE, 0, exploration.num_passes):
            with clock.step(Step.DESCRIBE, exploration.num_passes):
                candidates.append(exploration.candidate())
    least = min(candidate.makespan for candidate in candidates)
    # Of those that are equally fast, the one with fewest stages sends fewest messages.
    candidates.sort(key=lambda c: (max(c.makespan, least * (1 + 1e-12)), c.schedule.num_stages, -c.lower_bound))
    bound = min(exploration.bound for exploration in considered)
    result = SearchResult(tuple(candidates), bound, clock.elapsed)
    logger.info("%s in %.2f s, gap %.2f%%", result.best.found_by, result.seconds, 100 * result.gap)
    if cache is not None and (result.is_optimal or not clock.refused_any):
        cache.put(question, result)
    return result


def _usual_placements(num_devices: int, max_chunks: int, costs: Costs) -> tuple[Placement, ...]:
    """Those that families have, a V first, as it fits most caps; of these, the ones that costs per stage are for.

    Raises:
        CostsError: they are for none.
    """
    p, usual = num_devices, []
    for chunks in (*range(min(2, max_chunks), 0, -1), *range(3, max_chunks + 1)):
        if chunks % 2 == 0:
            usual.append(Placement.wave(p, chunks))
        usual.append(Placement.interleaved(p, chunks))
    fitting = []
    for placement in usual:
        try:
            costs.seconds(placement)
            costs.memory_changes(placement)
            for source, destination in pairwise(placement.devices):
                costs.link_seconds(source, destination)
            fitting.append(placement)
        except CostsError as error:
            problem = error
    if not fitting:
        raise CostsError(f"the costs fit no multiple of {p} stages up to {max_chunks * p}: {problem}")
    return tuple(fitting)


def _checked_caps(memory_cap: float | Sequence[float] | None, num_devices: int) -> tuple[float, ...] | None:
    """One cap per device.

    Raises:
        UnsupportedError: a cap is no positive number, or there are not as many as devices.
    """
    if memory_cap is None:
        return None
    caps = tuple(map(float, memory_cap)) if hasattr(memory_cap, "__len__") else (float(memory_cap),) * num_devices
    if len(caps) != num_devices:
        raise UnsupportedError(f"{len(caps)} memory caps for {num_devices} devices; give one number, or one per device")
    if not all(0 < cap < math.inf for cap in caps):
        raise UnsupportedError(f"memory cap {memory_cap} is no positive number; give one, or leave it out for no limit")
    return caps


def _nothing_fits(placements: Sequence[Placement], costs: Costs, memory_cap: object) -> str:
    unit = "activation units" if costs.memory is None else "bytes"
    least = min(max(one_microbatch(placement, costs)) for placement in placements)
    caps = memory_cap if isinstance(memory_cap, Sequence) else (memory_cap,)
    if least <= min(caps):
        return (
            f"no schedule was found that fits the memory cap of {memory_cap} {unit}, although one microbatch alone takes "
            f"{least:.6g}; see that I and W of the costs' memory give back what F takes, or raise the cap"
        )
    return (
        f"no schedule fits the memory cap of {memory_cap} {unit}: one microbatch alone takes {least:.6g} on some device; "
        "raise the cap, cut the model into more stages, or use smaller microbatches"
    )


def _justify_starts(explorations: Sequence[_Exploration], clock: Clock, effort: float) -> None:
    """Improve what the families offered, the fastest first, then list schedules."""

    def starts() -> Iterator[tuple[_Exploration, str, Timetable]]:
        offered = [(seconds, i, *start) for i, e in enumerate(explorations) for seconds, *start in e.starts]
        for _, index, name, table in sorted(offered, key=lambda each: each[:2]):
            yield explorations[index], name, table
        for exploration in sorted(explorations, key=lambda e: e.bound):
            if can_win(exploration) and exploration.may_justify(clock):
                for name, table in exploration.more_starts():
                    yield exploration, name, table

    def can_win(exploration: _Exploration) -> bool:
        return exploration.bound * _EXACT < min(e.makespan for e in explorations)

    justified = 0
    for exploration, name, table in starts():
        if justified > effort * _PASSES_TO_JUSTIFY:
            return
        if can_win(exploration) and exploration.may_justify(clock):
            exploration.justify(name, table, clock)
            justified += exploration.num_passes


def _solve_small(explorations: Sequence[_Exploration], clock: Clock, effort: float) -> None:
    """The placements with fewest passes exactly, as long as they could win and the states suffice."""
    states = int(effort * _STATES)
    for exploration in sorted(explorations, key=lambda e: e.num_passes):
        if exploration.num_passes > _PASSES_TO_SOLVE or states <= 0 or not exploration.may_justify(clock):
            return
        reached = min(e.makespan for e in explorations)
        if exploration.bound * _EXACT < reached:
            states -= exploration.solve(reached, states)


def _vary_starts(explorations: Sequence[_Exploration], clock: Clock, effort: float, seed: int) -> None:
    """Random list schedules in the leading placements, as long as the best is far from what could be."""
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


def _explore_periodic(explorations: Sequence[_Exploration], clock: Clock, effort: float) -> None:
    """The favourite gets the full effort if it can be expected to win; the others must show promise with less."""

    def explore(exploration: _Exploration, share: float) -> None:
        reached = min(e.makespan for e in explorations)
        # A placement whose bound is no better than what another one has reached cannot win.
        if exploration.bound * _EXACT < reached:
            exploration.explore(clock, effort * share, reached if share < 1 else math.inf)
            if exploration.idles and exploration.makespan < reached * _WORTH_POLISHING:
                exploration.polish(clock, effort * share)

    periodic = sorted((e for e in explorations if e.is_periodic), key=lambda e: e.bound)
    leader = min(explorations, key=lambda e: e.makespan)
    in_full = periodic[0] if leader.is_periodic else None
    for exploration in periodic:
        explore(exploration, 1.0 if exploration is in_full else _SHARE_OF_OTHERS)
    leader = min(explorations, key=lambda e: e.makespan)
    if in_full is None and leader.is_periodic:
        explore(leader, 1.0)


@dataclass
class _Exploration:
    """The search within one placement. Makespans and bounds in seconds outside, in ticks inside."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    caps: Sequence[float] | None
    seed: int
    _finalists: list[tuple[int, int, str, Timetable]] = field(default_factory=list)
    _starts: list[tuple[str, Timetable]] = field(default_factory=list)
    idles: bool = False
    """Whether no periodic order without a bubble in the steady state was found to fit the caps."""

    def __post_init__(self) -> None:
        self.bound = lower_bound(self.placement, self.num_microbatches, self.costs, self.caps)

    @cached_property
    def _in_ticks(self) -> tuple[Problem, float]:
        unit = self.costs.memory_unit(self.placement)
        caps = None if self.caps is None else [cap / unit for cap in self.caps]
        return make_problem(self.placement, self.num_microbatches, self.costs, caps)

    @property
    def _problem(self) -> Problem:
        return self._in_ticks[0]

    @property
    def _ticks_per_second(self) -> float:
        return self._in_ticks[1]

    @property
    def found_any(self) -> bool:
        return bool(self._finalists)

    @property
    def makespan(self) -> float:
        return self._finalists[0][0] / self._ticks_per_second

    def take_first(self, clock: Clock) -> None:
        """An order that is there at once."""
        with clock.step(Step.FIRST, self.num_passes):
            table = first_start(self._problem)
        if table is not None:
            self._add("evenly spaced", table)

    def take_families(self, families: Sequence[Family], clock: Clock) -> None:
        """What every one of the families has to offer as it is, while there is time; if that is nothing, a list schedule."""

        share = 1.0 if self.is_periodic else _SHARE_OF_MANY_CHUNKS

        def in_time() -> bool:
            return clock.allows(Step.FAMILY, self.num_passes, self.num_passes, share)

        if not in_time():
            return
        offers = family_starts(families, self.placement, self._problem, self.costs, self.caps)
        while in_time():
            with clock.step(Step.FAMILY, self.num_passes):
                offer = next(offers, None)
            if offer is None:
                break
            name, table = offer
            if table is not None:
                self._take(name, table)
        if not self._starts:
            for start in itertools.islice(list_schedules(self._problem), 1):
                self._take(*start)

    def _take(self, name: str, table: Timetable) -> None:
        if all(table.orders != known.orders for _, known in self._starts):
            self._add(name, table)
            self._starts.append((name, table))

    @property
    def starts(self) -> list[tuple[float, str, Timetable]]:
        """What there is to improve: seconds, name and timetable, the families' first."""
        return [(table.makespan / self._ticks_per_second, name, table) for name, table in self._starts]

    def more_starts(self) -> Iterator[tuple[str, Timetable]]:
        """List schedules that are no starts yet."""
        tried = {name for name, _ in self._starts}
        return (start for start in list_schedules(self._problem) if start[0] not in tried)

    def may_justify(self, clock: Clock) -> bool:
        """Whether there is time for it."""
        return clock.allows(Step.JUSTIFY, 2 * self.num_passes, self.num_passes)

    def justify(self, name: str, table: Timetable, clock: Clock) -> None:
        with clock.step(Step.JUSTIFY, 2 * self.num_passes):
            self._add(f"{name}, justified", justify(self._problem, justify(self._problem, table)))

    def try_random(self, rng: Random, clock: Clock) -> None:
        table = random_list_schedule(self._problem, rng)
        if table is not None:
            self.justify("list schedule, random", table, clock)

    @property
    def is_far_from_bound(self) -> bool:
        return self.makespan > self.bound * _FAR_FROM_BOUND

    @property
    def num_passes(self) -> int:
        return 3 * self.placement.num_stages * self.num_microbatches

    @property
    def is_periodic(self) -> bool:
        """Whether there are few enough cyclic orders for a search for periodic ones."""
        return self.placement.num_chunks <= _CHUNKS_OF_A_CYCLE

    def solve(self, reached: float, most_states: int) -> int:
        """Look for what is shorter than ``reached`` seconds until there is no more; the number of states that took.

        What is proved raises ``bound``.
        """
        if self.caps is not None and not keeps_memory_exactly(self.placement, self.costs):
            return 0
        shorter_than = min(self._finalists[0][0], round(reached * self._ticks_per_second))
        solved = solve(self._problem, shorter_than, most_states)
        if solved is None:
            return most_states
        if solved.table is not None:
            self._add("exact", solved.table)
        self.bound = max(self.bound, min(shorter_than, self._finalists[0][0]) / self._ticks_per_second)
        return solved.states

    def explore(self, clock: Clock, effort: float, reached: float) -> None:
        """Try periodic starts until the bound is met, none is better for long, the effort is spent, or time is over.

        Args:
            clock: of the search.
            effort: see ``search_schedule``.
            reached: makespan to undercut; intervals that are too long for it are not tried.
        """
        if self.makespan <= self.bound * _EXACT or not self.may_justify(clock):
            return
        from megatron_pipemem.schedule.search.periodic import PeriodicStarts  # numpy takes a while to load

        short = shortened(self._problem, _MICROBATCHES_PER_DEVICE * self.placement.num_devices)
        rest = self._problem.num_microbatches - short.num_microbatches
        passes = len(short.device) * short.num_microbatches
        trials = int(effort * min(_MOST_TRIALS, max(_FEWEST_TRIALS, _PASSES_TO_TRY / passes)))
        sampler = PeriodicStarts(short, self.seed)
        idle_if_doubled = _LEFT_IDLE * self.num_microbatches * max(short.work) / self._ticks_per_second
        evaluated = proposed = improved = 0
        while evaluated < trials * (_EFFORT_WHEN_IDLE if sampler.idles else 1) and proposed < 4 * trials:
            if sampler.exhausted or evaluated - improved > trials:
                break
            if not clock.allows(Step.TRY, passes, self.num_passes):
                break
            if self.bound + (sampler.stretch - 1) * idle_if_doubled > reached:
                break
            proposed += 1
            with clock.step(Step.TRY, passes):
                proposal = sampler.propose()
                if proposal is None:
                    continue
                evaluated += 1
                source, block = proposal
                table = as_soon_as_possible(short, block.orders())
                assert table is not None, "a periodic order ends"
                table = justify(short, table)
            source.learn(block, table.makespan)
            # Every further microbatch costs an interval, or less where justification fills the steady state's gaps.
            if table.makespan + rest * max(short.work) < self._finalists[-1][0] or len(self._finalists) < _FINALISTS:
                if rest and not clock.allows(Step.JUSTIFY, self.num_passes, self.num_passes):
                    break
                before = self.makespan
                self._finish(block, table, rest)
                improved = evaluated if self.makespan < before else improved
                if self.makespan <= self.bound * _EXACT:
                    return
        self.idles = sampler.idles

    def polish(self, clock: Clock, effort: float) -> None:
        """Justify the best again and again with changing parts frozen: a steady state that idles has room to move."""
        rng = Random(self.seed)
        problem = self._problem
        classes, m = len(problem.device), problem.num_microbatches
        pool = [entry[2:] for entry in self._finalists]
        rounds, improved = int(effort * _PASSES_TO_POLISH / (classes * m)), 0
        patience = max(_FEWEST_TRIALS, rounds / 3)
        for number in range(rounds):
            if self.makespan <= self.bound * _EXACT or number - improved > patience or not self.may_justify(clock):
                return
            index = rng.randrange(len(pool))
            if rng.random() < 0.5:
                whole = set(rng.sample(range(classes), rng.randint(1, classes // 3)))
                frozen = {each for each in range(classes * m) if each // m in whole}
            else:
                share = rng.choice((0.02, 0.1, 0.3, 0.5))
                frozen = {each for each in range(classes * m) if rng.random() < share}
            name, before = pool[index]
            with clock.step(Step.JUSTIFY, 2 * self.num_passes):
                table = justify(problem, justify(problem, before, frozen))
            if table.makespan < self._finalists[0][0]:
                self._add(f"{name.removesuffix(_POLISHED)}{_POLISHED}", table)
                improved = number
            if table.makespan <= before.makespan:
                pool[index] = (name, table)

    def _finish(self, block: Block, table: Timetable, rest: int) -> None:
        """The block with all microbatches."""
        if rest:
            orders = block.repeated_in(self._problem).orders()
            table = justify(self._problem, as_soon_as_possible(self._problem, orders))
        self._add("periodic, justified", table)

    def _add(self, name: str, table: Timetable) -> None:
        entry = (table.makespan, len(self._finalists), name, table)
        self._finalists = sorted([*self._finalists, entry], key=lambda e: e[:2])[:_FINALISTS]

    def candidate(self) -> Candidate:
        """The best schedule, of those that are equally fast the one that wrong costs harm least."""
        slack = 0 if self.makespan <= self.bound * _EXACT else 1e-3
        equal = [entry for entry in self._finalists if entry[0] <= self._finalists[0][0] * (1 + slack)]
        _, _, name, table = equal[most_robust(self._problem, [entry[3] for entry in equal], self.seed)]
        fused = fusable(self._problem, as_soon_as_possible(self._problem, table.orders))
        schedule = to_schedule(AUTO, self.placement, self._problem, table.orders, fused)
        timeline = simulate(schedule, self.costs)
        bound = min(self.bound, timeline.makespan)  # that of an exact solution was in ticks
        return Candidate(schedule, timeline.makespan, timeline.peaks, bound, name)
