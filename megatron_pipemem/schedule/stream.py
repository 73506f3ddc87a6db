"""Consecutive training steps without a barrier: their period, and the windows of an asynchronous schedule.

At the end of a step, all pipeline ranks of Megatron wait for each other (the barrier), although some devices finish
long before the last one. An optimizer that is validated later (arXiv 2401.10241, section 4) lets every device begin a
step when its own part of the previous step is done. The *period* is then the time from step to step. For many
schedules it equals the time of a step with a barrier.

Asynchronous schedules need no such optimizer, because a step uses older weights anyway. Their batches form an endless
*stream*, which is cut into *windows*: the actions of every device in one call of the training loop. On every device a
window ends after the last backward of the call's batch. So a window has all backwards of its batch and no others, and
the first forwards of later batches. The last device runs no forwards ahead, so its losses are those of the window's
batch. Three devices with batches of two microbatches, for example, have these windows:

    device 0: F0 F1 F2 B0 F3 B1 | F4 B2 F5 B3 | F6 B4 F7 B5 | ...
    device 1: F0 F1 B0 F2 B1    | F3 B2 F4 B3 | F5 B4 F6 B5 | ...
    device 2: F0 B0 F1 B1       | F2 B2 F3 B3 | F4 B4 F5 B5 | ...

The stream is lowered and proved as a whole, and then the window is taken out of it. Microbatches that must not run are
left out on all devices. Near the end of the stream, these are later microbatches that would never run backward. If
training begins in the middle of the stream, they are microbatches that earlier windows did not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import isclose
from typing import Any

from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import COMPLETING, COMPUTE, MESSAGES, SENDS, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import needs_of
from megatron_pipemem.schedule.lowering import add_gradient_reductions, add_messages_to_single_queues, lower
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.registry import build_schedule, families, family
from megatron_pipemem.schedule.schedule import NEVER_FLUSHED, Order, Program, Schedule, versions_held, weight_uses
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.waits import run_single_queues

UPDATE_EVERY = "update_every"
"""The name of the families' option for the number of microbatches per weight update."""


@dataclass(frozen=True)
class Moment:
    """The position of a window in its stream. Windows at equal moments have equal orders."""

    before: int  # earlier batches that have updated the weights, at most ``horizon``
    done: int  # batches, the window's own included, whose first forwards ran in earlier windows
    left: int  # later batches in the stream, at most ``horizon``


def horizon(num_devices: int, batch: int) -> int:
    """Return how many later batches can have forwards in a window: 1F1B runs at most ``p - 1`` forwards ahead."""
    return -(-(num_devices - 1) // batch)


@dataclass(frozen=True)
class Window:
    """The actions of every device in one call of the training loop, under an asynchronous schedule.

    Microbatches count from the first one of the call's batch. Weight versions count from the newest one at the start
    of the window, which is 0. Older versions are negative.
    """

    stream: Schedule  # the schedule that the window is a part of
    batch: int  # microbatches per call
    moment: Moment  # the position of the window in the stream
    actions: tuple[Order, ...]  # per device
    past: tuple[Order, ...]
    """Per device, the actions of the last ``moment.before`` windows, with microbatches numbered as in this window.
    Forwards that did not run are left out."""
    versions: Mapping[Action, int]  # the version that every forward and backward uses
    updates: Mapping[Action, frozenset[int]]
    """The actions after which a device updates its weights, each with the older versions that later actions use."""

    def __repr__(self) -> str:
        return f"<Window of {self.batch} microbatches, {sum(map(len, self.actions))} actions, of {self.stream!r}>"

    @cached_property
    def program(self) -> Program:
        """Return the window's program for the executor. It has no proof of its own: the whole ``stream`` is proved."""
        return Program(self.stream, self.actions)

    @cached_property
    def up_to_its_end(self) -> Program:
        """Return the actions of earlier windows and of this one. The memory that is held follows from all of them."""
        return Program(self.stream, tuple(map(tuple.__add__, self.past, self.actions)))

    @cached_property
    def updates_per_call(self) -> int:
        assert self.stream.updates is not None
        return self.batch // self.stream.updates.every

    @cached_property
    def versions_held(self) -> tuple[int, ...]:
        """Return for every device the most weight versions of its stage that it holds at once."""
        return versions_held(self.stream)

    @cached_property
    def schedule(self) -> Schedule:
        """Return the compute actions of the window, without the past, as a schedule to simulate and draw."""
        orders = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in self.actions)
        return replace(self.stream, orders=orders, updates=None, units=Units.equal(self.batch))

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """Simulate the window. All devices begin at the same time. Peaks count the memory of earlier windows too.

        Raise a CostsError if ``costs`` have factors of microbatches.
        """
        costs = costs or Costs()
        costs.require_alike("a window of a stream that is never flushed")
        run = frozenset(action for actions in self.past for action in actions)
        timeline = simulate(self.schedule, costs, run)
        orders = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in self.up_to_its_end.actions)
        return replace(timeline, peaks=peaks(replace(self.stream, orders=orders), timeline.costs))


