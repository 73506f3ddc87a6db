"""Messages of a program: their devices, and the checks of the actions that ``lower`` adds to a schedule.

Functions that check a rule raise a ScheduleError for the first violation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COMPLETING, KIND_AND_STAGE, ORDERED, Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import ActionNodes, Order, Program, Schedule, come_before

Edge = tuple[int, int]


class Message(NamedTuple):
    """One tensor that is sent between two devices: its edge (source, destination), and the actions that post it."""

    edge: Edge
    send: Action
    receive: Action


class Route(NamedTuple):
    """The messages from one stage to a neighbour on another device."""

    edge: Edge
    kinds: tuple[Kind, ...]  # of the actions that emit the messages, and of those that wait for them
    send: Kind
    source: int
    receive: Kind
    destination: int


RoutedUnit = tuple[int, Route, int]
"""A message: the position of the action that emits it or waits for it, its route, and its unit."""


class Router:
    """Map compute actions to the messages that they emit and wait for, under one placement."""

    def __init__(self, placement: Placement):
        devices = placement.devices
        self.routes: list[Route] = []
        for stage, device in enumerate(devices):
            after = placement.next_stage(stage)
            if after is None or devices[after] == device:
                continue
            self.routes += [
                Route((device, devices[after]), (Kind.F,), Kind.SEND_F, stage, Kind.RECV_F, after),
                Route((devices[after], device), (Kind.I, Kind.B), Kind.SEND_I, after, Kind.RECV_I, stage),
            ]
        self._emits = {(kind, route.source): route for route in self.routes for kind in route.kinds}
        self._awaits = {(kind, route.destination): route for route in self.routes for kind in route.kinds}

    @property
    def edges(self) -> set[Edge]:
        return {route.edge for route in self.routes}

    @property
    def emitting(self) -> Collection[tuple[Kind, int]]:
        """Return kind and stage of the actions whose result is sent to another device."""
        return self._emits.keys()

    def emitted_by(self, order: Order) -> Iterator[RoutedUnit]:
        """Yield the messages with the results of an order's actions, in the order of these actions."""
        return _routed(order, self._emits)

    def awaited_by(self, order: Order) -> Iterator[RoutedUnit]:
        """Yield the messages that an order's actions need, in the order of these actions."""
        return _routed(order, self._awaits)

    def emitted(self, action: Action) -> Message | None:
        """Return the message with the result of a compute action; ``None`` if the result stays on the device."""
        kind, stage, microbatch = action
        route = self._emits.get((kind, stage))
        if route is None:
            return None
        edge, _, send, source, receive, destination = route
        return Message(edge, Action(send, source, microbatch), Action(receive, destination, microbatch))

    def awaited(self, action: Action) -> Action | None:
        """Return the receive that a compute action needs; ``None`` if its input is on the device."""
        kind, stage, microbatch = action
        route = self._awaits.get((kind, stage))
        return None if route is None else Action(route.receive, stage, microbatch)

    def needed_send(self, action: Action) -> Action | None:
        """Return the send of the message that a compute action needs; ``None`` if its input is on the device."""
        kind, stage, microbatch = action
        route = self._awaits.get((kind, stage))
        return None if route is None else Action(route.send, route.source, microbatch)


def _routed(order: Order, routes: Mapping[tuple[Kind, int], Route]) -> Iterator[RoutedUnit]:
    """Yield the messages of an order's actions. ``routes`` has those of every kind and stage of actions."""
    for position, route in enumerate(map(routes.get, map(KIND_AND_STAGE, order))):
        if route is not None:
            yield position, route, order[position][2]


Places = dict[Action, tuple[int, int]]
"""Device and position of every action."""


def places_of(rows: Sequence[Order]) -> Places:
    """Return device and position of every action in orders or in the rows of a program; check that none occurs twice."""
    places: Places = {}
    for device, row in enumerate(rows):
        for position, action in enumerate(row):
            if action in places:
                other_device = places[action][0]
                raise ScheduleError(
                    "duplicate-action",
                    f"already stands on device {other_device}; remove one of the two, or "
                    "correct the stage or microbatch of one",
                    at=(device, position, action),
                )
            places[action] = device, position
    return places


