"""Search the fastest schedule under a memory cap when activations may be kept, offloaded or recomputed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.brief import brief
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.progress import doing, tell
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import simulate
from megatron_pipemem.schedule.families.offload import uniform_repeating
from megatron_pipemem.schedule.features.offload.plan import OffloadPlan
from megatron_pipemem.schedule.features.offload.planning import plan_offload
from megatron_pipemem.schedule.features.offload.recompute import over_cap, recompute_plans, with_early_recompute
from megatron_pipemem.schedule.features.offload.weights import with_prompt_weights
from megatron_pipemem.schedule.options import AUTO, OFF, SEARCH_SECONDS, check_effort, check_recompute
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.search.search import search_schedule

logger = logging.getLogger(__name__)

# Caps, over the one asked for, of the orders that are searched for: what exceeds it is to leave the device.
_HIGHER = (1.0, 2.0, 4.0)
_MOST_CHUNKS = 4
_UNIFORM = "uniform repeating"


class OffloadCandidate(NamedTuple):
    """An order with what its activations do.

    Args:
        plan: its round trips.
        found_by: how the order came about.
    """

    plan: OffloadPlan
    found_by: str

    def __repr__(self) -> str:
        return f"<OffloadCandidate {self.plan!r}, found by {brief(self.found_by)}>"

    @property
    def recomputed(self) -> Mapping[int, Kind]:
        return self.plan.schedule.recomputed


@dataclass(frozen=True)
class OffloadSearchResult:
    """The fastest plan found within the cap.

    Args:
        candidates: all plans that keep the cap and were worked out, the fastest first.
        seconds: how long the search took.
    """

    candidates: tuple[OffloadCandidate, ...]
    seconds: float

    def __repr__(self) -> str:
        return f"<OffloadSearchResult: {self.plan!r}, best of {len(self.candidates)} in {self.seconds:.3g} s>"

    @property
    def best(self) -> OffloadCandidate:
        return self.candidates[0]

    @property
    def plan(self) -> OffloadPlan:
        return self.best.plan

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def makespan(self) -> float:
        """Seconds."""
        return self.plan.makespan


def search_offload(
    num_devices: int,
    num_microbatches: int,
    costs: Costs,
    memory_cap: float | Sequence[float],
    *,
    host_budget: float | Sequence[float] | None = None,
    placements: Sequence[Placement] | None = None,
    offload: bool = True,
    recompute: str = "none",
    seconds: float = SEARCH_SECONDS,
    effort: float = 0.3,
) -> OffloadSearchResult:
    """Find the fastest order, and for every chunk whether to keep, offload or recompute its activations.

    Orders are those of all families and uniform repeating. All that could win are planned for, whatever the time, unless fewer
    seconds than the default are given: then the fastest of them are, as long as there is time. Then, as long as there is time,
    families over a V with fewer W waiting, and those of searches under higher caps. ``recompute="auto"`` lets chunks be
    recomputed, in part or wholly, on those devices only that offload alone does not bring within the cap, first what takes the
    fewest seconds for its memory.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m`` of one step.
        costs: with a channel, if anything is to be offloaded at a price.
        memory_cap: the most a device may hold, one number or one per device, in activation units or the unit of
            ``costs.memory``.
        host_budget: the most host memory of a device, likewise.
        placements: which to consider; default all that come up.
        offload: whether activations may leave the device.
        recompute: which forwards run again, see ``options.RECOMPUTE``.
        seconds: stop searching after so long, once something keeps the cap. With fewer than the default, a family that was
            not planned for may be faster than what is found.
        effort: of the searches for orders, see ``search_schedule``.

    Raises:
        UnsupportedError: nothing keeps the cap; the message says what is in the way and the least peak that was reached. Or
            seconds, effort or recompute is nothing of the kind.
        CostsError: the costs fit no placement.
    """
    started = time.perf_counter()
    check_effort(seconds, effort)
    check_recompute(recompute)
    search = _Search(num_devices, num_microbatches, costs, memory_cap, host_budget, placements)
    deadline = started + seconds
    attempt = _Attempt(search, offload, recompute)
    attempt.plan_all(search.known_orders(), math.inf if seconds >= SEARCH_SECONDS else deadline)
    attempt.plan_all(search.searched_orders(deadline, effort), deadline)
    if not attempt.bases:
        raise UnsupportedError("no schedule of these placements is known for these costs; give other placements")
    found, missed = attempt.found, attempt.missed
    if not found:
        raise UnsupportedError(_out_of_reach(missed, memory_cap, costs, recompute))
    found.sort(key=lambda candidate: (candidate.plan.makespan, len(candidate.plan.offloaded)))
    result = OffloadSearchResult(tuple(found), time.perf_counter() - started)
    logger.info("%s in %.2f s", result.best.found_by, result.seconds)
    return result


def _out_of_reach(
    missed: Sequence[OffloadPlan], memory_cap: float | Sequence[float], costs: Costs, recompute: str
) -> str:
    unit = "activation units" if costs.memory is None else "bytes"
    least = min(missed, key=lambda plan: max(plan.peaks))
    binds = least.binds or "one microbatch alone takes it"
    way_out = "raise the cap or the host's memory, or cut the model into more stages"
    also = "" if recompute == AUTO else ", or let recomputation be chosen too (auto)"
    return (
        f"no plan keeps the memory cap of {memory_cap} {unit}: the least peak found is {max(least.peaks):.6g}, and what is "
        f"in the way is: {binds}; {way_out}{also}"
    )


class _Attempt:
    """Plans for ever more orders.

    Args:
        search: makes the plans.
        offload: see ``search_offload``.
        recompute: see ``search_offload``.
    """

    def __init__(self, search: _Search, offload: bool, recompute: str) -> None:
        self._search, self._offload, self._recompute = search, offload, recompute
        self.bases: set[tuple] = set()
        self.found: list[OffloadCandidate] = []
        self.missed: list[OffloadPlan] = []

    def plan_all(self, orders: Iterable[tuple[str, Schedule]], deadline: float) -> None:
        """Plan for those of these orders, by name, that can win, until the deadline once something keeps the cap."""
        new: list[tuple[float, str, Schedule]] = []
        for name, schedule in orders:
            base = (schedule.placement.devices, schedule.orders)
            if base not in self.bases and self._search.admits(schedule.placement):
                self.bases.add(base)
                new.append((simulate(schedule, self._search.costs).makespan, name, schedule))
        # Uniform repeating reaches the lowest peaks: what it takes says which of the others are worth a try.
        new.sort(key=lambda base: (not base[1].startswith(_UNIFORM), base[0]))
        for slow_down in (False, True):
            over = []
            for number, (makespan, name, schedule) in enumerate(new):
                tell(lambda: f"planning copies, {len(new) - number} orders left; {self._state(deadline)}")  # noqa: B023
                if self.found and time.perf_counter() > deadline:
                    return
                # Nothing makes an order faster than it is.
                if makespan < self._fastest and not self._plan(name, schedule, slow_down):
                    over.append((makespan, name, schedule))
            new = over

    def _state(self, deadline: float) -> str:
        if not self.found:
            return "no plan keeps the cap so far"
        left = "" if deadline == math.inf else f", {max(0.0, deadline - time.perf_counter()):.0f} s left at most"
        return f"makespan {self._fastest:.6g} so far{left}"

    @property
    def _fastest(self) -> float:
        return min((candidate.plan.makespan for candidate in self.found), default=math.inf)

    def _plan(self, name: str, schedule: Schedule, slow_down: bool) -> bool:
        """Return whether some plan of an order keeps the cap."""
        keeps = False
        for plan in self._search.plans(schedule, self._offload, self._recompute, slow_down):
            keeps |= plan.keeps_cap
            if plan.keeps_cap:
                self.found.append(OffloadCandidate(with_early_recompute(plan), name))
            else:
                self.missed.append(plan)
        return keeps


class _Search(NamedTuple):
    num_devices: int
    num_microbatches: int
    costs: Costs
    memory_cap: float | Sequence[float]
    host_budget: float | Sequence[float] | None

    placements: Sequence[Placement] | None

    def admits(self, placement: Placement) -> bool:
        """Whether it is one of those to consider, and the costs are for it."""
        try:
            self.costs.seconds(placement)
            self.costs.memory_changes(placement)
            self.costs.transfer_seconds(placement)
        except PipememError:
            return False
        return self.placements is None or placement in self.placements

    def known_orders(self) -> Iterator[tuple[str, Schedule]]:
        """Orders to plan for that need no search, by name."""
        p, m = self.num_devices, self.num_microbatches
        for schedule in synchronous_schedules(p, m, self.costs):
            yield schedule.name, schedule
        given = self.placements
        for v in range(1, _MOST_CHUNKS + 1) if given is None else {each.num_chunks for each in given}:
            yield f"{_UNIFORM}, {v} chunks", uniform_repeating(p, m, v)
        yield f"{_UNIFORM} over a V", uniform_repeating(p, m, 2, "v")

    def searched_orders(self, deadline: float, effort: float) -> Iterator[tuple[str, Schedule]]:
        """Variants of the known ones, and orders found in half of the time that is left."""
        p, m = self.num_devices, self.num_microbatches
        for schedule in synchronous_schedules(p, m, self.costs):
            if schedule.placement.name == "v" and self.admits(schedule.placement):
                for most, prompt in enumerate(with_prompt_weights(schedule, self.costs)):
                    yield f"{schedule.name}, at most {most} W waiting", prompt
        caps = self.memory_cap if hasattr(self.memory_cap, "__len__") else [self.memory_cap] * p
        for number, factor in enumerate(_HIGHER):
            left = (deadline - time.perf_counter()) / 2 / (len(_HIGHER) - number)
            if left <= 0:
                return
            try:
                with doing(f"orders under {factor:g} times the cap, search {number + 1} of {len(_HIGHER)}"):
                    searched = search_schedule(
                        num_devices=p,
                        num_microbatches=m,
                        costs=self.costs,
                        memory_cap=[cap * factor for cap in caps],
                        placements=self.placements,
                        max_chunks=_MOST_CHUNKS,
                        seconds=left,
                        effort=effort,
                    )
            except PipememError:
                continue
            for candidate in searched.candidates:
                yield f"search under {factor:g} times the cap", candidate.schedule

    def plans(self, base: Schedule, offload: bool, recompute: str, slow_down: bool) -> Iterator[OffloadPlan]:
        """Return plans with as little recomputed as ``recompute`` says, and with ever more where that does not keep the
        cap for free.
        """
        select = "auto" if offload else OFF

        def planned(schedule: Schedule) -> OffloadPlan:
            return plan_offload(schedule, self.costs, select, self.memory_cap, self.host_budget, slow_down=slow_down)

        def over(schedule: Schedule) -> Collection[int]:
            free = plan_offload(schedule, self.costs, select, None, self.host_budget)
            return over_cap(free.peaks, self.memory_cap)

        for plan in recompute_plans(base, self.costs, recompute, planned, over):
            yield plan
            if plan.keeps_cap and plan.delay == 0:
                return
