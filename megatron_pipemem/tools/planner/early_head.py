"""Decide whether pass I computes the weight gradient of the LM head, for runs that leave it to ``auto``.

Gradients of logits that wait for W can make the device of the head hold more than any device holds under 1F1B. ``auto``
then computes the weight gradient of the head in I, if the fullest device of the schedule then holds less. The planner
decides by the predicted bytes of a run, and a training run by those of the model that it has built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_pipemem.model.counts import early_modules
from megatron_pipemem.schedule.action import PLAIN
from megatron_pipemem.schedule.baseline import bytes_of_1f1b
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import AUTO, EARLY_WEIGHTS
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.replay import OrderPrice
from megatron_pipemem.tools.planner.step import PlannedStep, price


def with_early_head(run: Run) -> Run:
    """Return the run with the head among the modules whose weight gradients pass I computes."""
    modules = early_modules(run.model, run.execution)
    named = ",".join(each for each in EARLY_WEIGHTS if each in modules or each == "head")
    return replace(run, schedule=replace(run.schedule, early_weights=named))


def exceeds(peaks: Sequence[float], of_1f1b: float | None) -> bool:
    """Return whether the fullest device holds more than that of 1F1B, whose bytes are ``None`` if they are unknown."""
    return of_1f1b is not None and max(peaks) > loosened(of_1f1b)


def lowers_excess(waiting: Sequence[float], early: Sequence[float], of_1f1b: float | None) -> bool:
    """Return whether ``auto`` computes the head's weight gradient in I.

    ``waiting`` and ``early`` are the peaks of all devices without and with that, and ``of_1f1b`` the highest of 1F1B.
    """
    return exceeds(waiting, of_1f1b) and max(early) < max(waiting)


def decided(
    run: Run,
    splits: bool,
    step_of: Callable[[Run], PlannedStep],
    priced: Callable[[PlannedStep], OrderPrice],
    slices: int | None = None,
) -> tuple[Run, PlannedStep, OrderPrice]:
    """Return a run with its decision for the head, its predicted step, and the price of that step.

    ``splits`` says whether the schedule has W. ``slices`` is the number of slices of a microbatch, by default the run's.
    ``step_of`` predicts the step of a run without the order of passes, and ``priced`` the time and peaks of the order.
    """
    step = step_of(run)
    found = priced(step)
    if not splits or run.schedule.early_weights != AUTO:
        return run, step, found
    slices = slices or run.schedule.slices or 1
    limit = bytes_of_1f1b(step.costs, step.placement, run.parallelism.microbatches, slices)
    if not exceeds(found.peaks, limit):
        return run, step, found
    other = with_early_head(run)
    leaner = step_of(other)
    lower = priced(leaner)
    return (other, leaner, lower) if lowers_excess(found.peaks, lower.peaks, limit) else (run, step, found)


def has_early_head(run: Run, schedule: Schedule, layers: tuple[int, ...]) -> bool:
    """Return whether ``auto`` computes the head's weight gradient in I for a run with this schedule.

    ``layers`` has the number of pieces of each stage. Copies to the host and recomputation in the schedule do not count.
    """
    if schedule.vocabulary_barriers or not schedule.splits_backward:  # with barriers, no rank has the whole head
        return False
    orders = tuple(tuple(action for action in order if action.kind in PLAIN) for order in schedule.orders)
    passes = replace(schedule, orders=orders, pairs=frozenset())
    chosen, _, _ = decided(
        run,
        schedule.splits_backward,
        lambda run: price(run, schedule.placement, layers),
        lambda step: OrderPrice(0.0, peaks(passes, step.costs)),
        schedule.slices,
    )
    return chosen is not run