def steady(num_devices: int, batch: int) -> Moment:
    """Return a moment in the middle of a long stream. ``batch`` is the number of microbatches per call."""
    far = horizon(num_devices, batch)
    return Moment(far, far, far)


def updates_per_batch(name: str) -> bool:
    """Return whether a family updates its weights once per batch, and not after every microbatch."""
    return UPDATE_EVERY in family(name).options


def check_batch(name: str, num_devices: int, batch: int) -> None:
    """Raise an UnsupportedError if a family that updates once per batch would need more than two weight versions.

    It would if ``batch``, the number of microbatches per step, is smaller than the number of devices.
    """
    if updates_per_batch(name) and batch < num_devices:
        raise UnsupportedError(
            "needs-microbatches",
            f"schedule {name} keeps two versions of the weights, and so needs at least as many microbatches per step "
            f"as pipeline ranks, {num_devices}, not {batch}; raise --global-batch-size",
        )


def family_window(
    name: str, num_devices: int, batch: int, moment: Moment, *, single_queue: bool = False, **arguments: Any
) -> Window:
    """Return the window of an asynchronous family at a moment of its stream."""
    per_batch = updates_per_batch(name)
    if per_batch:
        arguments = {**arguments, UPDATE_EVERY: batch}
    # One batch more than needed, so that the window is not affected by the end of the stream.
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
    # Per window up to this one, the actions of each device.
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
    if per_batch:  # then gradients are complete, and are summed over data-parallel ranks
        own = list(map(add_gradient_reductions, own))
    uses = _weights(stream, batch, first, behind_messages=not single_queue)
    window = Window(stream, batch, moment, tuple(own), tuple(past), *uses)
    if single_queue:
        run_single_queues(window.program)
    return window


def _in_single_queues(stream: Schedule, actions: Sequence[Order], costs: Costs) -> list[Order]:
    """Return the actions of a window, with messages inserted anew for devices that have a single queue.

    Every message that a window receives is also sent in the same window (``_check_messages``).
    """
    router = Router(stream.placement)
    orders = tuple(tuple(a for a in row if a.kind not in MESSAGES) for row in actions)
    computed = [action for order in orders for action in order]
    awaited = {receive for action in computed if (receive := router.awaited(action))}
    sent = {message.receive for action in computed if (message := router.emitted(action))}
    return list(add_messages_to_single_queues(stream, costs, orders, awaited - sent))


def _window_numbers(actions: Order, batch: int) -> list[int]:
    """Return the number of the window of every action of a device, counted from 0.

    A window ends after the last backward of its batch, and after the message with the gradient of that backward.
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
    """Check that every message is sent and received in the same window, for all windows up to number ``last``.

    ``number`` has the number of every action's window, from 0. A ScheduleError is raised for the first violation.
    Evaluation can then run between two windows without receiving their messages.
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
                    f"is posted in window {received}, but device {message.edge[0]} sends the message in window {sent}; "
                    "post both in the same window",
                    at=(device, program.actions[device].index(message.receive), message.receive),
                )


def _weights(
    stream: Schedule, batch: int, first_microbatch: int, behind_messages: bool
) -> tuple[dict[Action, int], dict[Action, frozenset[int]]]:
    """Return ``versions`` and ``updates`` of the window whose batch begins with ``first_microbatch`` of the stream.

    With ``behind_messages`` an update comes after the message that follows its action, because another device waits
    for the message.
    """
    assert stream.updates is not None
    newest = first_microbatch // stream.updates.every
    router = Router(stream.placement)
    versions: dict[Action, int] = {}
    updates: dict[Action, frozenset[int]] = {}
    still_used: dict[int, set[int]] = {}
    for use in reversed(list(weight_uses(stream))):
        action = use.action._replace(microbatch=use.action.microbatch - first_microbatch)
        versions[action] = use.version - newest
        later = still_used.setdefault(use.action.stage, set())
        if use.updates and 0 <= action.microbatch < batch:
            message = router.emitted(use.action)
            behind = message.send._replace(microbatch=action.microbatch) if message and behind_messages else action
            updates[behind] = frozenset(version for version in later if version <= use.newest - newest)
        later.add(use.version - newest)
    return versions, updates


