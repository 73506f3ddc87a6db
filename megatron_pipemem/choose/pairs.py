"""Search for orders with pairs, from orders of families that have pairs (``features.pairs.orders``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from megatron_pipemem.features.pairs.orders import may_pair
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate

_MOST_STARTS, _LEADERS, _ATTEMPTS = 6, 2, 3
"""Limits of a search: the orders in which it moves W, the fastest of them whose other actions move too, and its attempts to
keep a cap."""


def fastest_by_search(
    paired: Sequence[Timeline],
    costs: Costs,
    caps: Sequence[float] | None,
    excess: Callable[[Schedule], Sequence[float]],
    seconds: float,
    effort: float,
    seed: int,
) -> Timeline:
    """Return the fastest of these steps and of those that a search finds from them.

    The search does not count all of the memory. ``excess`` returns by how much each device exceeds its cap, and the search is
    repeated under lower caps until nothing does. It takes at most ``seconds`` of processor time.
    """

    from megatron_pipemem.search.two_lanes import improved  # only here, because numpy and numba take long to load

    def improve_step(start: Timeline, seconds: float, effort: float) -> Timeline:
        limits = caps
        for attempt in range(_ATTEMPTS):
            schedule = improved(start.schedule, costs, limits, seconds / 2 ** (attempt + 1), effort, seed)
            over = excess(schedule)
            if not any(over):
                return min(start, simulate(schedule, costs), key=by_makespan)
            assert limits is not None, "without caps nothing exceeds them"
            limits = [limit - more for limit, more in zip(limits, over, strict=True)]
        return start

    by_makespan = attrgetter("makespan")
    may_move = [step for step in paired if step.schedule.placement.replicas == 1 and may_pair(step.schedule)]
    starts = [improve_step(step, 0.0, 0.0) for step in sorted(may_move, key=by_makespan)[:_MOST_STARTS]]
    leaders = sorted(starts, key=by_makespan)[:_LEADERS]
    return min((*paired, *(improve_step(step, seconds / len(leaders), effort) for step in leaders)), key=by_makespan)
