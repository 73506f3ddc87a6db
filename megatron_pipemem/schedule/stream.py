"""Simulate consecutive training steps without a barrier between them.

At the end of a step Megatron joins all pipeline ranks, for the gradient norm among others, although most devices of some
schedules are done long before the last one. An optimizer that is validated later (arXiv 2401.10241, section 4) lets every
device begin a step as soon as it has done its own part of the one before. Steps then follow each other in a *period*, which
is at most the time of a step that ends in a barrier, and for many schedules no less.

Asynchronous schedules need no such optimizer: a step uses older weights anyway. Their steps are the windows of their stream
(``features/windows.py``), and a window does not wait for other devices to end the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import dependencies
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import NEVER_FLUSHED, Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.windows import (
    UPDATE_EVERY,
    Moment,
    Window,
    check_batch,
    family_window,
    horizon,
    updates_per_batch,
)

LEAST_GAIN = 1.001
"""Below this, to leave the barrier out is not worth its trouble."""

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
        schedule: of every step. Of an asynchronous family's, the microbatches are those of a step.
        costs: what it costs; unit costs by default.
        tails: per device, the seconds of what it does at the end of a step by itself: its optimizer, and what of its
            gradients' reduction no computing hides. Default: none.
        steps: how many to run at least.

    Raises:
        ScheduleError: an action waits for ever; or the steps have not come to a period after ``64``.
        CostsError: the costs do not fit the placement, or there is not one tail per device.
        UnsupportedError: the schedule is asynchronous and of a file, or has too few microbatches.
    """
    tails = tuple(tails) or (0.0,) * schedule.num_devices
    if len(tails) != schedule.num_devices:
        raise CostsError("wrong-count", f"{len(tails)} tails for {schedule.num_devices} devices; give one per device")
    costs = costs or Costs()

    def whole(_: int, begins: Sequence[float]) -> list[float]:
        return _ends(simulate(schedule, costs, begins=begins), begins)

    synchronous = max((whole if schedule.updates is None else _Windows(schedule, costs).run)(_MOST_STEPS, tails))
    run = whole if schedule.updates is None else _Windows(schedule, costs).run
    return Stream(synchronous, *until_they_repeat(schedule.name, run, tails, steps))


def until_they_repeat(
    name: str, run: Callable[[int, Sequence[float]], Sequence[float]], tails: Sequence[float], steps: int = 1
) -> tuple[float, tuple[tuple[float, ...], ...]]:
    """Run steps one after another until they repeat. Return their period, and when every device had ended each of them.

    Args:
        name: of the schedule, for messages.
        run: tells when every device ends a step, from the step's number and from when every device begins it.
        tails: per device, the seconds behind that until it begins the next step.
        steps: how many to run at least.

    Raises:
        ScheduleError: they have not come to a period after ``64``.
    """
    begins: tuple[float, ...] = (0.0,) * len(tails)
    found: list[tuple[float, ...]] = []
    period = None
    while len(found) < steps or period is None:
        if len(found) == max(steps, _MOST_STEPS):
            raise ScheduleError(
                "no-period", f"{name}: steps without a barrier have no period within {len(found)} steps"
            )
        ends = run(len(found), begins)
        begins = tuple(end + tail for end, tail in zip(ends, tails, strict=True))
        found.append(begins)
        period = _period(found) if period is None else period
    return period, tuple(found)


def gain_without_barrier(schedule: Schedule, costs: Costs | None = None, tails: Sequence[float] = ()) -> float:
    """Return how many times as fast steps follow each other without the barrier; ``LEAST_GAIN`` tells whether that is worth it.

    Args:
        schedule: of every step.
        costs: what it costs; unit costs by default.
        tails: per device, the seconds of what it does at the end of a step by itself (see ``stream``).

    Raises:
        ScheduleError, CostsError, UnsupportedError: as ``stream`` does.
    """
    return stream(schedule, costs, tails, steps=1).gain