LEAST_GAIN = 1.001
"""The smallest speed-up for which steps without the barrier are worth their effort."""

_MOST_STEPS = 64
"""The most steps that are simulated to find a period. All families of this package need fewer."""


@dataclass(frozen=True)
class ConsecutiveSteps:
    """The times of consecutive steps with and without a barrier."""

    synchronous: float  # seconds from step to step if all devices wait for each other before the optimizer
    period: float  # seconds from step to step if no device waits for another one
    ends: tuple[tuple[float, ...], ...]
    """Per step and device, the end of the device's part without a barrier, its tail included. Step 0 begins at 0."""

    @property
    def gain(self) -> float:
        """Return the speed-up without the barrier: ``synchronous / period``."""
        return self.synchronous / self.period if self.period else 1.0


def bubble_in_a_run(timeline: Timeline) -> float:
    """Return the share of a step in which the busiest device idles in a run with a barrier between steps.

    It is that of the timeline, but for an asynchronous schedule, which fills the pipeline and does not drain it.
    """
    if timeline.schedule.updates is None:
        return timeline.bubble_rate
    return 1 - timeline.ideal / consecutive_steps(timeline.schedule, timeline.costs, steps=1).synchronous


def consecutive_steps(
    schedule: Schedule, costs: Costs | None = None, tails: Sequence[float] = (), steps: int = 8
) -> ConsecutiveSteps:
    """Simulate consecutive steps until their times repeat; return the time per step with and without a barrier.

    ``tails`` has the seconds of every device's own work at the end of a step: its optimizer, and the part of its
    gradient reduction that does not overlap with computing. At least ``steps`` steps are simulated. Raise a
    ScheduleError if there is no period after 64 steps.
    """
    tails = tuple(tails) or (0.0,) * schedule.num_devices
    if len(tails) != schedule.num_devices:
        raise CostsError(
            "wrong-count", f"tails has {len(tails)} times for {schedule.num_devices} devices; give one per device"
        )
    costs = costs or Costs()

    def ends_of_step(_: int, begins: Sequence[float]) -> list[float]:
        return _ends(simulate(schedule, costs, begins=begins), begins)

    run = ends_of_step if schedule.updates is None else _Windows(schedule, costs).run
    synchronous = max((ends_of_step if schedule.updates is None else _Windows(schedule, costs).run)(_MOST_STEPS, tails))
    begins: tuple[float, ...] = (0.0,) * len(tails)
    begins_of_steps: list[tuple[float, ...]] = []
    period = None
    while len(begins_of_steps) < steps or period is None:
        if len(begins_of_steps) == max(steps, _MOST_STEPS):
            raise ScheduleError(
                "no-period",
                f"{schedule.name}: the times of steps without a barrier do not repeat within {len(begins_of_steps)} steps; use "
                "other costs, or keep the barrier",
            )
        begins = tuple(end + tail for end, tail in zip(run(len(begins_of_steps), begins), tails, strict=True))
        begins_of_steps.append(begins)
        period = _period(begins_of_steps) if period is None else period
    return ConsecutiveSteps(synchronous, period, tuple(begins_of_steps))


def gain_without_barrier(schedule: Schedule, costs: Costs | None = None) -> float:
    """Return the speed-up of consecutive steps without the barrier. Compare the result with ``LEAST_GAIN``."""
    return consecutive_steps(schedule, costs, steps=1).gain


