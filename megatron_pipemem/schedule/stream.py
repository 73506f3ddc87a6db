"""Simulate training steps without a barrier between them, and cut the stream of an asynchronous schedule into windows.

At the end of a step Megatron joins all pipeline ranks, for the gradient norm among others, although most devices of some
schedules are done long before the last one. An optimizer that is validated later (arXiv 2401.10241, section 4) lets every
device begin a step as soon as it has done its own part of the one before. Steps then follow each other in a *period*, which
is at most the time of a step that ends in a barrier, and for many schedules no less.

Asynchronous schedules need no such optimizer: a step uses older weights anyway. Their steps are the windows of their stream,
and a window does not wait for other devices to end the one before. A training loop asks for one batch after the other, and
steps the optimizer in between. So an endless stream of batches is cut, on every device, right behind its last backward of a
batch: a window runs all backwards of its own batch and no other, and the first forwards of the batches behind it. The last
device looks ahead of nothing, so its losses are of the window's own batch.

A window is cut out of a stream that is long enough to look like the endless one, is lowered as a whole, and is proved as a
whole. What is left out of a window afterwards are whole microbatches, on all devices alike: those that nobody will run
backward, when the stream ends, or that earlier windows did not run, when it begins in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import isclose
from typing import Any

from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import COMPLETING, COMPUTE, MESSAGES, SENDS, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import dependencies
from megatron_pipemem.schedule.lowering import add_gradient_reductions, add_messages_to_single_queues, lower
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.registry import build_schedule, families, family
from megatron_pipemem.schedule.schedule import NEVER_FLUSHED, Order, Program, Schedule, versions_held, weight_uses
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.waits import run_single_queues

UPDATE_EVERY = "update_every"
"""The option of families that update after groups of microbatches: how many."""


@dataclass(frozen=True)
class Moment:
    """Say where in the stream a window stands, as far as it matters to its order."""

    before: int  # batches whose updates came before it, at most ``horizon``
    done: int  # batches from its own one on of which earlier windows ran the forwards that belong to them
    left: int  # batches behind its own that the stream will have, at most ``horizon``


def horizon(num_devices: int, batch: int) -> int:
    """Return over how many batches the pipeline spreads: 1F1B runs at most ``p - 1`` forwards ahead."""
    return -(-(num_devices - 1) // batch)


@dataclass(frozen=True)
class Window:
    """Hold what every device runs in one call.

    Microbatches are numbered from the first one of the call's own batch, versions of the weights from the newest one at its
    start, which is 0; older ones are negative.
    """

    stream: Schedule  # the schedule it was cut from
    batch: int  # microbatches per call
    moment: Moment  # its place in the stream
    actions: tuple[Order, ...]  # per device
    past: tuple[Order, ...]
    """Per device, what the stream ran before, in the numbers of this window, as if it had begun with ``before`` batches;
    without what it did not run forward."""
    versions: Mapping[Action, int]  # the version that every forward and backward uses
    updates: Mapping[Action, frozenset[int]]
    """The actions behind which a device makes its next version, and the older versions that it needs after that."""

    def __repr__(self) -> str:
        return f"<Window of {self.batch} microbatches, {sum(map(len, self.actions))} actions, of {self.stream!r}>"

    @cached_property
    def program(self) -> Program:
        """Return the window's program for the executor. ``stream`` is what was proved."""
        return Program(self.stream, self.actions)

    @cached_property
    def up_to_its_end(self) -> Program:
        """All that the stream has run when the window ends: from it follows what is held."""
        return Program(self.stream, tuple(map(tuple.__add__, self.past, self.actions)))

    @cached_property
    def updates_per_call(self) -> int:
        assert self.stream.updates is not None
        return self.batch // self.stream.updates.every

    @cached_property
    def versions_held(self) -> tuple[int, ...]:
        """Per device, the most versions of its weights at once."""
        return versions_held(self.stream)

    @cached_property
    def schedule(self) -> Schedule:
        """The computing of the window alone, as a schedule that one can look at."""
        orders = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in self.actions)
        return replace(self.stream, orders=orders, updates=None, num_microbatches=self.batch)

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """Return when every action of the window runs if all devices begin it together, as a training loop makes them
        do.
        """
        costs = costs or Costs()
        costs.require_alike("a window of a stream that is never flushed")
        run = frozenset(action for actions in self.past for action in actions)
        timeline = simulate(self.schedule, costs, run)
        orders = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in self.up_to_its_end.actions)
        return replace(timeline, peaks=peaks(replace(self.stream, orders=orders), timeline.costs))


