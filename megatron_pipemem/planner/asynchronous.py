"""Price asynchronous schedules for those who ask for them. They train differently, so they never compete with the others.

A step takes the makespan of a window, because the training loop joins all ranks at its end, and so is not free of bubbles.
Without that barrier it takes the period of windows, and the gradients of a second batch take memory. A rank holds several
versions of its parameters, and the whole optimizer, which cannot be shared out. What updates after every microbatch pays for
the reduction and the optimizer so often, with nothing to hide them behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from megatron_pipemem.config.refusals import refuse_asynchronous
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.planner.plans import Base, Group
from megatron_pipemem.planner.prices import MeasuredSlowdown, all_reduce
from megatron_pipemem.planner.space import Limits, Order
from megatron_pipemem.planner.step import DISTRIBUTED, GRADIENT, PlannedStep, price
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import Family, build_schedule, families
from megatron_pipemem.schedule.stream import family_window, steady, stream, updates_per_batch

_SHARED = (DISTRIBUTED, "overlap-param-gather")
_PER_MICROBATCH = ("overlap-grad-reduce",)


Priced = tuple[Base, float, tuple[float, ...]]
"""A cut with a family and all versions of the parameters among what is there all the time; seconds of a step in the middle of
the run; and per device, bytes of activations."""


def asynchronous(run: Run, limits: Limits, pace: MeasuredSlowdown | None, rejected: Counter[str]) -> Iterator[Priced]:
    """Yield the asynchronous families that are named in the limits and can run this cut, priced."""
    named = limits.allowed.get("schedule", ())
    p = run.parallelism.pp
    for family in families():
        if not family.asynchronous or family.name not in named or p == 1 or not limits.admits(chunks=1):
            continue
        per_batch = updates_per_batch(family.name)
        dropped = _SHARED if per_batch else (*_SHARED, *_PER_MICROBATCH)
        clipping = {} if per_batch else {"clip-grad": 0}
        flags = clipping | {name: value for name, value in run.flags.items() if name not in dropped}
        own = replace(run, megatron=flags, schedule=replace(run.schedule, name=family.name))
        try:
            refuse_asynchronous(own, family.name)
        except UnsupportedError as error:
            rejected[f"{family.name}: {error}"] += 1
            continue
        yield _priced(family, own, price(own, Placement.linear(p), pace=pace), per_batch)


def _priced(family: Family, run: Run, step: PlannedStep, per_batch: bool) -> Priced:
    p, m = run.parallelism.pp, run.parallelism.microbatches
    batch = min(m, 2 * p)

    middle = family_window(family.name, p, batch, steady(p, batch))
    timeline = middle.simulate(step.costs)
    seconds = timeline.makespan
    if run.delays_updates:
        one = build_schedule(family.name, num_devices=p, num_microbatches=batch, update_every=batch)
        seconds = stream(one, step.costs).period
    # In the middle of a step the busiest device never waits.
    makespan = seconds + (m - batch) * max(timeline.work) / batch
    more = tuple((versions - 1) * nbytes for versions, nbytes in zip(middle.versions_held, step.weights, strict=True))
    static = tuple(map(sum, zip(step.static, more, strict=True)))
    if not per_batch:
        execution, cluster = run.execution, run.cluster
        replicas = run.parallelism.dp * run.parallelism.cp
        link = cluster.link(replicas, execution.tp)
        gradients = max(step.weights) / execution.element * GRADIENT
        step = replace(step, optimizer=m * step.optimizer, reduction=m * all_reduce(gradients, replicas, link))
    group = Group(run, replace(step, static=static), (), None, makespan + step.outside, 0.0)
    return Base(group, Order(family.name)), makespan, timeline.peaks
