"""Run the passes of sliced microbatches by urgency, within the caps: starts for an improvement that need no family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from random import Random

from megatron_pipemem.schedule.search.improve import Timetable
from megatron_pipemem.schedule.search.problem import FORWARD, INPUT, WEIGHT, Orders
from megatron_pipemem.schedule.search.units import Units


def dispatch(units: Units, urgency: Sequence[float]) -> Timetable | None:
    """Run the step by urgency. A forward starts only where there is room for all forwards of its microbatch and of those
    before it that its device has still to run, and for what its backwards take; else none of them could turn round.

    Args:
        units: the passes and the caps.
        urgency: per pass, smaller runs earlier.

    Returns:
        ``None`` when the devices came to a stop because no cap admitted what was ready.
    """
    count, devices = units.num_units, len(units.caps)
    whole, taken = zip(*(_alone(units, stages) for stages in units.placement.stages), strict=True)
    # Of every device, how many microbatches have begun, and what all forwards so far have taken.
    begun, forwarded = [0] * devices, [0] * devices
    classes: list[list[int]] = [[] for _ in range(devices)]
    for c in range(len(units.ticks) // count):
        classes[units.device[c * count]].append(c)
    upcoming = [c * count for c in range(len(units.ticks) // count)]
    ready, missing = [0] * len(units.ticks), [len(waits) for waits in units.waits]
    levels, busy = [0] * devices, [0] * devices
    orders: Orders = [[] for _ in range(devices)]
    starts = [-1] * len(units.ticks)
    events = [(0, device) for device in range(devices)]
    left = len(starts)
    while events:
        now, device = heappop(events)
        if busy[device] > now:
            continue
        best, least = -1, float("inf")
        for c in classes[device]:
            each = upcoming[c]
            if each == (c + 1) * count or missing[each] or ready[each] > now or urgency[each] >= least:
                continue
            change = needed = units.change[each]
            if c % 3 == FORWARD:
                owing = max(begun[device], each % count // units.slices + 1)
                needed = owing * whole[device] - forwarded[device] + taken[device]
            if change <= 0 or levels[device] + needed <= units.caps[device]:
                best, least = each, urgency[each]
        if best < 0:
            continue
        upcoming[best // count] += 1
        starts[best], busy[device] = now, now + units.ticks[best]
        orders[device].append(best)
        levels[device] += units.change[best]
        if best // count % 3 == FORWARD:
            begun[device] = max(begun[device], best % count // units.slices + 1)
            forwarded[device] += units.change[best]
        left -= 1
        heappush(events, (busy[device], device))
        for other, lag in units.followers[best]:
            ready[other] = max(ready[other], busy[device] + lag)
            missing[other] -= 1
            if units.device[other] != device:
                heappush(events, (busy[device] + lag, units.device[other]))
    return None if left else Timetable(orders, starts, max(busy))


def _alone(units: Units, stages: Sequence[int]) -> tuple[int, int]:
    """Return what all forwards of a microbatch take on a device, and what its backwards then take at most on the way.

    Args:
        units: the passes.
        stages: of the device.
    """
    count, parts = units.num_units, range(units.slices)

    def changes(stage: int, kind: int) -> list[int]:
        return [units.change[(3 * stage + kind) * count + part] for part in parts]

    backwards = [
        change
        for stage in reversed(stages)
        for of_slice in zip(changes(stage, INPUT), changes(stage, WEIGHT), strict=True)
        for change in of_slice
    ]
    return sum(sum(changes(stage, FORWARD)) for stage in stages), max(0, *accumulate(backwards))


def list_schedules(units: Units) -> Iterator[tuple[str, Timetable]]:
    """Yield greedy orders; the last runs one microbatch after the other and fits any cap that admits one."""
    stages, n = units.placement.num_stages, units.slices

    def depth_first(c: int, rank: int) -> float:
        stage, kind = divmod(c, 3)
        return {FORWARD: -stage, INPUT: stage + 1 - 2 * stages, WEIGHT: 2 * stages}[kind] + 0.1 * rank

    def oldest(c: int, rank: int) -> float:
        return rank + (c % 3 == WEIGHT) - (c % 3 == INPUT) * n

    def one_by_one(c: int, rank: int) -> float:
        return rank // n * 8.0 + c % 3

    rules: dict[str, Callable[[int, int], float]] = {
        "backward first": depth_first,
        "oldest first": oldest,
        "one by one": one_by_one,
    }
    for name, rule in rules.items():
        if (table := _by_rule(units, rule)) is not None:
            yield f"list schedule, {name}", table


def random_list_schedule(units: Units, rng: Random) -> Timetable | None:
    """Return a greedy order by a random weighting of a slice's age, of the way it has left, and of how long W can wait."""
    stages = units.placement.num_stages
    age, way, put_off = 2 ** rng.uniform(0, 3) / units.slices, rng.uniform(0.2, 0.8), rng.uniform(0.2, 1.0)

    def rule(c: int, rank: int) -> float:
        stage, kind = divmod(c, 3)
        inputs = way * (2 * stages - 1 - stage)
        return {FORWARD: -way * stage, INPUT: -inputs, WEIGHT: put_off * stages - inputs}[kind] + age * rank

    return _by_rule(units, rule)


def _by_rule(units: Units, rule: Callable[[int, int], float]) -> Timetable | None:
    count = units.num_units
    table = dispatch(units, [rule(c, rank) for c in range(len(units.ticks) // count) for rank in range(count)])
    return table if table is not None and units.fits(table.orders) else None
