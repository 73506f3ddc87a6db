"""The fastest schedule under a memory cap when activations may be kept, offloaded or recomputed."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.brief import brief
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.families.offload import uniform_repeating
from megatron_pipemem.schedule.offload.plan import OffloadPlan, plan_offload
from megatron_pipemem.schedule.offload.recompute import over_cap, recompute_plans, with_early_recompute
from megatron_pipemem.schedule.offload.weights import with_prompt_weights
from megatron_pipemem.schedule.options import AUTO, OFF, check_effort, check_recompute
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.search import search_schedule
from megatron_pipemem.schedule.simulator import simulate

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
    seconds: float = 20.0,
    effort: float = 0.3,
) -> OffloadSearchResult:
    """Find the fastest order, and for every chunk whether to keep, offload or recompute its activations.

    Orders are those of all families, uniform repeating, and those of searches under higher caps; the fastest ones are tried
    first, until no other can win. ``recompute="auto"`` lets chunks be recomputed, in part or wholly, on those devices only that
    offload alone does not bring within the cap, first what takes the fewest seconds for its memory.

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
        seconds: stop trying after so long, once something keeps the cap.
        effort: of the searches for orders, see ``search_schedule``.

    Raises:
        UnsupportedError: nothing keeps the cap; the message says what is in the way and the least peak that was reached. Or
            seconds, effort or recompute is nothing of the kind.
        CostsError: the costs fit no placement.
    """
    started = time.perf_counter()
    check_effort(seconds, effort)
    check_recompute(recompute)
    search = _Search(num_devices, num_microbatches, costs, memory_cap, host_budget)
    bases: dict[tuple, tuple[float, str, Schedule]] = {}
    deadline = started + seconds
    for name, schedule in search.orders(placements, deadline, effort):
        makespan = simulate(schedule, costs).makespan
        bases.setdefault((schedule.placement.devices, schedule.orders), (makespan, name, schedule))
    if not bases:
        raise UnsupportedError("no schedule of these placements is known for these costs; give other placements")
    found: list[OffloadCandidate] = []
    missed: list[OffloadPlan] = []
    # Uniform repeating reaches the lowest peaks: what it takes says which of the others are worth a try.
    ranked = sorted(bases.values(), key=lambda base: (not base[1].startswith(_UNIFORM), base[0]))
    for slow_down in (False, True):
        for makespan, name, schedule in ranked:
            fastest = min((candidate.plan.makespan for candidate in found), default=float("inf"))
            if found and time.perf_counter() > deadline:
                break
            # Nothing makes an order faster than it is.
            if makespan >= fastest:
                continue
            for plan in search.plans(schedule, offload, recompute, slow_down):
                if plan.keeps_cap:
                    found.append(OffloadCandidate(with_early_recompute(plan), name))
                else:
                    missed.append(plan)
        if found:
            break
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


class _Search(NamedTuple):
    num_devices: int
    num_microbatches: int
    costs: Costs
    memory_cap: float | Sequence[float]
    host_budget: float | Sequence[float] | None

    def orders(
        self, placements: Sequence[Placement] | None, deadline: float, effort: float
    ) -> Iterator[tuple[str, Schedule]]:
        """Orders to plan for, by name: those that the costs are for."""
        for name, schedule in self._all_orders(placements, deadline, effort):
            if (placements is None or schedule.placement in placements) and self._are_costs_of(schedule.placement):
                yield name, schedule

    def _are_costs_of(self, placement: Placement) -> bool:
        try:
            self.costs.seconds(placement)
            self.costs.memory_changes(placement)
            self.costs.copy_seconds(placement)
        except PipememError:
            return False
        return True

    def _all_orders(
        self, placements: Sequence[Placement] | None, deadline: float, effort: float
    ) -> Iterator[tuple[str, Schedule]]:
        p, m = self.num_devices, self.num_microbatches
        for schedule in synchronous_schedules(p, m, self.costs):
            yield schedule.name, schedule
            if schedule.placement.name == "v" and self._are_costs_of(schedule.placement):
                for most, prompt in enumerate(with_prompt_weights(schedule, self.costs)):
                    yield f"{schedule.name}, at most {most} W waiting", prompt
        chunks = range(1, _MOST_CHUNKS + 1) if placements is None else {each.num_chunks for each in placements}
        for v in chunks:
            yield f"{_UNIFORM}, {v} chunks", uniform_repeating(p, m, v)
        yield f"{_UNIFORM} over a V", uniform_repeating(p, m, 2, "v")
        caps = self.memory_cap if hasattr(self.memory_cap, "__len__") else [self.memory_cap] * p
        for number, factor in enumerate(_HIGHER):
            left = (deadline - time.perf_counter()) / 2 / (len(_HIGHER) - number)
            if left <= 0:
                return
            try:
                searched = search_schedule(
                    num_devices=p,
                    num_microbatches=m,
                    costs=self.costs,
                    memory_cap=[cap * factor for cap in caps],
                    placements=placements,
                    max_chunks=_MOST_CHUNKS,
                    seconds=left,
                    effort=effort,
                )
            except PipememError:
                continue
            for candidate in searched.candidates:
                yield f"search under {factor:g} times the cap", candidate.schedule

    def plans(self, base: Schedule, offload: bool, recompute: str, slow_down: bool) -> Iterator[OffloadPlan]:
        """With as little recomputed as ``recompute`` says, and with ever more where that does not keep the cap for free."""
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
