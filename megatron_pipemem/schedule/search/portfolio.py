"""List orders to start from that need no search: every registered family, and list scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from megatron_pipemem.errors import PipememError
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.registry import Family, build_schedule
from megatron_pipemem.schedule.search.improve import Timetable, as_soon_as_possible, dispatch, timetable
from megatron_pipemem.schedule.search.problem import FORWARD, INPUT, WEIGHT, Orders, Problem, from_schedule

# By how much the interval of the first start grows until it fits.
_STRETCH = 1.1


def first_start(problem: Problem) -> Timetable | None:
    """Return microbatches at equal intervals, as far apart as it takes to keep the caps: a start for any of them, at
    once.

    A microbatch's passes are where they would be if it had the devices to itself; where two collide, the earlier is first.

    Returns:
        ``None`` when even one microbatch after the other exceeds the caps.
    """
    m, starts, now = problem.num_microbatches, [0] * len(problem.ticks), 0
    for c in problem.way:
        now += next((lag for _, lag in problem.waits[c]), 0)
        starts[c] = now
        now += problem.ticks[c]
        if c % 3 == INPUT:
            starts[c + 1] = now
    interval, alone = max(problem.work), max(start + ticks for start, ticks in zip(starts, problem.ticks, strict=True))
    while True:
        orders = [
            sorted((c * m + k for c in classes for k in range(m)), key=lambda e: starts[e // m] + e % m * interval)
            for classes in problem.classes
        ]
        if problem.fits(orders):
            return as_soon_as_possible(problem, orders)
        if interval >= alone:
            orders = _one_by_one(problem)
            return as_soon_as_possible(problem, orders) if problem.fits(orders) else None
        interval = min(alone, int(interval * _STRETCH) + 1)


def _one_by_one(problem: Problem) -> Orders:
    """Run one microbatch after the other, and what only takes memory last: W, where I has given back more than F has
    taken.
    """
    orders: Orders = []
    for classes in problem.classes:
        forwards = [c for c in classes if c % 3 == FORWARD]
        weights = [c for c in classes if c % 3 == WEIGHT]
        late = {c for c in weights if problem.change[c] > 0}
        turn = [*forwards]
        for c in reversed(forwards):
            turn += [each for each in (c + INPUT, c + WEIGHT) if each not in late]
        m = problem.num_microbatches
        passes = [c * m + k for k in range(m) for c in turn]
        orders.append([*passes, *(c * m + k for k in range(m) for c in weights if c in late)])
    return orders


def family_starts(
    families: Sequence[Family], placement: Placement, problem: Problem, costs: Costs, caps: Sequence[float] | None
) -> Iterator[tuple[str, Timetable | None]]:
    """Yield the families' schedules of a placement by name; ``None`` for those that do not fit the caps.

    Args:
        families: to try.
        placement: of the stages.
        problem: in ticks.
        costs: what actions take, in seconds, and hold.
        caps: the most every device may hold, in the unit of the costs' memory; ``None`` is no limit.
    """
    given: dict[str, Any] = {"costs": costs}
    if caps is not None and costs.memory is None:
        given["memory_cap"] = min(caps)
    p, m = placement.num_devices, problem.num_microbatches
    for each in families:
        options = {name: value for name, value in given.items() if name in each.options}
        if "chunks" in each.options:
            options["chunks"] = placement.num_chunks
        elif each.placement != placement.name:
            continue
        shape = {"num_devices": p, **options}
        try:
            # One microbatch tells at once where the stages are.
            if build_schedule(each.name, num_microbatches=1, **shape).placement != placement:
                continue
            orders = from_schedule(build_schedule(each.name, num_microbatches=m, **shape))
            if "group_size" in each.options and not problem.fits(orders):
                shape["group_size"] = _largest_group(each.name, problem, shape)
                orders = from_schedule(build_schedule(each.name, num_microbatches=m, **shape))
        except PipememError:
            continue
        table = None
        if problem.fits(orders):
            table = timetable(problem, orders)
        yield each.name, table


def _largest_group(name: str, problem: Problem, shape: Mapping[str, Any]) -> int:
    """Return the largest group size that keeps the caps: larger groups of microbatches hold more and idle less.

    Raises:
        UnsupportedError: the family takes no groups that small.
    """
    fits, exceeds = 1, problem.num_devices
    while exceeds - fits > 1:
        size = (fits + exceeds) // 2
        # Two whole groups, or as many as fill the pipeline, hold as much as any number of them.
        some = shortened(problem, size * max(2, -(-problem.num_devices // size)))
        schedule = build_schedule(name, num_microbatches=some.num_microbatches, group_size=size, **shape)
        if some.fits(from_schedule(schedule)):
            fits = size
        else:
            exceeds = size
    return fits


def list_schedules(problem: Problem) -> Iterator[tuple[str, Timetable]]:
    """Yield greedy orders. The last one runs one microbatch after the other and fits any cap that admits one."""
    m = problem.num_microbatches
    passes = range(len(problem.device) * m)
    longest = max(problem.ticks)
    depth = _depths(problem)
    rules = {
        "backward first": [depth[each // m] + each % m * longest * 0.1 for each in passes],
        "oldest first": [each % m * longest * 4.0 + (each // m % 3 == WEIGHT) * longest * 4.0 for each in passes],
        "one by one": [each % m * sum(problem.ticks) * 4.0 + (each // m % 3 == WEIGHT) for each in passes],
    }
    for name, urgency in rules.items():
        table = dispatch(problem, urgency)
        if table is not None and problem.fits(table.orders):
            yield f"list schedule, {name}", table


def random_list_schedule(problem: Problem, rng: Random) -> Timetable | None:
    """Return a greedy order by a random weighting of a microbatch's age, of the way it has left, and of how long W can
    wait.

    None of the fixed rules is best for costs that tile badly, and no one weighting is for all of them.
    """
    m, stages, longest = problem.num_microbatches, problem.num_stages, max(problem.ticks)
    age, way, put_off = 2 ** rng.uniform(0, 3), rng.uniform(0.2, 0.8), rng.uniform(0.2, 1.0)
    rank = []
    for stage in range(stages):
        inputs = 2 * stages - 1 - stage
        rank += [-way * stage, -way * inputs, put_off * stages - way * inputs]
    urgency = [(rank[c] + age * k) * longest for c in range(3 * stages) for k in range(m)]
    table = dispatch(problem, urgency)
    return table if table is not None and problem.fits(table.orders) else None


def _depths(problem: Problem) -> list[float]:
    """Return, per class, minus how far it is along a microbatch's way: what is nearer its end goes first, W fill the
    gaps.
    """
    stages, longest = problem.num_stages, max(problem.ticks)
    depths: list[float] = []
    for stage in range(stages):
        forward, inputs = stage, 2 * stages - 1 - stage
        depths += [-forward * longest, -inputs * longest, longest * 2 * stages]
    return depths


def shortened(problem: Problem, num_microbatches: int) -> Problem:
    """Return the same step with fewer microbatches; starting up and running dry cost the same."""
    return replace(problem, num_microbatches=min(problem.num_microbatches, num_microbatches))


def fusable(problem: Problem, table: Timetable) -> set[int]:
    """Return the I passes that may just as well run as one full backward with their W.

    Where W follows I at once and nobody needs the gradient sooner than W ends, splitting buys nothing; a full backward
    spares the kernel launches and the queue of a split one. All those of the problem's full stages are among them.
    """
    m, ticks, starts = problem.num_microbatches, problem.ticks, table.starts
    consumers: dict[int, tuple[int, int]] = {}
    for c, waits in enumerate(problem.waits):
        for other, lag in waits:
            if c % 3 == INPUT and other % 3 == INPUT:
                consumers[other] = (c, lag)
    fused = problem.full_backwards
    for order in table.orders:
        for each, after in zip(order, order[1:], strict=False):
            c, k = divmod(each, m)
            if c % 3 != INPUT or after != each + m or starts[after] != starts[each] + ticks[c]:
                continue
            end = starts[after] + ticks[c + 1]
            if c not in consumers:
                fused.add(each)
            else:
                consumer, lag = consumers[c]
                if starts[consumer * m + k] >= end + lag:
                    fused.add(each)
    return fused