def check_pairs(schedule: Schedule, rows: Sequence[Order]) -> None:
    """Check that every pair is a forward with a backward right after it, of another stage or microbatch.

    Pairs are refused in a schedule with slices, vocabulary passes, recomputation, offload or asynchronous updates.
    ``rows`` are the orders of the schedule, or the actions of its program.
    """
    if not schedule.pairs:
        return
    is_present = {
        "sequence slices": not schedule.units.are_whole,
        "vocabulary passes": schedule.vocabulary_barriers,
        "recomputation": schedule.recomputed,
        "offload": schedule.offloads,
        "asynchronous updates": schedule.updates,
    }
    for feature in filter(is_present.get, is_present):
        raise ScheduleError(
            "bad-pair", f"pairs do not run in a schedule with {feature}; drop its pairs or the {feature}"
        )
    places = places_of(rows)
    for first in sorted(schedule.pairs):
        if first not in places:
            raise ScheduleError(
                "bad-pair", f"no device runs {first}, the forward of a pair; add it to an order, or drop the pair"
            )
        device, position = places[first]
        second = next(iter(rows[device][position + 1 :]), None)
        if first.kind is not Kind.F or second is None or second.kind not in (Kind.I, Kind.B):
            problem = f"is paired with {second or 'nothing'}; a pair is a forward and an I or B right after it"
        elif first[1:] == second[1:]:
            problem = f"cannot run together with {second}, its own backward; drop the pair"
        else:
            continue
        raise ScheduleError("bad-pair", problem, at=(device, position, first))


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
        if tuple(action for action in actions if action[0] in ORDERED) == order:
            continue
        computed = [(position, action) for position, action in enumerate(actions) if action.kind in ORDERED]
        for scheduled, lowered in zip_longest(order, computed):
            position, action = lowered or (len(actions), None)
            if scheduled != action:
                raise ScheduleError(
                    "stale-program",
                    f"the schedule has {scheduled or 'nothing more'} here and the program {action or 'nothing more'}; "
                    "lower the schedule again",
                    at=(device, position, action or scheduled),
                )


def is_regular(program: Program, nodes: ActionNodes) -> bool:
    """Return whether all messages and gradient reductions of a program are in their places, and no others.

    ``check_messages`` finds the fault of a program that is not regular, or proves it if its model has replicas. It takes ten
    times as long.
    """
    devices, lanes, actions = program.placement.devices, nodes.lanes, nodes.actions
    if program.placement.replicas > 1 or sum(map(len, nodes.groups.values())) < len(actions):
        return False
    posted: set[tuple[Kind, int]] = set()
    posts_of: defaultdict[Edge, list[tuple[int, int]]] = defaultdict(list)
    for edge, kinds, send, source, receive, destination in Router(program.placement).routes:
        producers, consumers = nodes.of(*kinds, stage=source), nodes.of(*kinds, stage=destination)
        sends, receives = nodes.of(send, stage=source), nodes.of(receive, stage=destination)
        if not sends.keys() == producers.keys() == receives.keys() == consumers.keys():
            return False
        if not come_before(producers, sends) or not come_before(receives, consumers):
            return False
        for device, group in zip(edge, (sends, receives), strict=True):
            are_there = all(map(lanes[device].__contains__, group.values()))
            if not are_there or 0 in group and actions[group[0]].microbatch is None:
                return False
        posted |= {(send, source), (receive, destination)}
        posts_of[edge] += zip(sends.values(), map(receives.__getitem__, sends), strict=True)
    for posts in posts_of.values():
        if any(receive > after for (_, receive), (_, after) in pairwise(sorted(posts))):
            return False
    complete: defaultdict[int, int] = defaultdict(int)
    for (kind, stage), completing in nodes.groups.items():
        if kind in COMPLETING:
            complete[stage] = max(complete[stage], *completing.values())
    for stage, last in complete.items():
        reductions = nodes.of(Kind.REDUCE_GRAD, stage=stage)
        node = reductions.get(0, last)
        if len(reductions) != 1 or not last < node < lanes[devices[stage]].stop or actions[node].microbatch is not None:
            return False
        posted.add((Kind.REDUCE_GRAD, stage))
    return all(kind in ORDERED or (kind, stage) in posted for kind, stage in nodes.groups)


def check_messages(program: Program, places: Places) -> None:
    """Check that all messages, gradient reductions and sums over replicas are in their places, and no others."""
    router, computed = Router(program.placement), [action for order in program.schedule.orders for action in order]
    messages = {action: message for action in computed if (message := router.emitted(action)) is not None}
    receives = {action: receive for action in computed if (receive := router.awaited(action)) is not None}
    check_posts(program, places, messages, receives)
    check_channels(program, places, messages.values())


class Post(NamedTuple):
    """The place of an action that ``lower`` adds: on the device of its stage, before or after an action there."""

    lack: str  # the fault of a program without the action, for messages of errors
    neighbour: Action | None
    follows: bool = True  # whether the action comes after the neighbour


