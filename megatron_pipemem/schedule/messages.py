"""Messages of a program: their devices, and the rules for messages, gradient reductions, recomputation and offload.

Functions that check a rule raise a ScheduleError for the first violation.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import NamedTuple

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import (
    COMPLETING,
    ORDERED,
    RECEIVES,
    RECOMPUTE,
    ROUND_TRIP,
    WHOLE_STAGE,
    Action,
    Kind,
)
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Program, Schedule

Edge = tuple[int, int]


class Message(NamedTuple):
    """One tensor that is sent between two devices: its edge (source, destination), and the actions that post it."""

    edge: Edge
    send: Action
    receive: Action


class Router:
    """Map compute actions to the messages that they emit and wait for, under one placement."""

    def __init__(self, placement: Placement):
        devices = placement.devices
        self._emits: dict[tuple[Kind, int], tuple[Edge, Kind, int, Kind, int]] = {}
        self._awaits: dict[tuple[Kind, int], Kind] = {}
        for stage, device in enumerate(devices):
            after = placement.next_stage(stage)
            if after is None or devices[after] == device:
                continue
            activations = ((device, devices[after]), Kind.SEND_F, stage, Kind.RECV_F, after)
            gradients = ((devices[after], device), Kind.SEND_I, after, Kind.RECV_I, stage)
            self._emits |= {
                (Kind.F, stage): activations,
                (Kind.I, after): gradients,
                (Kind.B, after): gradients,
            }
            self._awaits |= {
                (Kind.F, after): Kind.RECV_F,
                (Kind.I, stage): Kind.RECV_I,
                (Kind.B, stage): Kind.RECV_I,
            }

    @property
    def edges(self) -> set[Edge]:
        return {edge for edge, *_ in self._emits.values()}

    @property
    def emitting(self) -> Collection[tuple[Kind, int]]:
        """Return kind and stage of the actions whose result is sent to another device."""
        return self._emits.keys()

    def emitted(self, action: Action) -> Message | None:
        """Return the message with the result of a compute action; ``None`` if the result stays on the device."""
        kind, stage, microbatch = action
        route = self._emits.get((kind, stage))
        if route is None:
            return None
        edge, send, source, receive, destination = route
        return Message(edge, Action(send, source, microbatch), Action(receive, destination, microbatch))

    def awaited(self, action: Action) -> Action | None:
        """Return the receive that a compute action needs; ``None`` if its input is on the device."""
        kind, stage, microbatch = action
        receive = self._awaits.get((kind, stage))
        return None if receive is None else Action(receive, stage, microbatch)


Places = dict[Action, tuple[int, int]]
"""Device and position of every action."""


def check_compute_actions(program: Program) -> None:
    """Check that a program's actions, without messages and gradient reductions, equal the orders of its schedule."""
    orders = program.schedule.orders
    if len(program.actions) != len(orders):
        raise ScheduleError(
            "stale-program",
            f"the program has actions for {len(program.actions)} devices but its schedule has {len(orders)}; "
            "lower the schedule again",
        )
    for device, (order, actions) in enumerate(zip(orders, program.actions, strict=True)):
        computed = [(position, action) for position, action in enumerate(actions) if action.kind in ORDERED]
        for wanted, found in zip_longest(order, computed):
            position, action = found or (len(actions), wanted)
            if action != wanted or found is None:
                raise ScheduleError(
                    "stale-program",
                    f"the schedule has {wanted or 'nothing more'} here and the program "
                    f"{found[1] if found else 'nothing more'}; lower the schedule again",
                    at=(device, position, action),
                )


def check_adjacent(orders: Sequence[Order], pairs: Container[Action]) -> None:
    """Check that every first action of a pair is a forward, and that another forward's backward follows it."""
    for device, order in enumerate(orders):
        for position, (action, second) in enumerate(zip_longest(order, order[1:])):
            if action not in pairs:
                continue
            if action.kind is Kind.F and second is not None and second.kind in (Kind.I, Kind.B):
                if action[1:] != second[1:]:
                    continue
                problem = f"cannot run together with {second}, its own backward; drop the pair"
            else:
                problem = f"is paired with {second or 'nothing'}; a pair is a forward and an I or B right after it"
            raise ScheduleError("bad-pair", problem, at=(device, position, action))


class Post(NamedTuple):
    """The place of an action that ``lower`` adds: on the device of its stage, after one action or before another one."""

    after: Action | None
    before: Action | None
    lack: str  # the fault of a program without the action, for messages of errors


def check_posts(
    program: Program, places: Places, messages: Mapping[Action, Message], receives: Mapping[Action, Action]
) -> None:
    """Check that a program has all messages, gradient reductions and sums over replicas, each in its place, and no others.

    ``messages`` has the message of every producer, and ``receives`` the receive of every consumer.
    """
    posts = {message.send: Post(made, None, _NOT_SENT) for made, message in messages.items()}
    posts |= {receive: Post(None, user, _NOT_RECEIVED) for user, receive in receives.items()}
    posts |= _reductions(program)
    for action, post in posts.items():
        home, neighbour = program.placement.devices[action.stage], post.after or post.before
        side = "" if neighbour is None else f" before {neighbour}" if post.before else f" after {neighbour}"
        if action not in places:
            at = (home, len(program.actions[home]), action) if neighbour is None else (*places[neighbour], neighbour)
            raise ScheduleError("missing-action", f"{post.lack} without {action}; add {action}{side}", at=at)
        device, position = places[action]
        if device != home:
            code, problem = "misplaced-action", f"belongs on device {home}{side}; move it there"
        elif neighbour is not None and (places[neighbour][1] > position) is (post.before is None):
            code, problem = "wrong-order", f"must come{side} at position {places[neighbour][1]}; move it"
        else:
            continue
        raise ScheduleError(code, problem, at=(device, position, action))
    for action, place in places.items():
        if action.kind not in ORDERED and action not in posts:
            use = "sum" if action.kind in WHOLE_STAGE else "receive" if action.kind in RECEIVES else "send"
            raise ScheduleError(
                "useless-action", f"its stage has nothing to {use} in this step; remove it", at=(*place, action)
            )


