"""By how much a step is longer in the order for one hardware queue per rank (``schedule.lowering``)."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_pipemem.queues import CONNECTIONS
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.tools.planner.variants import PLAIN
from megatron_pipemem.tools.planner.ways import Way

_FORWARDS = 48  # of a device, in a step that is long enough to have the ratio of longer ones


def one_queue_slowdown(way: Way) -> float | None:
    """Return the ratio of a step's makespan in the order for one hardware queue to that in the usual order.

    ``None`` for Megatron's own schedules, which have one order, and for ways that are not a family's plain schedule. It is
    that of a shorter step if the way's is long, within .02.
    """
    if way.is_stock or way.passes is not None or way.variant != PLAIN or way.run.pairs:
        return None
    cut, costs = way.run.parallelism, way.step.costs
    count = min(cut.microbatches, max(cut.pp, _FORWARDS // way.step.placement.num_chunks))
    schedule = way.published_schedule(count)
    if way.has_earlier_weights:
        schedule = with_earlier_weights(schedule, costs)
    program = lower(schedule, single_queue=True, costs=costs)
    return run_single_queues(program, costs).makespan / simulate(schedule, costs).makespan


def told_if_demanded(ways: Iterable[Way], today: Way) -> str | None:
    """Return a sentence about the steps of ``ways`` with the setting that Megatron demands of many devices.

    ``None`` if Megatron does not demand it of the run, or if no time is known.
    """
    if not today.run.parallelism.cuts_layers:
        return None
    texts = []
    for way in ways:
        if (slowdown := one_queue_slowdown(way)) is not None:
            seconds = way.makespan * slowdown + way.step.outside_seconds
            texts.append(f"{way.name} {seconds:.2f} ({seconds / today.seconds - 1:+.1%})")
    return (
        f"with {CONNECTIONS}=1, which Megatron demands with tensor or context parallelism before Blackwell, our schedules run "
        f"by a slower order: {', '.join(texts)}"
        if texts
        else None
    )
