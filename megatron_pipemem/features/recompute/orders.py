"""Choose which stages recompute their activations, fully or in part, and where the recomputes run in the orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product

from megatron_pipemem.features.offload.orders import OffloadPlan
from megatron_pipemem.schedule.action import MEMORY, RECOMPUTE, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.schedule import Order, Schedule

KIND_OF_MODE = {"selective": Kind.RS, "full": Kind.R}
"""The kind of action that recomputes every stage, by mode of ``options.RECOMPUTE``. ``none`` and ``auto`` have none."""

# The largest number of actions by which a recompute may move ahead.
_POSITIONS_AHEAD = (1, 2, 4, 8)


def with_recompute(schedule: Schedule, stages: Mapping[int, Kind]) -> Schedule:
    """Return the schedule with an R or RS right before each I or B of ``stages``, and without its present recomputes.

    ``stages`` maps each stage to recompute to its kind: R recomputes the whole forward, RS only a part of it. OFFLOAD
    and RELOAD are removed, because they were planned for other activations.
    """

    def orders(order: Order) -> Order:
        kept: list[Action] = []
        for action in order:
            if action.kind in MEMORY or action.kind in RECOMPUTE:
                continue
            if action.stage in stages and action.kind in (Kind.I, Kind.B):
                kept.append(action._replace(kind=stages[action.stage]))
            kept.append(action)
        return tuple(kept)

    return replace(schedule, orders=tuple(map(orders, schedule.orders)))


def recomputed_by_mode(schedule: Schedule) -> dict[str, list[int]]:
    """Return the stages with recompute by mode, for example ``{"selective": [0, 2], "full": [1]}``."""
    return {
        mode: stages
        for mode, kind in KIND_OF_MODE.items()
        if (stages := sorted(stage for stage, by in schedule.recomputed.items() if by is kind))
    }


def recompute_plans[T](
    base: Schedule, costs: Costs, mode: str, plan: Callable[[Schedule], T], over: Callable[[Schedule], Collection[int]]
) -> Iterator[T]:
    """Yield plans of the order ``base`` with the recompute of a mode: ``none``, ``selective``, ``full`` or ``auto``.

    ``auto`` may yield several plans: the first has no recompute, and each next one more on the devices that, by
    ``over``, need more memory than they may. All other modes yield one.
    """
    kinds = dict.fromkeys(range(base.num_stages), KIND_OF_MODE[mode]) if mode in KIND_OF_MODE else {}
    steps = [recompute_steps(base, costs, device) if mode == AUTO else [] for device in range(base.num_devices)]
    while True:
        schedule = with_recompute(base, kinds)
        yield plan(schedule)
        needy = [device for device in over(schedule) if steps[device]] if any(steps) else []
        if not needy:
            return
        for device in needy:
            stage, kind = steps[device].pop(0)
            kinds[stage] = kind


def recompute_steps(schedule: Schedule, costs: Costs, device: int) -> list[tuple[int, Kind]]:
    """Return the ``(stage, kind)`` by which recompute grows on a device: one more stage, or R in place of RS.

    The entry with the fewest seconds per byte saved comes first. The bytes are those of all microbatches in flight.
    """
    placement = schedule.placement
    seconds, plain = costs.seconds(placement), costs.memory_changes(placement)[Kind.F]
    spared = {}
    for kind in RECOMPUTE:
        kept = costs.memory_changes(placement, dict.fromkeys(range(placement.num_stages), kind))[Kind.F]
        spared[kind] = [stored - remaining for stored, remaining in zip(plain, kept, strict=True)]
    priced: list[tuple[float, int, Kind]] = []
    for stage in placement.stages[device]:
        passes = [_CHANGE_IN_FLIGHT.get(action.kind, 0) for action in schedule.orders[device] if action.stage == stage]
        in_flight = max(accumulate(passes), default=0)
        partial, full = ((seconds[kind][stage], spared[kind][stage]) for kind in (Kind.RS, Kind.R))
        before = (0.0, 0.0)
        # Partial recompute first, unless it takes more seconds per byte saved than full recompute.
        ways = [(Kind.RS, partial), (Kind.R, full)]
        is_partial_cheaper = partial[0] * full[1] < full[0] * partial[1]
        for kind, way in ways if is_partial_cheaper else ways[1:]:
            takes, spares = way[0] - before[0], way[1] - before[1]
            if spares > 0 and in_flight:
                priced.append((takes / spares / in_flight, stage, kind))
                before = way
    return [(stage, kind) for _, stage, kind in sorted(priced)]


_CHANGE_IN_FLIGHT = {Kind.F: 1, Kind.I: -1, Kind.B: -1}


def with_early_recompute(plan: OffloadPlan, fits: Callable[[OffloadPlan], bool]) -> OffloadPlan:
    """Return the plan with recomputes moved earlier, to where their device would wait, if the step gets shorter.

    A recomputed activation is held until its backward. So ``fits`` checks whether a plan still keeps the memory caps.
    Without caps, the peak may not rise.
    """
    if not plan.schedule.recomputed:
        return plan
    highest_peak = max(plan.peaks) if plan.memory_cap is None else math.inf
    everywhere = range(plan.schedule.num_devices)
    for devices, ahead in product((everywhere, *((device,) for device in everywhere)), _POSITIONS_AHEAD):
        orders = list(plan.schedule.orders)
        for device in devices:
            orders[device] = _earlier(orders[device], plan.timeline.spans[device], ahead)
        tried = replace(plan, schedule=replace(plan.schedule, orders=tuple(orders)))
        if tried.makespan < plan.makespan * (1 - 1e-9) and max(tried.peaks) <= highest_peak and fits(tried):
            plan = tried
    return plan


def _earlier(order: Order, spans: Sequence[tuple[float, float]], ahead: int) -> Order:
    """Return the order with each recompute before the longest wait among the ``ahead`` actions that precede it.

    ``spans`` has the start and end of each action of ``order``. A recompute stays in its place if there is no wait, and
    it stays after actions of the same stage and microbatch.
    """
    waits = [start - end for (start, _), (_, end) in zip(spans, [(0.0, 0.0), *spans], strict=False)]
    recomputes_before: list[list[Action]] = [[] for _ in order]
    unmoved: list[list[Action]] = [[action] for action in order]
    for at, action in enumerate(order):
        if action.kind in RECOMPUTE:
            first = max(0, at - ahead)
            # After the action that makes or reloads its inputs.
            while any(other[1:] == action[1:] for other in order[first:at]):
                first += 1
            place = max(range(first, at), key=lambda position: (waits[position], position), default=at)
            if place < at and waits[place] > 1e-9 * spans[-1][1]:
                waits[place] -= spans[at][1] - spans[at][0]
                recomputes_before[place].append(action)
                unmoved[at] = []
    return tuple(
        action for recomputes, own in zip(recomputes_before, unmoved, strict=True) for action in (*recomputes, *own)
    )


def plan_text(plan: OffloadPlan) -> str:
    """Return text such as ``3 activations are offloaded, 5 stay (host memory full); full recomputation of stages [0]``."""
    counts: dict[str, int] = {}
    for why in plan.kept.values():
        counts[why] = counts.get(why, 0) + 1
    stays_by_reason = "".join(f", {count} stay ({why})" for why, count in sorted(counts.items()))
    recomputations = "".join(
        f"; {mode} recomputation of stages {s}" for mode, s in recomputed_by_mode(plan.schedule).items()
    )
    return f"{len(plan.offloaded)} activations are offloaded{stays_by_reason}{recomputations}"