def draw_steps(timeline: Timeline, steps: int) -> Timeline:
    """Return the simulated timeline of several steps without a barrier, as one long schedule. Nothing is drawn yet.

    Raise an UnsupportedError for a schedule with replicas, and for costs with factors of microbatches.
    """
    schedule, costs = timeline.schedule, timeline.costs
    if schedule.placement.replicas > 1:
        raise UnsupportedError(
            "no-steps",
            f"{schedule.name}: a schedule with replicas cannot be drawn for several steps; leave --steps out",
        )
    if costs.microbatch is not None:
        raise UnsupportedError(
            "no-steps",
            "a schedule cannot be drawn for several steps if its microbatches have factors; leave --steps out, or the key "
            "microbatch of the costs",
        )
    if schedule.updates is not None:
        drawn = _endless(schedule, steps)
    else:

        def repeated(actions: Iterable[Action]) -> Iterator[Action]:
            for step in range(steps):
                yield from (
                    action._replace(microbatch=action.microbatch + step * len(schedule.units)) for action in actions
                )

        orders, pairs = tuple(map(tuple, map(repeated, schedule.orders))), frozenset(repeated(schedule.pairs))
        drawn = replace(schedule, units=schedule.units.times(steps), orders=orders, pairs=pairs)
    return replace(simulate(replace(drawn, name=f"{schedule.name}, {steps} steps"), costs), steps=steps)


def _endless(schedule: Schedule, steps: int) -> Schedule:
    """Return several steps of an asynchronous family as one schedule."""
    _check_family(schedule)
    devices, microbatches = schedule.num_devices, schedule.num_microbatches * steps
    return build_schedule(schedule.name, num_devices=devices, num_microbatches=microbatches, **_options(schedule))


def _options(schedule: Schedule) -> dict[str, Any]:
    """Return the options with which ``build_schedule`` continues an asynchronous schedule over several steps."""
    if updates_per_batch(schedule.name):
        return {UPDATE_EVERY: schedule.num_microbatches}
    assert schedule.updates is not None
    return {"vertical_sync": schedule.updates.delay is not None}


def _check_family(schedule: Schedule) -> None:
    """Raise an UnsupportedError if an asynchronous schedule is not that of a family, or has too few microbatches."""
    if schedule.name not in {family.name for family in families() if family.asynchronous}:
        raise UnsupportedError("no-steps", f"{schedule.name} has no steps: {NEVER_FLUSHED}, or leave --steps out")
    check_batch(schedule.name, schedule.num_devices, schedule.num_microbatches)


class _Windows:
    """Simulate the steps of an asynchronous family: the windows of its stream, one after the other."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        _check_family(schedule)
        costs.require_alike("a window of a stream that is never flushed")
        self._schedule, self._costs = schedule, costs
        self._size = schedule.name, schedule.num_devices, schedule.num_microbatches
        self._by_moment: dict[Moment, Window] = {}
        self._forwards: dict[Action, float] = {}
        """ends of the forwards of the previous step, with microbatches numbered as in the next step"""

    def run(self, number: int, begins: Sequence[float]) -> list[float]:
        """Simulate step ``number`` from each device's start on, and return the end of every device's part.

        Step 0 fills the pipeline. Steps must be simulated one after the other from 0: each uses the forwards that the
        previous one ran for it.
        """
        far = horizon(*self._size[1:])
        moment = Moment(min(number, far), far if number else 0, far)
        if moment not in self._by_moment:
            self._by_moment[moment] = family_window(*self._size, moment, costs=self._costs, **_options(self._schedule))
        window = self._by_moment[moment]
        already = {action for actions in window.past for action in actions}
        # A device's first action is the only one that may need data of the previous step from another device.
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

    def _arrival(self, device: int, first_action: Action) -> float:
        """Return when the input of a device's first action arrives; 0 if no forward of the previous step makes it."""
        placement = self._schedule.placement
        return max(
            (
                self._forwards[needed] + self._costs.link_seconds(placement.devices[needed.stage], device)
                for needed in needs_of(first_action, placement, ())
                if needed in self._forwards
            ),
            default=0.0,
        )


def _ends(timeline: Timeline, begins: Sequence[float]) -> list[float]:
    """Return the time at which every device ends its last action, or its last sum over replicas."""
    ends = [spans[-1][1] if spans else begin for spans, begin in zip(timeline.spans, begins, strict=True)]
    for reduction in timeline.replica_reductions:
        for device in timeline.schedule.placement.holders(reduction.action.stage):
            ends[device] = max(ends[device], reduction.end)
    return ends


def _period(ends: Sequence[tuple[float, ...]]) -> float | None:
    """Return the seconds per step if all ends of the last step are an earlier step's plus one delay, else ``None``."""
    last = ends[-1]
    for back, before in enumerate(reversed(ends[:-1]), start=1):
        shifts = [b - a for a, b in zip(before, last, strict=True)]
        if all(isclose(shift, shifts[0], rel_tol=1e-9) for shift in shifts):
            return max(shifts) / back
    return None
