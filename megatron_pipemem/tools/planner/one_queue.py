"""By how much a step is longer in the order for one hardware queue per rank (``schedule.lowering``)."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pipemem.queues import CONNECTIONS
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.tools.launch.command import demanded_environment
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


def told_if_demanded(ways: Mapping[str, Way], today: Way) -> str | None:
    """Return a sentence about the steps of ``ways``, by the names of their rows, with one hardware queue per rank.

    All steps are compared in it, also today's. ``None`` if Megatron does not demand it of the run on its devices, or if
    no time is known.
    """
    if CONNECTIONS not in demanded_environment(today.run):
        return None
    base = _seconds_in_one_queue(today)
    texts = [] if today.is_stock or base is None else [f"today {base:.2f} s"]
    for kind, way in ways.items():
        if not way.is_stock and (seconds := _seconds_in_one_queue(way)) is not None:
            compared = "" if base is None else f" ({seconds / base - 1:+.1%} against today)"
            texts.append(f"{kind} {seconds:.2f} s{compared}")
    return (
        f"Megatron demands {CONNECTIONS}=1 of this run, with which our schedules take longer than in the table: "
        f"{'; '.join(texts)}"
        if texts
        else None
    )


def _seconds_in_one_queue(way: Way) -> float | None:
    if way.is_stock:
        return way.seconds
    slowdown = one_queue_slowdown(way)
    return None if slowdown is None else way.makespan * slowdown + way.step.outside_seconds
