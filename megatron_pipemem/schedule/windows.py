"""Cut a pipeline that is never flushed into what one call of a training loop runs.

A training loop asks for one batch after the other, and steps the optimizer in between. So an endless stream of batches is
cut, on every device, right behind its last backward of a batch: a window runs all backwards of its own batch and no other,
and the first forwards of the batches behind it. The last device looks ahead of nothing, so its losses are of the window's
own batch.

A window is cut out of a stream that is long enough to look like the endless one, is lowered as a whole, and is proved as a
whole. What is left out of a window afterwards are whole microbatches, on all devices alike: those that nobody will run
backward, when the stream ends, or that earlier windows did not run, when it begins in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import COMPLETING, COMPUTE, MESSAGES, SENDS, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.lowering.messages import add_gradient_reductions
from megatron_pipemem.schedule.lowering.single_queue import add_messages_to_single_queues
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.registry import build_schedule, family
from megatron_pipemem.schedule.schedule import Order, Program, Schedule, versions_held, weight_uses
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate
from megatron_pipemem.schedule.single_queue import run_single_queues
from megatron_pipemem.schedule.validator import validate_program

UPDATE_EVERY = "update_every"
"""The option of families that update after groups of microbatches: how many."""


@dataclass(frozen=True)
class Moment:
    """Say where in the stream a window stands, as far as it matters to its order.

    Args:
        before: batches whose updates came before it, at most ``horizon``.
        done: batches from its own one on of which earlier windows ran the forwards that belong to them.
        left: batches behind its own that the stream will have, at most ``horizon``.
    """

    before: int
    done: int
    left: int


def horizon(num_devices: int, batch: int) -> int:
    """Return over how many batches the pipeline spreads: 1F1B runs at most ``p - 1`` forwards ahead."""
    return -(-(num_devices - 1) // batch)


@dataclass(frozen=True)
class Window:
    """Hold what every device runs in one call.

    Microbatches are numbered from the first one of the call's own batch, versions of the weights from the newest one at
    its start, which is 0; older ones are negative.

    Args:
        stream: the schedule it was cut from.
        batch: microbatches per call.
        moment: its place in the stream.
        actions: per device.
        past: per device, what the stream ran before, in the numbers of this window, as if it had begun with ``before``
            batches; without what it did not run forward.
        versions: the version that every forward and backward uses.
        updates: the actions behind which a device makes its next version, and the older versions that it needs after that.
    """

    stream: Schedule
    batch: int
    moment: Moment
    actions: tuple[Order, ...]
    past: tuple[Order, ...]
    versions: Mapping[Action, int]
    updates: Mapping[Action, frozenset[int]]

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
    """Return whether a family keeps its promise of two versions of the weights.

    Args:
        name: of an asynchronous family.
        num_devices: ``p``.
        batch: microbatches per call.

    Raises:
        UnsupportedError: it updates once per call, and calls are too short for that.
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
    """Cut a window out of the stream of a registered family.

    Args:
        name: of the family.
        num_devices: ``p``.
        batch: microbatches per call.
        moment: the window's place.
        single_queue: see ``lower``; the places of messages are chosen for the ``costs`` among the arguments.
        arguments: of ``build_schedule``.

    Raises:
        UnsupportedError: the family cannot be built so.
        ScheduleError: the stream is wrong, or its messages cross the ends of windows.
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
