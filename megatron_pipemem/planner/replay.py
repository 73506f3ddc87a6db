"""Compute the makespan of one order under many costs.

A planner prices the same order again and again: other tensor parallelism, other microbatches, the same sequence of passes. What
every pass waits for is worked out once; a replay is then one sweep over the passes and agrees with ``simulate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import dependencies, peaks, simulate
from megatron_pipemem.schedule.registry import build_schedule

_LONG = 4  # a step of more microbatches per device than this is two shorter ones, extended
_Pass = tuple[int, int, tuple[tuple[int, int], ...]]  # device, price, (pass, link) that it waits for


@dataclass(frozen=True)
class Replay:
    """A schedule, ready to be priced.

    Args:
        schedule: F, I, W and B of whole microbatches.

    Raises:
        ScheduleError: the schedule waits for ever.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        schedule, placement = self.schedule, self.schedule.placement
        devices, stages = placement.devices, placement.num_stages
        fused = {action for order in schedule.orders for action in order if action.kind is Kind.B}
        index: dict[Action, int] = {}  # in an order in which passes come after all that they wait for
        passes: list[_Pass] = []
        waiting: dict[Action, list[int]] = {}
        following, runnable = [0] * placement.num_devices, list(range(placement.num_devices))
        while runnable:
            device = runnable.pop()
            order = schedule.orders[device]
            while following[device] < len(order):
                action = order[following[device]]
                needed = dependencies(action, placement, fused)
                # A device's own order sees to the others.
                needed = [each for each in needed if devices[each.stage] != device]
                if (missing := next((each for each in needed if each not in index), None)) is not None:
                    waiting.setdefault(missing, []).append(device)
                    break
                links = tuple((index[each], devices[each.stage] * placement.num_devices + device) for each in needed)
                index[action] = len(passes)
                passes.append((device, _KINDS.index(action.kind) * stages + action.stage, links))
                following[device] += 1
                runnable += waiting.pop(action, ())
        if waiting:
            simulate(schedule)  # says who waits for whom
        object.__setattr__(self, "_passes", passes)

    def makespan(self, costs: Costs) -> float:
        """Seconds."""
        placement, p = self.schedule.placement, self.schedule.num_devices
        seconds = costs.seconds(placement)
        prices = [price for kind in _KINDS for price in seconds[kind]]
        neighbours = {tuple(placement.devices[s : s + 2]) for s in range(placement.num_stages - 1)}
        links = {}
        for a, b in neighbours:
            links |= {a * p + b: costs.link_seconds(a, b), b * p + a: costs.link_seconds(b, a)}
        free, ends = [0.0] * p, []
        for device, price, needed in self._passes:
            start = free[device]
            for other, link in needed:
                if (arrived := ends[other] + links[link]) > start:
                    start = arrived
            free[device] = end = start + prices[price]
            ends.append(end)
        return max(free)

    def peaks(self, costs: Costs) -> tuple[float, ...]:
        """Per device, the most it holds."""
        return peaks(self.schedule.orders, self.schedule.placement, costs)


@lru_cache(maxsize=256)
def replay(name: str, num_devices: int, num_microbatches: int, chunks: int | None) -> Replay:
    """Return a replay of a family's schedule.

    Args:
        name: of the family.
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        chunks: stages per device; ``None`` where the family has no choice.

    Raises:
        PipememError: the family cannot be built so.
    """
    options = {} if chunks is None else {"chunks": chunks}
    return Replay(build_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches, **options))


def lengths(num_devices: int, num_microbatches: int) -> tuple[int, ...]:
    """How many microbatches to run instead of all of a step: all, or two shorter steps to extend."""
    whole = num_devices * _LONG
    if num_microbatches <= whole + 3 * num_devices:
        return (num_microbatches,)
    longer = whole + num_microbatches % num_devices
    return longer - num_devices, longer


def same_passes(costs: Costs) -> tuple[object, ...]:
    """What a replay depends on: equal for costs that differ in copies or in the vocabulary's passes only."""
    links = tuple(sorted(costs.p2p.items())) if isinstance(costs.p2p, Mapping) else costs.p2p
    kept = None if costs.memory is None else tuple(costs.memory.get(kind) for kind in _KINDS)
    return costs.forward, costs.backward_input, costs.backward_weight, links, kept


def measured(
    name: str, num_devices: int, num_microbatches: int, chunks: int | None, costs: Costs
) -> tuple[float, tuple[float, ...]]:
    """Return seconds and peaks of a family's step.

    Args:
        name: of the family.
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        chunks: stages per device; ``None`` where the family has no choice.
        costs: what actions take, in seconds, and hold.
    """
    counts = lengths(num_devices, num_microbatches)
    if len(counts) == 1:
        one = replay(name, num_devices, num_microbatches, chunks)
        return one.makespan(costs), one.peaks(costs)
    shorter, longer = counts
    a, b = (replay(name, num_devices, count, chunks) for count in counts)
    more = (num_microbatches - longer) / (longer - shorter)
    seconds = b.makespan(costs)
    held = zip(a.peaks(costs), b.peaks(costs), strict=True)
    return seconds + more * (seconds - a.makespan(costs)), tuple(y + more * (y - x) for x, y in held)


_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