_NOT_SENT, _NOT_RECEIVED = "its result does not reach the next device", "its input does not reach this device"
_NOT_COMPLETE = "the gradients of the stage are not complete"


def _reductions(program: Program) -> dict[Action, Post]:
    """Return the place of every gradient reduction and sum over replicas.

    Every stage with weight gradients has a ``REDUCE_GRAD`` after the last of them. With replicas of the model, every
    replica of such a stage has a ``REDUCE_REPLICAS`` after its last weight gradient, and its ``REDUCE_GRAD`` after that.
    """
    placement = program.placement
    last = {each.stage: each for order in program.schedule.orders for each in order if each.kind in COMPLETING}
    trained = {replica for stage in last for replica in placement.counterparts(stage)}
    posts = {}
    for stage in sorted(trained):
        complete = last.get(stage)
        if placement.replicas > 1:
            total = Action(Kind.REDUCE_REPLICAS, stage)
            posts[total], complete = Post(complete, None, _NOT_COMPLETE), total
        posts[Action(Kind.REDUCE_GRAD, stage)] = Post(complete, None, _NOT_COMPLETE)
    return posts


def check_order(program: Program, places: Places, messages: Iterable[Message]) -> None:
    """Check that two devices post the messages of their edge, and their sums over replicas, in the same order.

    Devices with replicas of the same stages have one channel for their sums.
    """
    placement = program.placement
    # Per channel and device: position and action of every post, by the action that stands for the message or sum.
    channels: dict[tuple[str, tuple[int, ...]], dict[int, dict[Action, tuple[int, Action]]]] = {}
    for message in messages:
        for device, post in zip(message.edge, message[1:], strict=True):
            queue = channels.setdefault(("message-order", message.edge), {}).setdefault(device, {})
            queue[message.send] = places[post][1], post
    # A device with several replicas of a stage starts the sum when it has posted the last of them.
    sums = ((*place, action) for action, place in places.items() if action.kind is Kind.REDUCE_REPLICAS)
    for device, position, action in sorted(sums):
        queue = channels.setdefault(("collective-order", placement.holders(action.stage)), {}).setdefault(device, {})
        queue[action._replace(stage=action.stage % placement.model_stages)] = position, action
    for (code, _), queues in channels.items():
        (first, own), *others = ((device, sorted(queue.items(), key=_BY_PLACE)) for device, queue in queues.items())
        for device, theirs in others:
            for (ours, (position, action)), (other, (place, post)) in zip(own, theirs, strict=True):
                if ours != other:
                    raise ScheduleError(
                        code,
                        f"is posted where device {first} posts {action}, at position {position}; messages and sums "
                        f"of two devices run in posting order, so post {queues[device][ours][1]} first",
                        at=(device, place, post),
                    )


_BY_PLACE = itemgetter(1)


def prepared_needs(schedule: Schedule, action: Action, actions: Container[Action]) -> Iterator[Action]:
    """Yield the actions that prepare ``action`` on its device.

    For a backward these are ``2R0`` or ``2RS0`` if the schedule recomputes the stage, and ``2WAIT_RELOAD0`` if
    ``actions`` has any copy, or wait for a copy, of this stage and microbatch.
    """
    for kind in schedule.prepared.get(action.stage, ()):
        if action.kind in kind.spec.prepares:
            yield action._replace(kind=kind)
    last = ROUND_TRIP[-1]
    if action.kind in last.spec.prepares and any(action._replace(kind=kind) in actions for kind in ROUND_TRIP):
        yield action._replace(kind=last)


def check_memory_actions(schedule: Schedule, places: Mapping[Action, tuple[int, int]]) -> None:
    """Check that recomputations and copies are complete and used.

    Every recomputation must have a backward that uses it. A copy to the host must have its wait, its copy back and the
    wait for that. A stage with R keeps nothing to copy. The order on the device is checked elsewhere.
    """
    if not any(kind.spec.prepares or kind.spec.followed_by for kind in schedule.kinds):
        return
    for action, (device, position) in places.items():
        again = schedule.recomputed.get(action.stage)
        if action.kind in RECOMPUTE and action.kind is not again:
            code, problem = "duplicate-action", f"stage {action.stage} has {again} as well; remove one of the two"
        elif action.kind is Kind.OFFLOAD and again is Kind.R:
            code = "useless-action"
            problem = (
                f"stage {action.stage} is recomputed and keeps nothing to copy; remove this copy, or the stage's R"
            )
        elif (users := (Kind.I, Kind.B) if action.kind is Kind.OFFLOAD else action.kind.spec.prepares) and not any(
            action._replace(kind=Kind(user)) in places for user in users
        ):
            code = "useless-action"
            problem = f"no {' or '.join(users)} uses its result; remove it, or add one"
        elif (name := action.kind.spec.followed_by) and action._replace(kind=Kind(name)) not in places:
            code = "missing-action"
            problem = f"has no {action._replace(kind=Kind(name))} after it to complete it; add one"
        else:
            continue
        raise ScheduleError(code, problem, at=(device, position, action))
