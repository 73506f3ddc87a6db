"""Starting orders of a search: the schedules of families, and greedy orders (list schedules)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import Any

from megatron_pipemem.errors import PipememError
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import Family, build_schedule
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.search.improve import Timetable, as_soon_as_possible, dispatch, timetable
from megatron_pipemem.search.problem import FORWARD, INPUT, WEIGHT, Orders, Problem, from_schedule

# Factor by which the interval of the first start grows until it fits.
_STRETCH = 1.1


def first_start(problem: Problem) -> Timetable | None:
    """Return a timetable with microbatches at equal intervals, which are lengthened until the caps are kept.

    The passes of a microbatch are planned as if there were no other one. If two passes need a device at the same time,
    the one that is planned earlier runs first. The result is ``None`` if even one microbatch after another exceeds the
    caps.
    """
    n, units, ends = problem.units.parts, len(problem.units), [0] * len(problem.ticks)
    for c in (*problem.way, *range(WEIGHT, len(problem.device), 3)):
        for part in range(n):
            ready = ends[c * n + part - 1] if part else 0
            for other, lag in problem.waits[c]:
                at = other * n + (n - 1 - part if problem.are_mirrored(c, other) else part)
                ready = max(ready, ends[at] + lag)
            ends[c * n + part] = ready + problem.ticks[c * n + part]
    starts = [end - ticks for end, ticks in zip(ends, problem.ticks, strict=True)]
    spans = (ends[at + n - 1] - starts[at] for at in range(0, len(ends), n))
    interval, alone, price = max(*problem.work, *spans), max(ends), problem.passes.price
    while True:
        slots = [starts[price[p]] + p % units // n * interval for p in range(len(price))]
        orders = []
        for classes in problem.classes:
            passes = (c * units + rank for c in classes for rank in range(units))
            orders.append(sorted(passes, key=slots.__getitem__))
        if problem.fits(orders):
            return as_soon_as_possible(problem, orders)
        if interval >= alone:
            orders = _one_by_one(problem)
            return as_soon_as_possible(problem, orders) if problem.fits(orders) else None
        interval = min(alone, int(interval * _STRETCH) + 1)


def _one_by_one(problem: Problem) -> Orders:
    """Return orders with one microbatch after another. A W that takes memory runs after all other passes.

    In that case I has given back more memory than F took.
    """
    orders: Orders = []
    n, units = problem.units.parts, len(problem.units)
    for classes in problem.classes:
        forwards = [c for c in classes if c % 3 == FORWARD]
        late = {c for c in classes if c % 3 == WEIGHT and max(problem.change[c * n : c * n + n]) > 0}
        turn = [c * units + part for c in forwards for part in range(n)]
        for c, part in product(reversed(forwards), range(n)):
            turn += [backward * units + part for backward in (c + INPUT, c + WEIGHT) if backward not in late]
        passes = [first + pass_ for first in range(0, units, n) for pass_ in turn]
        orders.append([*passes, *(c * units + rank for rank in range(units) for c in classes if c in late)])
    return orders


def family_starts(
    families: Sequence[Family], placement: Placement, problem: Problem, costs: Costs, caps: Sequence[float] | None
) -> Iterator[tuple[str, Timetable | None]]:
    """Yield name and timetable of each family's schedule, if it has this placement; ``None`` if it exceeds the caps.

    A family with a ``group_size`` is tried with smaller groups then. Families that raise an error are skipped.
    """
    settings: dict[str, Any] = {"costs": costs}
    if caps is not None and costs.memory is None:
        settings["memory_cap"] = min(caps)
    if not problem.units.are_whole:
        settings["slices"] = problem.units.parts
    p, m = placement.num_devices, problem.units.num_microbatches
    for family in families:
        options = {name: value for name, value in settings.items() if name in family.options}
        if "chunks" in family.options:
            options["chunks"] = placement.num_chunks
        elif family.placement != placement.name:
            continue
        arguments = {"num_devices": p, **options}
        try:
            cut: dict[str, Any] = {name: options[name] for name in ("chunks", "slices") if name in options}
            if family.placement_on(p, cut) != placement:
                continue
            orders = from_schedule(build_schedule(family.name, num_microbatches=m, **arguments))
            if "group_size" in family.options and not problem.fits(orders):
                arguments["group_size"] = _largest_group(family.name, problem, arguments)
                orders = from_schedule(build_schedule(family.name, num_microbatches=m, **arguments))
        except PipememError:
            continue
        table = None
        if problem.fits(orders):
            table = timetable(problem, orders)
        yield family.name, table


def _largest_group(name: str, problem: Problem, arguments: Mapping[str, Any]) -> int:
    """Return the largest ``group_size`` below ``p`` with which a family keeps the caps; 1 if none does.

    ``arguments`` has the other arguments of ``build_schedule``. Larger groups hold more and idle less. Raise an
    UnsupportedError if the family does not accept groups of fewer than ``p`` microbatches.
    """
    fits, exceeds = 1, problem.num_devices
    while exceeds - fits > 1:
        size = (fits + exceeds) // 2
        # Two whole groups, or as many as fill the pipeline, have the same peak as any larger number.
        some = shortened(problem, size * max(2, -(-problem.num_devices // size)))
        schedule = build_schedule(name, num_microbatches=some.units.num_microbatches, group_size=size, **arguments)
        if some.fits(from_schedule(schedule)):
            fits = size
        else:
            exceeds = size
    return fits


def list_schedules(problem: Problem) -> Iterator[tuple[str, Timetable]]:
    """Yield greedy orders (list schedules) by several fixed rules, with their names, if they keep the caps.

    The last one runs one microbatch after another, and keeps every cap that admits one microbatch.
    """
    units, n = len(problem.units), problem.units.parts
    passes = range(len(problem.device) * units)
    longest, stages = max(problem.ticks), problem.num_stages
    # Later passes of a microbatch first, and W only if nothing else can run.
    depth = [rank for stage in range(stages) for rank in (-stage, stage + 1 - 2 * stages, 2 * stages)]
    rules = {
        "backward first": [depth[p // units] * longest + p % units * longest * 0.1 for p in passes],
        "oldest first": [(p % units + (p // units % 3 == WEIGHT)) * longest * 4.0 for p in passes],
    }
    if n > 1:
        # With equal ranks, backwards of a microbatch compete with forwards of its parts. These go a microbatch ahead.
        rank = {FORWARD: 0, INPUT: -n, WEIGHT: 1}
        rules["oldest backward first"] = [p % units + rank[p // units % 3] for p in passes]
    rules["one by one"] = [p % units // n * sum(problem.ticks) * 4.0 + (p // units % 3 == WEIGHT) for p in passes]
    for name, urgency in rules.items():
        table = dispatch(problem, urgency)
        if table is not None and problem.fits(table.orders):
            yield f"list schedule, {name}", table


def random_list_schedule(problem: Problem, rng: Random) -> Timetable | None:
    """Return a greedy order by a random rule; ``None`` if it exceeds the caps.

    The urgency of a pass is a weighted sum of its microbatch's number, the microbatch's remaining passes, and for W a
    delay. A smaller sum is more urgent. The weights are random, because no fixed weights are best for all costs.
    """
    units, stages, longest = len(problem.units), problem.num_stages, max(problem.ticks)
    age, way, put_off = 2 ** rng.uniform(0, 3) / problem.units.parts, rng.uniform(0.2, 0.8), rng.uniform(0.2, 1.0)
    rank = []
    for stage in range(stages):
        inputs = 2 * stages - 1 - stage
        rank += [-way * stage, -way * inputs, put_off * stages - way * inputs]
    urgency = [(rank[c] + age * k) * longest for c in range(3 * stages) for k in range(units)]
    table = dispatch(problem, urgency)
    return table if table is not None and problem.fits(table.orders) else None


def shortened(problem: Problem, num_microbatches: int) -> Problem:
    """Return a copy of the problem with at most ``num_microbatches`` microbatches.

    With enough of them, the start and the end of a step stay the same.
    """
    count = min(problem.units.num_microbatches, num_microbatches)
    return replace(problem, units=Units.equal(count, problem.units.parts))


def fusable(problem: Problem, table: Timetable) -> set[int]:
    """Return the I passes that can be joined with their W into a full backward without delaying any other pass.

    That is so if W directly follows I, and no other device needs the gradient before W ends. A full backward saves
    kernel launches and the storage of deferred weight gradients. All I of stages that never split their backward are
    included.
    """
    units, starts, passes = len(problem.units), table.starts, problem.reversed
    ends = [start + problem.ticks[price] for start, price in zip(starts, passes.price, strict=True)]
    fused = problem.full_backwards
    for order in table.orders:
        for pass_, after in pairwise(order):
            if pass_ // units % 3 != INPUT or after != pass_ + units or starts[after] != ends[pass_]:
                continue
            waiting = (other for other in passes.waits[pass_] if other[0] != after)
            if all(starts[other] >= ends[after] + passes.lags[link] for other, link in waiting):
                fused.add(pass_)
    return fused
