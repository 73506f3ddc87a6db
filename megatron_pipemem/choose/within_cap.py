"""Keep a memory cap: the one loop that tightens it, and the plans of offload and recomputation within it, with the orders that
they start from beside those of searches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from megatron_pipemem.choose.knowledge import Knowledge
from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.families.offload import uniform_repeating, with_prompt_weights
from megatron_pipemem.features.offload.planning import plan_offload
from megatron_pipemem.features.offload.transfers import OffloadPlan
from megatron_pipemem.features.recompute.orders import recompute_plans, with_early_recompute
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import tell
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate

UNIFORM = "uniform repeating"


def known_orders(
    families: Iterable[Schedule], num_microbatches: int, placements: Sequence[Placement]
) -> Iterator[tuple[str, Schedule]]:
    """Yield the orders of the families, and those of uniform repeating in these placements, by name.

    Args:
        families: their schedules in these placements.
        num_microbatches: of one step.
        placements: which to consider.
    """
    p, m = placements[0].num_devices, num_microbatches
    found = [(schedule.name, schedule) for schedule in families]
    found += [(f"{UNIFORM}, {v} chunks", uniform_repeating(p, m, v)) for v in {each.num_chunks for each in placements}]
    found.append((f"{UNIFORM} over a V", uniform_repeating(p, m, 2, "v")))
    return ((name, schedule) for name, schedule in found if schedule.placement in placements)


def prompt_orders(families: Iterable[Schedule], costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """Yield the orders of those of the families that are over a V with fewer W waiting, by name."""
    for schedule in families:
        if schedule.placement.name == "v":
            for most, prompt in enumerate(with_prompt_weights(schedule, costs)):
                yield f"{schedule.name}, at most {most} W waiting", prompt


_ATTEMPTS = 4


def attempts(request: Request, knowledge: Knowledge) -> int:
    """Return how often to look for something within a cap: several times where what is found grows afterwards, by messages
    whose bytes are known, or by vocabulary passes.
    """
    grows = request.barriers or (request.in_bytes and knowledge.changes is not None)
    return _ATTEMPTS if grows and request.memory_cap is not None else 1


def tightened[T](
    caps: Sequence[float] | None,
    find: Callable[[Sequence[float] | None], tuple[T, Sequence[float]]],
    attempts: int,
    margin: float = 0.0,
) -> tuple[T, Sequence[float]]:
    """Return what is found within the caps; as long as that exceeds them after all, within caps lowered by as much.

    Args:
        caps: one per device; ``None`` for none, with one attempt.
        find: finds something within caps, as far as it can count, and tells by how much every device really exceeds those that
            are asked for.
        attempts: how often to look at most.
        margin: by which caps are lowered besides.
    """
    found, over = find(caps)
    for _ in range(attempts - 1):
        if not any(over):
            break
        assert caps is not None, "nothing exceeds no caps"
        caps = tuple(cap - more - margin if more else cap for cap, more in zip(caps, over, strict=True))
        if min(caps) <= 0:
            break
        try:
            found, over = find(caps)
        except UnsupportedError:  # nothing is within the lower caps
            break
    return found, over


class Plans:
    """What is recomputed, and the round trips of activations, in one order after another: plans that keep the cap, and others.

    Args:
        request: says what may leave the device or be recomputed, within which cap.
        knowledge: of bytes, and of the host's memory.
        costs: with the memory that the cap is about.
    """

    def __init__(self, request: Request, knowledge: Knowledge, costs: Costs) -> None:
        self._request, self._knowledge, self._costs = request, knowledge, costs
        self._attempts = attempts(request, knowledge)
        self._known: set[tuple] = set()
        self.kept: list[tuple[OffloadPlan, str]] = []
        """Those that keep the cap, and how their orders came about."""
        self._missed: list[tuple[float, OffloadPlan]] = []

    def add(self, name: str, order: Schedule, slow_down: bool = True) -> bool:
        """Plan for an order with as little recomputed as is asked for, and with ever more where that keeps no cap for free.

        Args:
            name: how the order came about.
            order: compute actions only.
            slow_down: whether the steady state may become slower where only that keeps the cap.

        Returns:
            Whether some plan keeps the cap.
        """
        before = len(self.kept)
        within_cap = partial(self._within_cap, slow_down)
        for plan, over in recompute_plans(order, self._costs, self._request.recompute, within_cap, self._needy):
            if any(over):
                self._missed.append((max(over), plan))
                continue
            self.kept.append((with_early_recompute(plan, lambda tried: not any(self._over(tried))), name))
            if plan.delay == 0:
                break
        return len(self.kept) > before

    def add_all(self, orders: Iterable[tuple[str, Schedule]], deadline: float) -> None:
        """Plan for those of these orders, by name, that can win, until the deadline once something keeps the cap."""
        new: list[tuple[float, str, Schedule]] = []
        for name, order in orders:
            known = (order.placement.devices, order.orders)
            if known not in self._known:
                self._known.add(known)
                new.append((simulate(order, self._costs).makespan, name, order))
        # Uniform repeating reaches the lowest peaks: what it takes says which of the others are worth a try.
        new.sort(key=lambda each: (not each[1].startswith(UNIFORM), each[0]))
        for slow_down in (False, True):
            over = []
            for number, (makespan, name, order) in enumerate(new):
                tell(lambda: f"planning copies, {len(new) - number} orders left; {self._state(deadline)}")  # noqa: B023
                if self.kept and time.perf_counter() > deadline:
                    return
                # Nothing makes an order faster than it is.
                if makespan < self._fastest and not self.add(name, order, slow_down):
                    over.append((makespan, name, order))
            new = over

    def fastest(self) -> tuple[OffloadPlan, str]:
        """Return the fastest plan that keeps the cap, and how its order came about.

        Raises:
            MemoryCapError: none keeps it.
            UnsupportedError: no order was there to plan for.
        """
        if not (self.kept or self._missed):
            raise UnsupportedError(
                "cap-unreachable", "no schedule of these placements is known for these costs; give other placements"
            )
        if not self.kept:
            raise self._refusal()
        return min(self.kept, key=lambda each: (each[0].makespan, len(each[0].offloaded)))

    def _refusal(self) -> MemoryCapError:
        _, plan = min(self._missed, key=lambda each: each[0])
        request = self._request
        least = MemoryCap(max(self._knowledge.held(plan.schedule, self._costs)), request.in_bytes)
        why = f"; what stays: {plan.binds}" if plan.binds else ""
        return MemoryCapError(
            "cap-unreachable",
            f"no plan of {request.schedule} with offload {request.offload} and recompute {request.recompute} keeps a memory "
            f"cap of {request.memory_cap}: the least found is {least}{why}; raise the cap, or let offload, recompute or the "
            "schedule be chosen (auto)",
            obstacles=tuple(sorted(plan.obstacles)),
        )

    def _state(self, deadline: float) -> str:
        if not self.kept:
            return "no plan keeps the cap so far"
        left = "" if deadline == math.inf else f", {max(0.0, deadline - time.perf_counter()):.0f} s left at most"
        return f"makespan {self._fastest:.6g} so far{left}"

    @property
    def _fastest(self) -> float:
        return min((plan.makespan for plan, _ in self.kept), default=math.inf)

    def _over(self, plan: OffloadPlan) -> Sequence[float]:
        return self._knowledge.excess(self._request, plan.schedule, self._costs)

    def _plan(self, order: Schedule, caps: Sequence[float] | None, slow_down: bool) -> OffloadPlan:
        budget = self._knowledge.host_budget
        return plan_offload(order, self._costs, self._request.offload, caps, budget, slow_down=slow_down)

    def _within_cap(self, slow_down: bool, order: Schedule) -> tuple[OffloadPlan, Sequence[float]]:
        def find(caps: Sequence[float] | None) -> tuple[OffloadPlan, Sequence[float]]:
            plan = self._plan(order, caps, slow_down)
            return plan, self._over(plan)

        return tightened(self._request.caps(order.num_devices), find, self._attempts, self._knowledge.message)

    def _needy(self, order: Schedule) -> Collection[int]:
        return [device for device, more in enumerate(self._over(self._plan(order, None, True))) if more]
