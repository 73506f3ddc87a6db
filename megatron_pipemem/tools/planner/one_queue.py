"""A run's seconds in the order for one hardware queue per rank (``schedule.lowering``), if Megatron demands that order."""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.errors import PipememError
from megatron_pipemem.queues import CONNECTIONS
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.tools.planner.variants import PLAIN, build_order, variants
from megatron_pipemem.tools.planner.ways import Way

_FORWARDS = 48  # of a device, in a step that is long enough to have the ratio of longer ones


def in_demanded_order(way: Way) -> Way:
    """Return a way with its seconds in the order that its devices demand; the way itself if that is the usual order.

    Megatron's own schedules have one order.
    """
    slowdown = one_queue_slowdown(way) if demands_one_queue(way) else None
    return way if slowdown is None else replace(way, makespan=way.makespan * slowdown)


def demands_one_queue(way: Way) -> bool:
    """Return whether Megatron demands one hardware queue of a run on its devices."""
    return CONNECTIONS in way.run.demanded_environment


def one_queue_slowdown(way: Way) -> float | None:
    """Return the ratio of a step's makespan in the order for one hardware queue to that in the usual order.

    ``None`` for Megatron's own schedules, for pairs and offload, and for orders that are not a family's. It is that of a
    shorter step if the way's is long, within .02.
    """
    variant = next((v for v in variants() if v.name == way.variant and v.cuts_vocabulary), None)
    if way.is_stock or way.passes is not None or (variant is None and way.variant != PLAIN) or way.run.pairs:
        return None
    cut, costs = way.run.parallelism, way.step.costs
    count = min(cut.microbatches, max(cut.pp, _FORWARDS // way.step.placement.num_chunks))
    try:
        schedule = build_order(way.run, way.order, way.step, (), variant, count)
        program = lower(schedule, single_queue=True, costs=costs)
        return run_single_queues(program, costs).makespan / simulate(schedule, costs).makespan
    except PipememError:  # an order that was searched, or a family's own number of slices
        return None