def check_posts(
    program: Program, places: Places, messages: Mapping[Action, Message], receives: Mapping[Action, Action]
) -> None:
    """Check that a program has all messages, reductions and sums over replicas in their places, and no others."""
    not_sent, not_received = "its result does not reach the next device", "its input does not reach this device"
    posts = {message.send: Post(not_sent, producer) for producer, message in messages.items()}
    posts |= {receive: Post(not_received, consumer, follows=False) for consumer, receive in receives.items()}
    posts |= _reductions(program)
    for action, (lack, neighbour, follows) in posts.items():
        home = program.placement.devices[action.stage]
        side = "" if neighbour is None else f" {'after' if follows else 'before'} {neighbour}"
        if action not in places:
            at = (home, len(program.actions[home]), action) if neighbour is None else (*places[neighbour], neighbour)
            raise ScheduleError("missing-action", f"{lack} without {action}; add {action}{side}", at=at)
        device, position = places[action]
        if device != home:
            code, problem = "misplaced-action", f"belongs on device {home}{side}; move it there"
        elif neighbour is not None and (places[neighbour][1] < position) is not follows:
            code, problem = "wrong-order", f"must come{side}; move it"
        else:
            continue
        raise ScheduleError(code, problem, at=(device, position, action))
    for action, place in places.items():
        if action.kind not in ORDERED and action not in posts:
            problem = "its stage has nothing to send, receive or sum with it in this step; remove it"
            raise ScheduleError("useless-action", problem, at=(*place, action))


def _reductions(program: Program) -> dict[Action, Post]:
    """Return the place of every gradient reduction and sum over replicas.

    Every stage with weight gradients has a ``REDUCE_GRAD`` after the last of them. With replicas of the model, every
    replica of such a stage has a ``REDUCE_REPLICAS`` after its last weight gradient, and its ``REDUCE_GRAD`` after that.
    """
    placement, lack = program.placement, "the gradients of the stage are not complete"
    last = {action.stage: action for order in program.schedule.orders for action in order if action.kind in COMPLETING}
    trained = {replica for stage in last for replica in placement.counterparts(stage)}
    posts = {}
    for stage in sorted(trained):
        complete = last.get(stage)
        if placement.replicas > 1:
            total = Action(Kind.REDUCE_REPLICAS, stage)
            posts[total], complete = Post(lack, complete), total
        posts[Action(Kind.REDUCE_GRAD, stage)] = Post(lack, complete)
    return posts


class Posting(NamedTuple):
    """An action that posts a message, sum or collective to a channel, and its position in the program of its device."""

    position: int
    action: Action
    message: tuple[object, ...]  # stands for the message, sum or collective; equal on all devices that post it


def check_channels(program: Program, places: Places, messages: Iterable[Message]) -> None:
    """Check that two devices post the messages of their edge, and their sums over replicas, in the same order.

    Devices with replicas of the same stages have one channel for their sums.
    """
    placement = program.placement
    channels: dict[tuple[str, tuple[int, ...]], dict[int, dict[tuple[object, ...], Posting]]] = {}

    def post(code: str, devices: tuple[int, ...], action: Action, message: tuple[object, ...]) -> None:
        device, position = places[action]
        queue = channels.setdefault((code, devices), {}).setdefault(device, {})
        # A device with several replicas of a stage starts the sum when it has posted the last of them.
        queue[message] = Posting(position, action, message)

    for edge, send, receive in messages:
        post("message-order", edge, send, send)
        post("message-order", edge, receive, send)
    for action in places:
        if action.kind is Kind.REDUCE_REPLICAS:
            stage = action.stage % placement.model_stages
            post("collective-order", placement.holders(action.stage), action, (stage,))
    for (code, _), queues in channels.items():
        check_channel(code, {device: [*queue.values()] for device, queue in queues.items()})


def check_channel(code: str, queues: Mapping[int, Sequence[Posting]]) -> None:
    """Check that all devices of a channel post the same sequence. ``queues`` has the postings of every device."""
    (first, own), *others = ((device, sorted(queue)) for device, queue in queues.items())
    for device, queue in others:
        for ours, theirs in zip(own, queue, strict=True):
            if ours.message != theirs.message:
                due = next(posting.action for posting in queue if posting.message == ours.message)
                raise ScheduleError(
                    code,
                    f"is posted where device {first} posts {ours.action}, at position {ours.position}; a channel runs its "
                    f"posts in posting order, so post {due} first",
                    at=(device, theirs.position, theirs.action),
                )
