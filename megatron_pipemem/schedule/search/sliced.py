"""Search the orders of microbatches that are cut into slices: families that cut them, list schedules, and justification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from megatron_pipemem.errors import PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.core.bounds import lower_bound
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import simulate
from megatron_pipemem.schedule.core.validator import validate
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.registry import build_schedule, sliced_families
from megatron_pipemem.schedule.search.clock import Clock, Step
from megatron_pipemem.schedule.search.improve import Timetable
from megatron_pipemem.schedule.search.list_units import list_schedules, random_list_schedule
from megatron_pipemem.schedule.search.problem import INPUT
from megatron_pipemem.schedule.search.result import Candidate
from megatron_pipemem.schedule.search.units import as_soon_as_possible, justify, make_units

_POOL = 4
"""Timetables that are varied further, and tried as schedules, the fastest first."""
_PASSES_TO_VARY = 150_000
_MOST_ROUNDS = 60
_FEWEST_ROUNDS = 4
_RANDOM_STARTS = 1 / 3
"""Of the rounds; the others justify what is best again with a part of it frozen."""
_EXACT = 1 + 1e-6


class SlicedExploration:
    """Search within one placement, for one number of slices.

    Args:
        placement: of the stages.
        num_microbatches: of one step.
        slices: of every microbatch, at least 2.
        costs: what actions take, in seconds, and hold.
        caps: the most every device may hold, in the unit of the costs' memory; ``None`` is no limit.

    Raises:
        UnsupportedError: one microbatch exceeds a cap.
    """

    def __init__(
        self, placement: Placement, num_microbatches: int, slices: int, costs: Costs, caps: Sequence[float] | None
    ) -> None:
        self.placement, self._m, self._slices = placement, num_microbatches, slices
        self._costs, self._caps = costs, caps
        self.bound = lower_bound(placement, num_microbatches, costs, caps, slices=slices)
        self._units = make_units(placement, num_microbatches, slices, costs, caps)
        self._pool: list[tuple[int, str, Timetable]] = []
        self._families: list[tuple[float, str, Schedule]] = []
        self.num_passes = len(self._units.ticks)

    @property
    def makespan(self) -> float:
        """Return the fewest seconds reached so far."""
        reached = [seconds for seconds, _, _ in self._families]
        return min(
            [*reached, *(ticks / self._units.ticks_per_second for ticks, _, _ in self._pool)], default=float("inf")
        )

    def start(self) -> None:
        """Take the families that cut microbatches, and list schedules."""
        for name, schedule in self._built():
            try:
                self._prove(schedule)
            except ScheduleError:
                continue
            self._families.append((simulate(schedule, self._costs).makespan, name, schedule))
            orders = self._units.orders_of(schedule)
            if self._units.fits(orders) and (table := as_soon_as_possible(self._units, orders)) is not None:
                self._add(name, table)
        for name, table in list_schedules(self._units):
            self._add(name, table)

    def _built(self) -> Iterator[tuple[str, Schedule]]:
        for family in sliced_families():
            given: dict[str, Any] = {"chunks": self.placement.num_chunks, "costs": self._costs}
            if self._caps is not None and self._costs.memory is None:
                given["memory_cap"] = min(self._caps)
            options = {key: value for key, value in given.items() if key in family.options}
            try:
                schedule = build_schedule(
                    family.name,
                    num_devices=self.placement.num_devices,
                    num_microbatches=self._m,
                    slices=self._slices,
                    **options,
                )
            except PipememError:
                continue
            if schedule.placement == self.placement:
                yield family.name, schedule

    def justify_starts(self, clock: Clock) -> None:
        """Justify what there is to start from, as long as there is time."""
        for _, name, table in list(self._pool):
            self._justified(clock, name, table)

    def vary(self, clock: Clock, effort: float, seed: int) -> None:
        """Vary the best, as long as there is time and the bound leaves hope.

        Args:
            clock: of the search.
            effort: multiplies the number of trials.
            seed: of all random choices.
        """
        rng = Random(seed)
        rounds = int(effort * min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, _PASSES_TO_VARY / self.num_passes)))
        for _ in range(rounds):
            if not self._pool or self.makespan <= self.bound * _EXACT or not self._in_time(clock):
                return
            if rng.random() < _RANDOM_STARTS:
                if (start := random_list_schedule(self._units, rng)) is not None:
                    self._justified(clock, "list schedule, random", start)
                continue
            share = rng.choice((0.02, 0.1, 0.3, 0.5))
            _, name, table = rng.choice(self._pool)
            frozen = {each for each in range(self.num_passes) if rng.random() < share}
            self._justified(clock, name, table, frozen)

    def _justified(
        self, clock: Clock, name: str, table: Timetable, frozen: frozenset[int] | set[int] = frozenset()
    ) -> None:
        if not self._in_time(clock):
            return
        with clock.step(Step.JUSTIFY, 2 * self.num_passes):
            table = justify(self._units, justify(self._units, table, frozen))
            self._add(f"{name.removesuffix(', justified')}, justified", table)

    def _in_time(self, clock: Clock) -> bool:
        return clock.allows(Step.JUSTIFY, 2 * self.num_passes, self.num_passes)

    def _add(self, name: str, table: Timetable) -> None:
        if all(table.orders != known.orders for _, _, known in self._pool):
            self._pool = sorted([*self._pool, (table.makespan, name, table)], key=lambda each: each[0])[: 2 * _POOL]

    def candidate(self) -> Candidate | None:
        """Return the fastest schedule, proved within the caps; ``None`` where nothing keeps them."""
        found = list(self._families)
        for _, name, table in self._pool[:_POOL]:
            for fused in (self._fusable(table), set()):
                schedule = self._units.schedule(AUTO, table.orders, fused)
                try:
                    self._prove(schedule)
                except ScheduleError:
                    continue  # a full backward may hold more than I and W, and roundings add up
                found.append((simulate(schedule, self._costs).makespan, name, schedule))
                break
        if not found:
            return None
        least = min(seconds for seconds, _, _ in found) * (1 + 1e-12)
        timelines = [(simulate(schedule, self._costs), name) for seconds, name, schedule in found if seconds <= least]
        best, name = min(timelines, key=lambda each: each[0].peak)  # of those that are equally fast
        return Candidate(best.schedule, best.makespan, best.peaks, min(self.bound, best.makespan), name)

    def _prove(self, schedule: Schedule) -> None:
        caps = None if self._caps is None else tuple(self._caps)
        validate(schedule, self._costs, caps)

    def _fusable(self, table: Timetable) -> set[int]:
        """Return the I passes that may as well be one B with their W, because nobody needs the gradient sooner."""
        units, ends = self._units, [s + t for s, t in zip(table.starts, self._units.ticks, strict=True)]
        count, fused = units.num_units, set()
        for order in table.orders:
            for each, after in zip(order, order[1:], strict=False):
                if each // count % 3 != INPUT or after != each + count or table.starts[after] != ends[each]:
                    continue
                waiting = [(other, lag) for other, lag in units.followers[each] if other != after]
                if all(table.starts[other] >= ends[after] + lag for other, lag in waiting):
                    fused.add(each)
        return fused


def explore_slices(
    placements: Sequence[Placement],
    num_microbatches: int,
    slices: int,
    costs: Costs,
    caps: Sequence[float] | None,
    clock: Clock,
    effort: float,
    seed: int,
) -> tuple[list[Candidate], float]:
    """Return the best schedule of every placement whose microbatches are cut into so many slices, and a bound for all.

    Args:
        placements: which to consider.
        num_microbatches: of one step.
        slices: of every microbatch, at least 2.
        costs: what actions take and hold.
        caps: the most every device may hold.
        clock: of the search.
        effort: multiplies the number of trials.
        seed: of all random choices.

    Raises:
        UnsupportedError: nothing keeps the caps.
    """
    explorations, refusal = [], None
    for placement in placements:
        try:
            explorations.append(SlicedExploration(placement, num_microbatches, slices, costs, caps))
        except UnsupportedError as error:  # one microbatch exceeds a cap
            refusal = refusal or error
    for number, exploration in enumerate(explorations):
        clock.state = partial(_standing, slices, len(explorations) - number)
        exploration.start()
    for varies in (False, True):
        for exploration in sorted(explorations, key=lambda each: each.makespan):
            if exploration.bound * _EXACT >= min(each.makespan for each in explorations):
                continue
            if varies:
                exploration.vary(clock, effort, seed)
            else:
                exploration.justify_starts(clock)
    found = [candidate for each in explorations if (candidate := each.candidate()) is not None]
    if not found:
        raise refusal or UnsupportedError(
            "cap-unreachable",
            f"no order of {slices} slices was found that keeps the memory cap, although one microbatch does; raise the cap",
        )
    return found, min(each.bound for each in explorations)


def _standing(slices: int, left: int) -> str:
    return f"orders of {slices} slices, {left} placements left"