def steady(num_devices: int, batch: int) -> Moment:
    """Return a moment in the middle of a long stream."""
    far = horizon(num_devices, batch)
    return Moment(far, far, far)


def updates_per_batch(name: str) -> bool:
    """Return whether a family updates once per batch, so that a training loop can do it between two calls; else it
    updates after every microbatch.
    """
    return UPDATE_EVERY in family(name).options


def check_batch(name: str, num_devices: int, batch: int) -> None:
    """Return whether a family keeps its promise of two versions of the weights. Raise an UnsupportedError if it updates
    once per call, and calls are too short for that.
    """
    if updates_per_batch(name) and batch < num_devices:
        raise UnsupportedError(
            "needs-microbatches",
            f"schedule {name} keeps two versions of the weights only if a step has at least as many microbatches as the "
            f"pipeline has ranks, {num_devices}, not {batch}; raise --global-batch-size",
        )


def family_window(
    name: str, num_devices: int, batch: int, moment: Moment, *, single_queue: bool = False, **arguments: Any
) -> Window:
    """Cut a window out of the stream of a registered family. ``batch``: microbatches per call. ``arguments``: of
    ``build_schedule``.
    """
    per_batch = updates_per_batch(name)
    if per_batch:
        arguments = {**arguments, UPDATE_EVERY: batch}
    # One batch more than is looked at, so that the window is none of those in which a stream runs dry.
    batches = moment.before + 1 + horizon(num_devices, batch) + 1
    stream = build_schedule(name, num_devices=num_devices, num_microbatches=batches * batch, **arguments)
    program = lower(stream)
    validate_program(program)
    number = {
        action: window
        for actions in program.actions
        for action, window in zip(actions, _window_numbers(actions, batch), strict=True)
    }
    _check_messages(program, number, moment.before)
    first = moment.before * batch
    # Of every window up to this one, what each device runs.
    windows: list[list[Order]] = [[() for _ in program.actions] for _ in range(moment.before + 1)]
    for device, actions in enumerate(program.actions):
        rows: list[list[Action]] = [[] for _ in windows]
        for action in actions:
            if action.kind is Kind.REDUCE_GRAD or number[action] > moment.before:
                continue
            renumbered = action._replace(microbatch=action.microbatch - first)
            if renumbered.microbatch >= (1 + moment.left) * batch:
                continue
            is_past = number[action] < moment.before and renumbered.microbatch < moment.done * batch
            rows[number[action] if is_past else moment.before].append(renumbered)
        for orders, row in zip(windows, rows, strict=True):
            orders[device] = tuple(row)
    if single_queue:
        costs = arguments.get("costs") or Costs()
        windows = [_in_single_queues(stream, orders, costs) for orders in windows]
    *earlier, own = windows
    past = [tuple(chain.from_iterable(orders[device] for orders in earlier)) for device in range(num_devices)]
    if per_batch:  # gradients are complete then, and are to be summed over data-parallel ranks
        own = list(map(add_gradient_reductions, own))
    uses = _weights(stream, batch, first, behind_messages=not single_queue)
    found = Window(stream, batch, moment, tuple(own), tuple(past), *uses)
    if single_queue:
        run_single_queues(found.program)
    return found


def _in_single_queues(stream: Schedule, actions: Sequence[Order], costs: Costs) -> list[Order]:
    """Return the actions of a window in an order for single queues. What it receives it is also sent in it
    (``_check_messages``).
    """
    router = Router(stream.placement)
    orders = tuple(tuple(a for a in row if a.kind not in MESSAGES) for row in actions)
    computed = [action for order in orders for action in order]
    awaited = {receive for action in computed if (receive := router.awaited(action))}
    sent = {message.receive for action in computed if (message := router.emitted(action))}
    return list(add_messages_to_single_queues(stream, costs, orders, awaited - sent))


