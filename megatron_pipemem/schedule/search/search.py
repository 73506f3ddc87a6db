"""The search: a portfolio of starts for every placement, each improved, the best kept."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from random import Random
from typing import TYPE_CHECKING

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.bounds import lower_bound, one_microbatch
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import AUTO, check_effort
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.search.cache import ResultCache
from megatron_pipemem.schedule.search.improve import Timetable, as_soon_as_possible, justify
from megatron_pipemem.schedule.search.portfolio import family_starts, fusable, list_schedules, shortened
from megatron_pipemem.schedule.search.problem import make_problem, to_schedule
from megatron_pipemem.schedule.search.result import Candidate, SearchResult
from megatron_pipemem.schedule.search.robust import most_robust
from megatron_pipemem.schedule.simulator import simulate

if TYPE_CHECKING:
    from megatron_pipemem.schedule.search.periodic import Block

logger = logging.getLogger(__name__)

_EXACT = 1 + 1e-6
# Microbatches with which blocks are compared, per device: enough to start up and run dry, which is all that differs.
_MICROBATCHES_PER_DEVICE = 2
# Passes scheduled over all trials at effort 1; a trial costs about ten microseconds per pass.
_PASSES_TO_TRY = 100_000
_FEWEST_TRIALS, _MOST_TRIALS = 16, 120
_FINALISTS = 6
# Passes justified again with a part of them frozen, where the steady state idles.
_PASSES_TO_POLISH = 150_000
# Under a cap that makes the steady state idle, intervals multiply what there is to try.
_EFFORT_WHEN_IDLE = 4


def search_schedule(
    *,
    num_devices: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    placements: Sequence[Placement] | None = None,
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
        placements: which to consider; default V, interleaved with two chunks, and linear.
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
    started = time.perf_counter()
    costs = costs or Costs()
    if num_devices < 1 or num_microbatches < 1:
        raise UnsupportedError(
            f"{num_devices} devices and {num_microbatches} microbatches are no step; give at least 1 of each"
        )
    check_effort(seconds, effort, seed)
    caps = _checked_caps(memory_cap, num_devices)
    if placements is None:
        placements = _usual_placements(num_devices, costs)
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
    # A placement whose bound is no better than what another one has reached cannot win.
    explorations.sort(key=lambda e: e.bound)
    deadline = started + seconds
    for step in (_Exploration.take_families, _Exploration.justify_starts):
        for exploration in explorations:
            if time.perf_counter() < deadline or not any(e.found_any for e in explorations):
                step(exploration, deadline)
    explorations = [exploration for exploration in explorations if exploration.found_any]
    if not explorations:
        raise UnsupportedError(_nothing_fits(placements, costs, memory_cap))
    for index, exploration in enumerate(explorations):
        reached = min(e.makespan for e in explorations)
        if exploration.bound * _EXACT < reached:
            # The favourite gets the full effort; the others must show promise with less.
            exploration.explore(deadline, effort if index == 0 else effort / 5)
    candidates = sorted((e.candidate() for e in explorations), key=lambda c: (c.makespan, -c.lower_bound))
    result = SearchResult(tuple(candidates), time.perf_counter() - started)
    logger.info("%s in %.2f s, gap %.2f%%", result.best.found_by, result.seconds, 100 * result.gap)
    if cache is not None and (result.is_optimal or time.perf_counter() < deadline):
        cache.put(question, result)
    return result


def _usual_placements(num_devices: int, costs: Costs) -> tuple[Placement, ...]:
    """V, interleaved with two chunks, linear; of these, the ones that costs per stage are for.

    Raises:
        CostsError: they are for none.
    """
    p = num_devices
    usual = tuple(dict.fromkeys((Placement.v_shape(p), Placement.interleaved(p, 2), Placement.linear(p))))
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
        raise CostsError(f"the costs fit neither {p} stages (linear) nor {2 * p} (V, interleaved): {problem}")
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

    def __post_init__(self) -> None:
        unit = self.costs.memory_unit(self.placement)
        caps = None if self.caps is None else [cap / unit for cap in self.caps]
        self._problem, self._ticks_per_second = make_problem(self.placement, self.num_microbatches, self.costs, caps)
        self.bound = lower_bound(self.placement, self.num_microbatches, self.costs, self.caps)

    @property
    def found_any(self) -> bool:
        return bool(self._finalists)

    @property
    def makespan(self) -> float:
        return self._finalists[0][0] / self._ticks_per_second

    def take_families(self, deadline: float) -> None:
        """What every family has to offer as it is; without any, list schedules. At least one, even after the deadline."""
        for starts in (
            family_starts(self.placement, self._problem, self.costs, self.caps),
            list_schedules(self._problem),
        ):
            if self.found_any:
                return
            for name, table in starts:
                self._add(name, table)
                self._starts.append((name, table))
                if time.perf_counter() > deadline:
                    return

    def justify_starts(self, deadline: float) -> None:
        """Improve what the families offered, and list schedules."""
        tried = {name for name, _ in self._starts}
        more = (start for start in list_schedules(self._problem) if start[0] not in tried)
        for name, table in chain(self._starts, more):
            if self.found_any and (self.makespan <= self.bound * _EXACT or time.perf_counter() > deadline):
                return
            self._add(f"{name}, justified", justify(self._problem, justify(self._problem, table)))

    def explore(self, deadline: float, effort: float) -> None:
        """Try periodic starts until the bound is met, the effort is spent, or time is over.

        Args:
            deadline: on the clock of ``time.perf_counter``.
            effort: see ``search_schedule``.
        """
        from megatron_pipemem.schedule.search.periodic import PeriodicStarts  # numpy takes a while to load

        if not PeriodicStarts.suits(self._problem) or self.makespan <= self.bound * _EXACT:
            return
        short = shortened(self._problem, _MICROBATCHES_PER_DEVICE * self.placement.num_devices)
        rest = self._problem.num_microbatches - short.num_microbatches
        passes = len(short.device) * short.num_microbatches
        trials = int(effort * min(_MOST_TRIALS, max(_FEWEST_TRIALS, _PASSES_TO_TRY / passes)))
        sampler = PeriodicStarts(short, self.seed)
        evaluated = proposed = 0
        while evaluated < trials * (_EFFORT_WHEN_IDLE if sampler.idles else 1) and proposed < 4 * trials:
            if time.perf_counter() > deadline or sampler.exhausted:
                break
            proposed += 1
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
                self._finish(block, table, rest)
                if self.makespan <= self.bound * _EXACT:
                    return
        if sampler.idles:
            self._polish(deadline, effort)

    def _polish(self, deadline: float, effort: float) -> None:
        """Justify the best again and again with changing parts frozen: a steady state that idles has room to move."""
        rng = Random(self.seed)
        problem = self._problem
        classes, m = len(problem.device), problem.num_microbatches
        pool = [entry[3] for entry in self._finalists]
        for _ in range(int(effort * _PASSES_TO_POLISH / (classes * m))):
            if time.perf_counter() > deadline:
                return
            index = rng.randrange(len(pool))
            if rng.random() < 0.5:
                whole = set(rng.sample(range(classes), rng.randint(1, classes // 3)))
                frozen = {each for each in range(classes * m) if each // m in whole}
            else:
                share = rng.choice((0.02, 0.1, 0.3, 0.5))
                frozen = {each for each in range(classes * m) if rng.random() < share}
            table = justify(problem, justify(problem, pool[index], frozen))
            if table.makespan < self._finalists[0][0]:
                self._add("periodic, polished", table)
            if table.makespan <= pool[index].makespan:
                pool[index] = table

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
        return Candidate(schedule, timeline.makespan, timeline.peaks, self.bound, name)
