"""Simulate consecutive training steps without a barrier between them.

At the end of a step Megatron joins all pipeline ranks, for the gradient norm among others, although most devices of some
schedules are done long before the last one. An optimizer that is validated later (arXiv 2401.10241, section 4) lets every
device begin a step as soon as it has done its own part of the one before. Steps then follow each other in a *period*, which
is at most the time of a step that ends in a barrier, and for many schedules no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose

from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate

_MOST_STEPS = 64
"""How many steps may pass until they repeat; more than any family here takes."""


@dataclass(frozen=True)
class Stream:
    """Tell how long consecutive steps take.

    Args:
        synchronous: seconds from step to step where all devices wait for each other before the optimizer.
        period: seconds from step to step where no device waits for another one.
        ends: per step, when every device had done it, its tail included, without barriers. The first step begins at 0.
    """

    synchronous: float
    period: float
    ends: tuple[tuple[float, ...], ...]

    @property
    def gain(self) -> float:
        """How many times as fast steps follow each other without the barrier."""
        return self.synchronous / self.period if self.period else 1.0


def stream(schedule: Schedule, costs: Costs | None = None, tails: Sequence[float] = (), steps: int = 8) -> Stream:
    """Run steps one after another until they repeat, and so find their period.

    Args:
        schedule: of every step.
        costs: what it costs; unit costs by default.
        tails: per device, the seconds of what it does at the end of a step by itself: its optimizer, and what of its
            gradients' reduction no computing hides. Default: none.
        steps: how many to run at least.

    Raises:
        ScheduleError: an action waits for ever; or the steps have not come to a period after ``64``.
        CostsError: the costs do not fit the placement, or there is not one tail per device.
        UnsupportedError: the schedule is asynchronous.
    """
    _check_synchronous(schedule)
    tails = tuple(tails) or (0.0,) * schedule.num_devices
    if len(tails) != schedule.num_devices:
        raise CostsError(f"{len(tails)} tails for {schedule.num_devices} devices; give one per device")
    synchronous = max(_ends(simulate(schedule, costs, begins=tails), tails))
    begins: tuple[float, ...] = (0.0,) * schedule.num_devices
    found: list[tuple[float, ...]] = []
    period = None
    while len(found) < steps or period is None:
        if len(found) == max(steps, _MOST_STEPS):
            raise ScheduleError(f"{schedule.name}: steps without a barrier have no period within {len(found)} steps")
        ends = _ends(simulate(schedule, costs, begins=begins), begins)
        begins = tuple(end + tail for end, tail in zip(ends, tails, strict=True))
        found.append(begins)
        period = _period(found) if period is None else period
    return Stream(synchronous, period, tuple(found))


def draw_steps(timeline: Timeline, steps: int) -> Timeline:
    """Run several steps without a barrier between them as one schedule, to draw them. Microbatches go on being counted.

    Args:
        timeline: of one step.
        steps: how many.

    Raises:
        UnsupportedError: the schedule is asynchronous or has replicas of the model, or its microbatches are weighed.
    """
    schedule, costs = timeline.schedule, timeline.costs
    _check_synchronous(schedule)
    if schedule.placement.replicas > 1:
        raise UnsupportedError(
            f"{schedule.name}: several steps cannot be drawn of a schedule with replicas; leave --steps out"
        )
    if costs.microbatch is not None:
        raise UnsupportedError(
            "several steps cannot be drawn of microbatches with weights; leave --steps or the weights out"
        )
    units = schedule.num_units
    orders = tuple(
        tuple(action._replace(microbatch=action.microbatch + step * units) for step in range(steps) for action in order)
        for order in schedule.orders
    )
    name, microbatches = f"{schedule.name}, {steps} steps", steps * schedule.num_microbatches
    return simulate(replace(schedule, name=name, num_microbatches=microbatches, orders=orders), costs)


def _check_synchronous(schedule: Schedule) -> None:
    if schedule.updates is not None:
        raise UnsupportedError(
            f"{schedule.name} is asynchronous: its steps overlap by older weights, which are not simulated; leave --steps out"
        )


def _ends(timeline: Timeline, begins: Sequence[float]) -> list[float]:
    """Return when every device is done, sums over replicas included."""
    ends = [spans[-1][1] if spans else begin for spans, begin in zip(timeline.spans, begins, strict=True)]
    for each in timeline.replica_reductions:
        for device in timeline.schedule.placement.holders(each.stage):
            ends[device] = max(ends[device], each.end)
    return ends


def _period(ends: Sequence[tuple[float, ...]]) -> float | None:
    """Return the seconds from step to step if the last one ended as an earlier one did, only later."""
    last = ends[-1]
    for back, before in enumerate(reversed(ends[:-1]), start=1):
        shifts = [b - a for a, b in zip(before, last, strict=True)]
        if all(isclose(shift, shifts[0], rel_tol=1e-9) for shift in shifts):
            return max(shifts) / back
    return None
