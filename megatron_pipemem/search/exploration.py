"""The search within one placement: find starting orders, improve them and keep the best ones, in a limited time.

A timetable has every device's passes in order, with their starts. It is *justified* by moving all passes as late as
possible, and then as early as possible (``improve``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from math import isclose
from random import Random
from typing import Any

from megatron_pipemem.errors import repeated
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import tell
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import Family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.stream import consecutive_steps
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search.exact import solve
from megatron_pipemem.search.improve import Timetable, as_soon_as_possible, justify, timetable
from megatron_pipemem.search.portfolio import (
    family_starts,
    first_start,
    fusable,
    list_schedules,
    random_list_schedule,
    shortened,
)
from megatron_pipemem.search.problem import (
    KINDS,
    Problem,
    better_full,
    keeps_memory_exactly,
    make_problem,
    to_schedule,
)
from megatron_pipemem.search.result import Candidate


class SearchStep(Enum):
    """Parts of a search, with the seconds per pass that are assumed until the part has been measured."""

    FIRST = 4e-6  # run a known order; every search begins with this, which measures the speed of the machine
    FAMILY = 10e-6  # build the schedule of a family
    JUSTIFY = 20e-6  # justify a timetable
    TRY = 25e-6  # propose a periodic order and justify it
    DESCRIBE = 15e-6  # make a schedule of the best order and simulate it


class Clock:
    """The limit of a search's processor time, which begins with the clock, and the measured speed of the search's parts.

    Processor time is that of this thread, so other work on the machine changes no result.
    """

    def __init__(self, seconds: float) -> None:
        self._started, self.seconds = time.thread_time(), seconds
        self.state: Callable[[], str] = lambda: "searching"
        """Returns the progress message that is sent after every part of the search."""
        self._paces: dict[SearchStep, float] = {}
        self.refused_any = False
        """Whether a part of the search was left out because it would have ended too late."""

    @property
    def elapsed(self) -> float:
        return time.thread_time() - self._started

    def allows(self, step: SearchStep, passes: int, result: int, share: float = 1.0) -> bool:
        """Return whether a part of the search can end in time, with time left to build the resulting schedule.

        ``passes`` is the number of passes that the part handles, and ``result`` that of the schedule. ``share`` is the
        share of the time limit that may be used up. If it cannot end in time, ``refused_any`` becomes true.
        """
        expected = self._seconds_per_pass(step) * passes + self._seconds_per_pass(SearchStep.DESCRIBE) * result
        if self.elapsed + expected > self.seconds * share:
            self.refused_any = True
            return False
        return True

    @contextmanager
    def step(self, step: SearchStep, passes: int) -> Iterator[None]:
        """Measure the time of this block, which runs a part of the search, to predict the next run of that part."""
        before = self.elapsed
        yield
        self._paces[step] = (self.elapsed - before) / passes
        tell(self.state)

    def _seconds_per_pass(self, step: SearchStep) -> float:
        """Return the seconds per pass of a part: measured last, or assumed and scaled by the speed of ``FIRST``."""
        usual = SearchStep.FIRST.value
        slowness = max(1.0, self._paces.get(SearchStep.FIRST, usual) / usual)
        return self._paces.get(step, step.value * slowness)


_POLISHED = ", polished"
EXACT = 1 + 1e-6
"""The ratio of two makespans or bounds that count as equal."""
PASSES_TO_SOLVE = 128
"""The most passes of a problem that is solved exactly."""
# Families with many chunks take long. The other half of the time is for better orders.
_SHARE_OF_MANY_CHUNKS = 0.5
# Microbatches per device when blocks are compared: enough for start and end, in which alone blocks differ.
_MICROBATCHES_PER_DEVICE = 2
# Passes scheduled over all trials at effort 1; a trial costs about ten microseconds per pass.
_PASSES_TO_TRY = 100_000
_FEWEST_TRIALS, _MOST_TRIALS = 16, 120
_FINALISTS = 6
# Devices with more chunks have too many cyclic orders to list.
_CHUNKS_OF_A_CYCLE = 2
# Ratio to the bound above which other starts may still improve the makespan much.
_FAR_FROM_BOUND = 1.03
# Share of the idle time of a longer interval that justification leaves at least.
_LEFT_IDLE = 1 / 6
# Passes that are justified again, with a part of them frozen, if the steady state idles.
_PASSES_TO_POLISH = 150_000
# The factor by which more passes are justified if numba is installed, in about the same time.
_SPEED_OF_COMPILED = 20
# Trials of ``polish`` that begin with a disturbed order.
_SHARE_OF_DISTURBED = 1 / 3
# With more rounds, small searches of parts took up to five times as long.
_MOST_ROUNDS_OF_PARTS = 60
# Factor of trials under a cap that makes the steady state idle, because intervals multiply the possibilities.
_EFFORT_WHEN_IDLE = 4


@dataclass
class Exploration:
    """The search within one placement and with microbatches of equally many parts.

    Times are in seconds, except in timetables and private values, which have ticks.
    """

    placement: Placement
    units: Units  # of a step
    costs: Costs
    caps: Sequence[float] | None
    """The most memory of every device, in the unit of the costs' memory; ``None`` is no limit."""
    seed: int  # of all random choices
    full: frozenset[int] = frozenset()  # stages that are restricted to full backwards
    period: bool = False
    """Whether to minimise the time from step to step without a barrier. Makespans are then upper bounds of that period,
    and the lower bound is the work of the busiest device."""
    _finalists: list[tuple[int, int, str, Timetable]] = field(default_factory=list)
    _starts: list[tuple[str, Timetable]] = field(default_factory=list)
    leaves_idle: bool = False
    """Whether ``explore`` found no periodic order within the caps without idle time in the steady state."""

    def __post_init__(self) -> None:
        n = self.units.parts
        self.bound = lower_bound(self.placement, self.units, self.costs, self.caps)
        if self.period:
            prices = self.costs.seconds(self.placement, self.units)
            work = (
                sum(sum(prices[kind][s * n : s * n + n]) for s in stages for kind in KINDS)
                for stages in self.placement.stages
            )
            self.bound = self.units.num_microbatches * max(work)

    @cached_property
    def _problem(self) -> Problem:
        unit = self.costs.memory_unit(self.placement, self.units)
        caps = None if self.caps is None else [cap / unit for cap in self.caps]
        return make_problem(self.placement, self.units, self.costs, caps, self.full, self.period)

    @property
    def has_orders(self) -> bool:
        return bool(self._finalists)

    @property
    def makespan(self) -> float:
        return self._finalists[0][0] / self._problem.ticks_per_second

    @property
    def is_optimal(self) -> bool:
        return self.makespan <= self.bound * EXACT

    def can_beat(self, makespan: float) -> bool:
        """Return whether the lower bound of this placement is below a makespan in seconds."""
        return self.bound * EXACT < makespan

    def take_first(self, clock: Clock) -> None:
        """Make a first order: microbatches at equal intervals. Keep it if it is among the best."""
        with clock.step(SearchStep.FIRST, self.num_passes):
            table = first_start(self._problem)
        if table is not None:
            self._add("evenly spaced", table)

    def take_families(self, families: Sequence[Family], clock: Clock) -> None:
        """Add families' schedules that keep the caps to the starts while there is time; a greedy order if none does.

        If that fails too, make the order of ``take_first``. Without families or time, do nothing.
        """

        def has_time() -> bool:
            share = 1.0 if self.is_periodic else _SHARE_OF_MANY_CHUNKS
            return clock.allows(SearchStep.FAMILY, self.num_passes, self.num_passes, share)

        if not families or not has_time():
            return
        offers = family_starts(families, self.placement, self._problem, self.costs, self.caps)
        while has_time():
            with clock.step(SearchStep.FAMILY, self.num_passes):
                offer = next(offers, None)
            if offer is None:
                break
            name, table = offer
            if table is not None:
                self._take(name, table)
        if not self._starts:
            for start in itertools.islice(list_schedules(self._problem), 1):
                self._take(*start)
        if not self.has_orders:
            self.take_first(clock)

    def _take(self, name: str, table: Timetable) -> None:
        if all(table.orders != start.orders for _, start in self._starts):
            self._add(name, table)
            self._starts.append((name, table))

    @property
    def starts(self) -> list[tuple[float, str, Timetable]]:
        """Return the makespan in seconds, the name and the timetable of every start that ``take_families`` added."""
        return [(table.makespan / self._problem.ticks_per_second, name, table) for name, table in self._starts]

    def more_starts(self) -> Iterator[tuple[str, Timetable]]:
        """Return the greedy orders of ``list_schedules`` that are not among the starts yet."""
        tried = {name for name, _ in self._starts}
        return (start for start in list_schedules(self._problem) if start[0] not in tried)

    def may_justify(self, clock: Clock) -> bool:
        """Return whether there is time to justify another timetable of this placement."""
        return clock.allows(SearchStep.JUSTIFY, 2 * self.num_passes, self.num_passes)

    def justify(self, name: str, table: Timetable, clock: Clock) -> None:
        """Justify a timetable twice, and keep the result under ``name`` if it is among the best."""
        with clock.step(SearchStep.JUSTIFY, 2 * self.num_passes):
            self._add(f"from {name}", justify(self._problem, justify(self._problem, table)))

    def try_random(self, rng: Random, clock: Clock) -> None:
        table = random_list_schedule(self._problem, rng)
        if table is not None:
            self.justify("list schedule, random", table, clock)

    @property
    def is_far_from_bound(self) -> bool:
        """Return whether random starts may improve much: the best makespan is at least 3 % above the lower bound.

        With parts of microbatches any distance counts, because the exact search and periodic orders do not support them.
        """
        return self.makespan > self.bound * (_FAR_FROM_BOUND if self.units.are_whole else EXACT)

    @property
    def num_passes(self) -> int:
        return 3 * self.placement.num_stages * len(self.units)

    @cached_property
    def is_periodic(self) -> bool:
        """Return whether periodic orders can be searched.

        They need at most two chunks per device, whole microbatches, messages between all neighbouring devices, and microbatches
        whose W leaves no memory behind.
        """
        hops = {frozenset(hop) for hop in pairwise(self.placement.devices)}
        neighbours = pairwise(range(self.placement.num_devices))
        few = self.units.are_whole and self.placement.num_chunks <= _CHUNKS_OF_A_CYCLE
        return few and all(frozenset(pair) in hops for pair in neighbours) and self._problem.is_steady

    @property
    def _can_be_solved(self) -> bool:
        if self.period or not self.units.are_whole:
            return False
        return self.caps is None or keeps_memory_exactly(self.placement, self.costs)

    def solve(self, reached: float, most_states: int) -> int:
        """Search exactly for an order below ``reached`` seconds, keep it, and return the number of states that were used.

        If more than ``most_states`` would be needed, the search fails and returns that number.
        A finished search raises ``bound`` to ``reached``, or to the makespan of this placement if that is less. It does
        not if full backwards may keep the caps better (``better_full``), because it has none. A period, parts of microbatches,
        and caps on memory that is not in whole numbers are not supported: no search is made, and 0 states are used.
        """
        if not self._can_be_solved:
            return 0
        shorter_than = min(self._finalists[0][0], round(reached * self._problem.ticks_per_second))
        solved = solve(self._problem, shorter_than, most_states)
        if solved is None:
            return most_states
        if solved.table is not None:
            self._add("exact", solved.table)
        if self.caps is None or not better_full(self.placement, self.costs):
            self.bound = max(self.bound, min(shorter_than, self._finalists[0][0]) / self._problem.ticks_per_second)
        return solved.states

    def explore(self, clock: Clock, effort: float, reached: float) -> None:
        """Try periodic orders until the lower bound is met, progress stops, or the effort or time is used up.

        ``effort`` multiplies the number of trials. The search also ends when intervals become so long that no order can
        be faster than ``reached`` seconds.
        """
        if self.is_optimal or not self.may_justify(clock):
            return
        from megatron_pipemem.search.periodic import PeriodicStarts  # only here, because numpy takes long to load

        short = shortened(self._problem, _MICROBATCHES_PER_DEVICE * self.placement.num_devices)
        remaining = self.units.num_microbatches - short.units.num_microbatches
        passes = len(short.device) * len(short.units)
        trials = int(effort * min(_MOST_TRIALS, max(_FEWEST_TRIALS, _PASSES_TO_TRY / passes)))
        sampler = PeriodicStarts(short, self.seed)
        idle_if_doubled = _LEFT_IDLE * self.units.num_microbatches * max(short.work) / self._problem.ticks_per_second
        evaluated = proposed = improved = 0
        while evaluated < trials * (_EFFORT_WHEN_IDLE if sampler.leaves_idle else 1) and proposed < 4 * trials:
            if sampler.is_exhausted or evaluated - improved > trials:
                break
            if not clock.allows(SearchStep.TRY, passes, self.num_passes):
                break
            if self.bound + (sampler.stretch - 1) * idle_if_doubled > reached:
                break
            proposed += 1
            with clock.step(SearchStep.TRY, passes):
                proposal = sampler.propose()
                if proposal is None:
                    continue
                evaluated += 1
                source, block = proposal
                table = as_soon_as_possible(short, block.orders())
                assert table is not None, "a periodic order ends"
                table = justify(short, table)
            source.learn(block, table.makespan)
            # Every further microbatch costs an interval, or less if justification fills gaps of the steady state.
            if (
                table.makespan + remaining * max(short.work) < self._finalists[-1][0]
                or len(self._finalists) < _FINALISTS
            ):
                if remaining and not clock.allows(SearchStep.JUSTIFY, self.num_passes, self.num_passes):
                    break
                before = self.makespan
                if remaining:
                    orders = replace(block, problem=self._problem).orders()
                    table = justify(self._problem, timetable(self._problem, orders))
                self._add("periodic", table)
                improved = evaluated if self.makespan < before else improved
                if self.is_optimal:
                    return
        self.leaves_idle = sampler.leaves_idle

    def polish(self, clock: Clock, effort: float) -> None:
        """Justify the best orders many times, which helps if the steady state idles.

        Every time, other passes are frozen, and in some trials the order is disturbed before.
        """
        import numpy as np  # only here, because it takes long to load, as in ``compiled``

        from megatron_pipemem.search.compiled import Justifier

        rng = np.random.default_rng(self.seed)
        classes, justifier = len(self._problem.device), Justifier(self._problem)
        pool = [(name, makespan, np.array(table.starts)) for makespan, _, name, table in self._finalists]
        passes = _PASSES_TO_POLISH * (_SPEED_OF_COMPILED if justifier.is_compiled else 1)
        rounds, improved = effort * passes / self.num_passes, 0
        rounds = int(rounds if self.units.are_whole else min(rounds, effort * _MOST_ROUNDS_OF_PARTS))
        patience = max(_FEWEST_TRIALS, rounds / 3)
        for number in range(rounds):
            if self.is_optimal or number - improved > patience or not self.may_justify(clock):
                return
            index = rng.integers(len(pool))
            if rng.random() < 0.5:
                chosen = rng.permutation(classes) < rng.integers(1, classes // 3, endpoint=True)
                frozen = np.repeat(chosen, len(self._problem.units))
            else:
                frozen = rng.random(self.num_passes) < rng.choice((0.02, 0.1, 0.3, 0.5))
            name, before, starts = pool[index]
            is_disturbed = rng.random() < _SHARE_OF_DISTURBED
            with clock.step(SearchStep.JUSTIFY, 2 * self.num_passes):
                moved = justifier.disturbed(starts, rng) if is_disturbed else starts
                if moved is None:
                    continue
                starts, makespan = justifier.twice(moved, frozen)
            if makespan < self._finalists[0][0]:
                self._add(f"{name.removesuffix(_POLISHED)}{_POLISHED}", justifier.timetable(starts))
                improved = number
            if makespan <= before:
                pool[index] = (name, makespan, starts)

    def _add(self, name: str, table: Timetable) -> None:
        entry = (table.makespan, len(self._finalists), name, table)
        self._finalists = sorted([*self._finalists, entry], key=lambda e: e[:2])[:_FINALISTS]

    def candidate(self) -> Candidate:
        """Return the fastest schedule; of nearly equal ones, the one that is fastest if times err by up to 20 %."""
        slack = 0 if self.is_optimal else 1e-3
        equal = [entry for entry in self._finalists if entry[0] <= self._finalists[0][0] * (1 + slack)]
        _, _, name, table = equal[most_robust(self._problem, [entry[3] for entry in equal], self.seed)]
        fused = fusable(self._problem, timetable(self._problem, table.orders))
        schedule = to_schedule(AUTO, self.placement, self._problem, table.orders, fused)
        timeline = simulate(schedule, self.costs)
        caps = self.caps or timeline.peaks
        if any(peak > loosened(cap) for peak, cap in zip(timeline.peaks, caps, strict=True)):
            # By the costs, a full backward holds more than its I and W.
            fused = self._problem.full_backwards
            schedule = to_schedule(AUTO, self.placement, self._problem, table.orders, fused)
            timeline = simulate(schedule, self.costs)
        return self._described(schedule, timeline, self.bound, name)

    def _described(self, schedule: Schedule, timeline: Timeline, bound: float, name: str) -> Candidate:
        makespan = consecutive_steps(schedule, self.costs, steps=1).period if self.period else timeline.makespan
        # The bound of an exact solution was rounded to ticks.
        return Candidate(schedule, makespan, timeline.peaks, min(bound, makespan), name)

    def recalled(self, values: Mapping[str, Any], schedule: Schedule, most_states: int) -> Candidate:
        """Return the candidate of an earlier search with this placement and these units.

        ``values`` are those of ``result.to_json``, and ``schedule`` is read from them. ``most_states`` is that of
        ``proves``. Raise a ValueError if the schedule is another kind of schedule, invalid or above the caps, or if its
        makespan or bound is false.
        """
        others = schedule.updates is not None or schedule.vocabulary_barriers or schedule.pairs
        if others or schedule.units != self.units or not schedule.kinds <= {*KINDS, Kind.B}:
            raise ValueError("its schedule is not of this search")
        validate(schedule, self.costs, self.caps)
        bound, name = float(values["lower_bound"]), repeated(str(values["found_by"]))
        candidate = self._described(schedule, simulate(schedule, self.costs), bound, name)
        if not isclose(candidate.makespan, values["makespan"], rel_tol=EXACT - 1):
            raise ValueError(f"its makespan is {candidate.makespan:.6g}, not {values['makespan']:.6g}")
        least = min(self.bound, candidate.makespan) / EXACT
        if not least <= bound <= candidate.makespan * EXACT or not self.proves(bound, most_states):
            raise ValueError(f"its bound {bound:.6g} is false")
        return candidate

    def proves(self, bound: float, most_states: int) -> bool:
        """Return whether no schedule of this placement is faster than ``bound`` seconds, by its bound or ``solve``."""
        if bound <= self.bound * EXACT:
            return True
        if self.num_passes > PASSES_TO_SOLVE or not self._can_be_solved:
            return False
        solved = solve(self._problem, int(bound / EXACT * self._problem.ticks_per_second), most_states)
        return solved is not None and solved.table is None


_SAMPLES, _ERROR = 4, 0.2


def most_robust(problem: Problem, tables: Sequence[Timetable], seed: int) -> int:
    """Return the index of the timetable whose orders are fastest on average if times have random errors up to 20 %."""
    if len(tables) == 1:
        return 0
    rng = Random(seed)
    problems = []
    for _ in range(_SAMPLES):
        ticks = tuple(max(1, round(ticks * (1 + rng.uniform(-_ERROR, _ERROR)))) for ticks in problem.ticks)
        problems.append(replace(problem, ticks=ticks))
    return min(
        range(len(tables)),
        key=lambda index: sum(timetable(other, tables[index].orders).makespan for other in problems),
    )