def draw_steps(timeline: Timeline, steps: int) -> Timeline:
    """Run several steps without a barrier between them as one schedule, to draw them. Microbatches go on being counted.

    Args:
        timeline: of one step.
        steps: how many.

    Raises:
        UnsupportedError: the schedule is asynchronous and of a file, has too few microbatches or replicas of the model, or
            its microbatches are weighed.
    """
    schedule, costs = timeline.schedule, timeline.costs
    if schedule.placement.replicas > 1:
        raise UnsupportedError(
            "no-steps", f"{schedule.name}: several steps cannot be drawn of a schedule with replicas; leave --steps out"
        )
    if costs.microbatch is not None:
        raise UnsupportedError(
            "no-steps", "several steps cannot be drawn of microbatches with weights; leave --steps or the weights out"
        )
    if schedule.updates is not None:
        drawn = _endless(schedule, steps)
    else:
        units = schedule.num_units
        orders = tuple(
            tuple(
                action._replace(microbatch=action.microbatch + step * units)
                for step in range(steps)
                for action in order
            )
            for order in schedule.orders
        )
        drawn = replace(schedule, num_microbatches=steps * schedule.num_microbatches, orders=orders)
    return simulate(replace(drawn, name=f"{schedule.name}, {steps} steps"), costs)


def _endless(schedule: Schedule, steps: int) -> Schedule:
    """Return so many steps of an asynchronous family's schedule, whose microbatches are those of a step.

    Raises:
        UnsupportedError: it is of a file, or has too few microbatches.
    """
    _check_family(schedule)
    devices, microbatches = schedule.num_devices, schedule.num_microbatches * steps
    return build_schedule(schedule.name, num_devices=devices, num_microbatches=microbatches, **_options(schedule))


def _options(schedule: Schedule) -> dict[str, Any]:
    """Return the options with which an asynchronous family builds steps of these microbatches."""
    if updates_per_batch(schedule.name):
        return {UPDATE_EVERY: schedule.num_microbatches}
    assert schedule.updates is not None
    return {"vertical_sync": schedule.updates.delay is not None}


def _check_family(schedule: Schedule) -> None:
    """Raises:
    UnsupportedError: an asynchronous schedule is of a file, or has too few microbatches.
    """
    if schedule.name not in {family.name for family in families() if family.asynchronous}:
        raise UnsupportedError("no-steps", f"{schedule.name} has no steps: {NEVER_FLUSHED}, or leave --steps out")
    check_batch(schedule.name, schedule.num_devices, schedule.num_microbatches)


class _Windows:
    """The steps of an asynchronous schedule: the windows of its stream, one after the other.

    Args:
        schedule: of a family; its microbatches are those of a step.
        costs: what it costs.

    Raises:
        UnsupportedError: it is of a file, or has too few microbatches.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        _check_family(schedule)
        costs.require_alike("a window of a stream that is never flushed")
        self._schedule, self._costs = schedule, costs
        self._size = schedule.name, schedule.num_devices, schedule.num_microbatches
        self._found: dict[Moment, Window] = {}
        self._forwards: dict[Action, float] = {}
        """ends of the forwards of the step before, in the numbers of the next one"""

    def run(self, number: int, begins: Sequence[float]) -> list[float]:
        """Return when every device has done a step.

        Args:
            number: of the step. The first one fills the pipeline; all others are alike.
            begins: when the devices can begin it.
        """
        far = horizon(*self._size[1:])
        moment = Moment(min(number, far), far if number else 0, far)
        if moment not in self._found:
            self._found[moment] = family_window(*self._size, moment, costs=self._costs, **_options(self._schedule))
        window = self._found[moment]
        already = {action for actions in window.past for action in actions}
        # What comes from a step to the next over a link is what a device needs first.
        starts = [
            max(begin, self._arrival(device, order[0]))
            for device, (begin, order) in enumerate(zip(begins, window.schedule.orders, strict=True))
        ]
        timeline = simulate(window.schedule, self._costs, already, starts)
        self._forwards = {
            action._replace(microbatch=action.microbatch - window.batch): end
            for order, spans in zip(window.schedule.orders, timeline.spans, strict=True)
            for action, (_, end) in zip(order, spans, strict=True)
            if action.kind is Kind.F
        }
        return _ends(timeline, starts)

    def _arrival(self, device: int, first: Action) -> float:
        """Return when a device's first action of a step has what the step before sends it; 0 where that sends nothing."""
        placement = self._schedule.placement
        return max(
            (
                self._forwards[needed] + self._costs.link_seconds(placement.devices[needed.stage], device)
                for needed in dependencies(first, placement, ())
                if needed in self._forwards
            ),
            default=0.0,
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
