"""Choose the pairs of a schedule: forwards that run together with a neighbouring backward (``Schedule.pairs``).

In a mixture of experts, tokens travel between ranks in every forward and backward. The two actions of a pair run layer
by layer in turn, so that one computes while the tokens of the other travel.

The choice is made in a simulated run. A device that is about to start an action looks at the next one of its order. If
the inputs of both have arrived, or arrive soon enough, the two become a pair. The run knows only actions that
started before, so a pair never waits for its own result, and devices never wait in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import NEVER, Dependencies
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate

ASSUMED_SHARE = 0.4
"""The share of F and I in which the tokens of experts travel, for costs that do not have it. It is 30 to 50 % in large
models with many experts on several nodes."""

_BACKWARDS = (Kind.I, Kind.B)
_PATIENCE = (1.0, 0.5, 0.0)
"""The longest time for which an action waits for the other one of its pair, as shares of the seconds that the pair saves. All
of them are tried."""


def may_pair(schedule: Schedule) -> bool:
    """Return whether the actions of a schedule may run in pairs.

    They may not with parts of microbatches, recomputation, offload, vocabulary passes or asynchronous updates.
    """
    others = schedule.recomputed, schedule.offloads, schedule.vocabulary_barriers, schedule.updates
    return schedule.units.are_whole and not any(others)


def with_pairs(schedule: Schedule, costs: Costs, keeps_cap: Callable[[Schedule], bool] = lambda _: True) -> Timeline:
    """Return the simulated step of the fastest version of a schedule: of itself, or of one of six with pairs.

    Versions with pairs for which ``keeps_cap`` is false are left out.

    In a pair the forward comes first. A forward that is moved before its neighbouring backward for this raises the
    device's peak.
    """
    ways = ((patience, swaps) for patience in _PATIENCE for swaps in (True, False))
    paired = dict.fromkeys(_greedy(schedule, costs, *way) for way in ways)
    versions = [schedule, *filter(keeps_cap, paired)]
    return min((simulate(version, costs) for version in versions), key=lambda timeline: timeline.makespan)


def _greedy(schedule: Schedule, costs: Costs, patience: float, swaps: bool) -> Schedule:
    """Return the schedule with a pair wherever both actions can start together and end sooner than apart.

    The choice is made in a simulated run. ``patience`` is the longest wait for the second action, as a share of the
    seconds that the pair saves. ``swaps`` allows pairs of a backward and the forward after it, which then stand in the
    other order.
    """
    dependencies = Dependencies.of_schedule(schedule)
    prices = ActionPrices(schedule, costs)
    graph, seconds, lags = prices.of_graph(dependencies)
    actions, lanes, waits = dependencies.actions, dependencies.lanes, graph.waits
    ends: dict[int, float] = {NEVER: 0.0}
    free = [0.0] * len(lanes)
    waiting: dict[int, list[int]] = {}
    runnable: list[tuple[float, int]] = []
    following = [lane.start for lane in lanes]
    orders: list[list[Action]] = [[] for _ in lanes]
    pairs = set()

    def arrival(node: int) -> float:
        return max((ends[needed] + lags[link] for needed, link in waits[node]), default=0.0)

    def missing(node: int) -> int | None:
        return next((needed for needed, _ in waits[node] if needed not in ends), None)

    def queue(lane: int) -> None:
        node = following[lane]
        if node == lanes[lane].stop:
            return
        if (needed := missing(node)) is None:
            heappush(runnable, (max(free[lane], arrival(node)), lane))
        else:
            waiting.setdefault(needed, []).append(lane)

    for lane in range(len(lanes)):
        queue(lane)
    while runnable:
        start, lane = heappop(runnable)
        first = following[lane]
        second = first + 1
        run = [first]
        end = start + seconds[graph.prices[first]]
        is_pair_runnable = second < lanes[lane].stop and missing(second) is None
        if is_pair_runnable and (pair := _pair_of(actions[first], actions[second], swaps)) is not None:
            forward, backward = pair
            together = max(start, arrival(second))
            apart = max(end, arrival(second)) + seconds[graph.prices[second]]
            both = prices.of(*forward) + prices.second_of_pair(forward, backward)
            saved = seconds[graph.prices[first]] + seconds[graph.prices[second]] - both
            if together - start <= patience * saved and together + both < apart:
                run, end = [first, second], together + both
                pairs.add(forward)
                orders[lane] += [forward, backward]
        if len(run) == 1:
            orders[lane].append(actions[first])
        free[lane] = end
        following[lane] += len(run)
        for node in run:
            ends[node] = end
            for other in waiting.pop(node, ()):
                queue(other)
        queue(lane)
    return replace(schedule, orders=tuple(map(tuple, orders)), pairs=frozenset(pairs))


def _pair_of(first: Action, second: Action, swaps: bool) -> tuple[Action, Action] | None:
    """Return two consecutive actions as a pair, the forward first; ``None`` if they cannot be a pair.

    They cannot if they are of the same stage and microbatch, or are not one forward and one backward. Without
    ``swaps``, they cannot if the backward is the first of them.
    """
    if first[1:] == second[1:]:
        return None
    if first.kind is Kind.F and second.kind in _BACKWARDS:
        return first, second
    return (second, first) if swaps and second.kind is Kind.F and first.kind in _BACKWARDS else None