def _window_numbers(actions: Order, batch: int) -> list[int]:
    """Return the window of every action: a window ends behind the last gradient of its batch, and behind the message
    that sends it.
    """
    last = {action.microbatch // batch: at for at, action in enumerate(actions) if action.kind in COMPLETING}
    numbers: list[int] = []
    current = 0
    for position, action in enumerate(actions):
        if current in last and position > last[current] and action.kind not in SENDS:
            current += 1
        numbers.append(current)
    return numbers


def _check_messages(program: Program, number: Mapping[Action, int], last: int) -> None:
    """Check that nothing is on its way when windows up to the ``last`` end, so that evaluation in between meets empty
    channels.
    """
    router = Router(program.placement)
    for order in program.schedule.orders:
        for action in order:
            message = router.emitted(action)
            if message is None:
                continue
            sent, received = number[message.send], number[message.receive]
            if sent != received and min(sent, received) <= last:
                device = message.edge[1]
                raise ScheduleError(
                    "message-order",
                    f"is posted in window {received}, but device {message.edge[0]} sends in window {sent}; post it before "
                    "the window ends",
                    at=(device, program.actions[device].index(message.receive), message.receive),
                )


def _weights(
    stream: Schedule, batch: int, first: int, behind_messages: bool
) -> tuple[dict[Action, int], dict[Action, frozenset[int]]]:
    """``versions`` and ``updates`` of a window whose batch begins with microbatch ``first`` of the stream. Updates wait for
    the messages of their actions if these follow at once, because the other end does."""
    assert stream.updates is not None
    newest = first // stream.updates.every
    router = Router(stream.placement)
    versions: dict[Action, int] = {}
    updates: dict[Action, frozenset[int]] = {}
    still_used: dict[int, set[int]] = {}
    for use in reversed(list(weight_uses(stream))):
        action = use.action._replace(microbatch=use.action.microbatch - first)
        versions[action] = use.version - newest
        later = still_used.setdefault(use.action.stage, set())
        if use.updates and 0 <= action.microbatch < batch:
            message = router.emitted(use.action)
            behind = message.send._replace(microbatch=action.microbatch) if message and behind_messages else action
            updates[behind] = frozenset(version for version in later if version <= use.newest - newest)
        later.add(use.version - newest)
    return versions, updates


LEAST_GAIN = 1.001
"""Below this, to leave the barrier out is not worth its trouble."""

_MOST_STEPS = 64
"""How many steps may pass until they repeat; more than any family here takes."""


@dataclass(frozen=True)
class Stream:
    """Tell how long consecutive steps take."""

    synchronous: float  # seconds from step to step where all devices wait for each other before the optimizer
    period: float  # seconds from step to step where no device waits for another one
    ends: tuple[tuple[float, ...], ...]
    """Per step, when every device had done it, its tail included, without barriers. The first step begins at 0."""

    @property
    def gain(self) -> float:
        """How many times as fast steps follow each other without the barrier."""
        return self.synchronous / self.period if self.period else 1.0


def stream(schedule: Schedule, costs: Costs | None = None, tails: Sequence[float] = (), steps: int = 8) -> Stream:
    """Run steps one after another until they repeat, and so find their period. ``tails``: per device, the seconds of what
    it does at the end of a step by itself: its optimizer, and what of its gradients' reduction no computing hides.
    ``steps``: how many to run at least. Raise a ScheduleError if the steps have not come to a period after ``64``.
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
    ``run`` tells when every device ends a step, from the step's number and from when every device begins it. ``tails``: per
    device, the seconds behind that until it begins the next step.
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
    """Return how many times as fast steps follow each other without the barrier; ``LEAST_GAIN`` tells whether that is worth
    it. ``tails``: see ``stream``.
    """
    return stream(schedule, costs, tails, steps=1).gain


def draw_steps(timeline: Timeline, steps: int) -> Timeline:
    """Run several steps without a barrier between them as one schedule, to draw them. Microbatches go on being counted."""
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
    """Return so many steps of an asynchronous family's schedule, whose microbatches are those of a step."""
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
    """Raise an UnsupportedError if an asynchronous schedule is of a file, or has too few microbatches."""
    if schedule.name not in {family.name for family in families() if family.asynchronous}:
        raise UnsupportedError("no-steps", f"{schedule.name} has no steps: {NEVER_FLUSHED}, or leave --steps out")
    check_batch(schedule.name, schedule.num_devices, schedule.num_microbatches)


class _Windows:
    """The steps of an asynchronous family's schedule: the windows of its stream, one after the other."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        _check_family(schedule)
        costs.require_alike("a window of a stream that is never flushed")
        self._schedule, self._costs = schedule, costs
        self._size = schedule.name, schedule.num_devices, schedule.num_microbatches
        self._found: dict[Moment, Window] = {}
        self._forwards: dict[Action, float] = {}
        """ends of the forwards of the step before, in the numbers of the next one"""

    def run(self, number: int, begins: Sequence[float]) -> list[float]:
        """Return when every device has done a step. The first step fills the pipeline; all others are alike."""
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
