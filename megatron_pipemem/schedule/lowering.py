"""Lower the order of compute actions to the full program that the executor interprets: what is sent where, and when each end
posts it. There are three ways.

**One channel per edge** (``add_messages``). NCCL has no tags, so a directed edge (source device -> destination device) is one
channel: both ends must post its messages in the same order. Ours is the order in which the source produces them. Sends are
posted as soon as the producer has run. Receives follow the same order, each as late as it allows, one compute action ahead of
the consumer so that the transfer can hide behind that action, and behind the waits for activations that stand between the two.

This adds no deadlock. Posts never block, a send is posted before its source waits for anything else, and a receive is
posted before its destination waits for it or for any later message of the edge. So a message that a device waits for
is held up by nothing but its producer, and that wait is already in the schedule.

A host may also wait for its whole device at any place (``schedule.waits``). So a receive is never posted before an action of
its own device on which the message depends, which hides nothing anyway. Nor is it posted after an action that depends on what
the source launches after the send. The first place after the former comes before the latter, or the schedule would wait in a
circle.

**With collectives between the actions** (``add_messages_in_sequence``). Messages and collectives may share a queue that each
device serves strictly in posting order: every message then holds up what the device posts after it until the other end has
posted it too. So all lists are cut from one sequence, in which a message stands once, for both ends, right after its producer,
and a collective stands once for all devices. Whatever waits waits for something earlier in that sequence, so nothing waits in a
circle.

**Everything in one queue** (``add_messages_to_single_queues``). With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` whatever a device
launches goes into one hardware queue: a message that waits for its other end may hold up what the device launches after it,
computing included. Here it is taken to hold up everything: the strict model, in which an action starts when the one before it
has ended, and a message moves when both its ends are at the head of their queues.

All lists are cut from one run of all devices, in which a message stands once, for both ends, and a collective once for all.
So whatever waits in a queue waits for something earlier in that run, and nothing waits in a circle, whatever the times are.
When both ends of a message are between two actions, it moves. A device that could hand one over only later, because the other
end is busy, waits for that if computing first would delay the other end by more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import accumulate

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COLLECTIVES, COMPLETING, EVERYWHERE, MEMORY, ORDERED, SENDS, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Graph
from megatron_pipemem.schedule.messages import Edge, Message, Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import explained_by_validation
from megatron_pipemem.schedule.waits import last_needed


class Horizons:
    """Count the actions of other devices that must run before a device gets to a place in its order."""

    def __init__(self, schedule: Schedule) -> None:
        found = Dependencies.of_schedule(schedule)
        if error := found.stuck():
            raise error
        self._lanes, self._needed = found.lanes, last_needed(found)

    def place(self, device: int, position: int, other: int) -> int:
        """Return how many actions of another device must have run before a device gets to a position of its order."""
        if position == 0:
            return 0
        return max(0, self._needed[self._lanes[device][position - 1]][other] - self._lanes[other].start + 1)


def add_messages(schedule: Schedule, horizons: Horizons) -> tuple[Order, ...]:
    """Insert the sends and receives of every device.

    Between two compute actions stand first the send of the one before, then the receives, ordered by source device and,
    from one source, as it sends.
    """
    orders, router = schedule.orders, Router(schedule.placement)
    consumers = {
        receive: position
        for order in orders
        for position, action in enumerate(order)
        if (receive := router.awaited(action)) is not None
    }
    sends: list[list[Action | None]] = []
    edges: dict[Edge, list[tuple[int, Action]]] = {}
    for device, order in enumerate(orders):
        emitted = [router.emitted(action) for action in order]
        sends.append([message and message.send for message in emitted])
        for position, message in enumerate(emitted):
            if message is None:
                continue
            if message.receive not in consumers:
                raise ScheduleError(
                    "unmet-need",
                    "no device runs the action that needs its result; validate() says what to add",
                    at=(device, position, order[position]),
                )
            edges.setdefault(message.edge, []).append((position, message.receive))
    posted: list[list[list[Action]]] = [[[] for _ in order] for order in orders]
    for edge, messages in sorted(edges.items()):
        order = orders[edge[1]]
        ahead = _ahead_of([consumers[receive] for _, receive in messages], order)
        for (sent, receive), position in zip(messages, ahead, strict=True):
            posted[edge[1]][_between(edge, sent, position, horizons)].append(receive)
    return tuple(map(_interleave, orders, posted, sends))


def _ahead_of(consumers: list[int], order: Order) -> list[int]:
    """Return before which action of its order each receive of an edge is posted, one compute action ahead."""
    positions = []
    first = consumers[-1]
    for consumer in reversed(consumers):
        first = min(first, consumer)
        position = max(first - 1, 0)
        while position and order[position].kind in MEMORY:
            position -= 1
        positions.append(position)
    return positions[::-1]


def _between(edge: Edge, sent: int, position: int, horizons: Horizons) -> int:
    """Return the place closest to a position where no host has to go on for the message to move once both ends are posted.

    Both bounds grow along an edge, so its order stays.
    """
    source, destination = edge
    position = max(position, horizons.place(source, sent + 1, destination))
    while horizons.place(destination, position, source) > sent + 1:
        position -= 1
    return position


def _interleave(order: Order, receives: list[list[Action]], sends: list[Action | None]) -> Order:
    lowered: list[Action] = []
    for action, posted, send in zip(order, receives, sends, strict=True):
        lowered += posted
        lowered.append(action)
        if send is not None:
            lowered.append(send)
    return tuple(lowered)


def add_gradient_reductions(actions: Order) -> Order:
    """Insert ``REDUCE_GRAD`` after the last weight gradient (W or B) of every stage of a device.

    The device's shards of embedding and head belong to its first stage, whose number is theirs: T and EMBED_B count as well.

    It comes after that action's own send: a neighbour waits for the send, and nobody for the reduction. Stages
    without backwards get none.
    """
    last = {action.stage: position for position, action in enumerate(actions) if action.kind in COMPLETING}
    lowered: list[Action] = []
    complete: Action | None = None
    for position, action in enumerate(actions):
        if complete and action.kind not in SENDS:
            lowered.append(complete)
            complete = None
        lowered.append(action)
        if last.get(action.stage) == position:
            complete = Action(Kind.REDUCE_GRAD, action.stage)
    if complete:
        lowered.append(complete)
    return tuple(lowered)


def add_replica_reductions(
    actions: tuple[Order, ...], placement: Placement, horizons: Horizons | None = None
) -> tuple[Order, ...]:
    """Return where the model stands on the devices more than once, add up the gradients of a stage's replicas.

    Every replica of a stage that trains gets a ``REDUCE_REPLICAS``, also one that runs no microbatch of this step: as soon
    as its own gradients are complete and the sums of all deeper stages on its device have been posted. Deeper stages end
    their backwards earlier, and one order for all devices needs no more than one channel between two of them. A device
    whose later actions another replica needs to complete its gradients posts its sum after these actions. ``REDUCE_GRAD``
    waits for the sum and thus for other devices; it stands behind all else, where nothing is held up by that.

    Without ``horizons`` the sums stand behind all else, too, where nothing is held up if they wait for other devices.
    """
    if placement.replicas == 1:
        return actions
    size = placement.model_stages
    trained = {each.stage % size for order in actions for each in order if each.kind is Kind.REDUCE_GRAD}
    sums = [
        sorted((s for s in stages if s % size in trained), key=lambda s: (-(s % size), s))
        for stages in placement.stages
    ]
    ends = [sum(each.kind in ORDERED for each in order) for order in actions]
    places = [dict.fromkeys(stages, end if horizons is None else 0) for stages, end in zip(sums, ends, strict=True)]
    if horizons is not None:
        for order, own in zip(actions, places, strict=True):
            _place_after_gradients(order, own)
        while _postpone(places, placement, horizons):
            pass
    return tuple(map(_with_sums, actions, places))


def _place_after_gradients(actions: Order, places: dict[int, int]) -> None:
    """Place the sums of a device where its own gradients are complete: after how many actions of its order."""
    passed = 0
    for action in actions:
        passed += action.kind in ORDERED
        if action.kind is Kind.REDUCE_GRAD:
            places[action.stage] = passed
    _keep_order(places)


def _keep_order(places: dict[int, int]) -> None:
    """Let no sum stand before one of a deeper stage."""
    places |= zip(places, accumulate(places.values(), max), strict=True)


def _postpone(places: list[dict[int, int]], placement: Placement, horizons: Horizons) -> bool:
    """Move every sum behind the actions of its device that other replicas need before they post theirs, and return whether
    any has moved.
    """
    moved = False
    for device, own in enumerate(places):
        for stage, place in own.items():
            for other in placement.counterparts(stage):
                there = placement.devices[other]
                needed = horizons.place(device, place, there)
                if there != device and places[there][other] < needed:
                    places[there][other] = needed
                    _keep_order(places[there])
                    moved = True
    return moved


def _with_sums(actions: Order, places: dict[int, int]) -> Order:
    waiting = deque(places.items())
    lowered: list[Action] = []
    passed = 0
    for action in actions:
        if action.kind not in SENDS:
            while waiting and waiting[0][1] <= passed:
                lowered.append(Action(Kind.REDUCE_REPLICAS, waiting.popleft()[0]))
        passed += action.kind in ORDERED
        if action.kind is not Kind.REDUCE_GRAD:
            lowered.append(action)
    sums = (Action(Kind.REDUCE_REPLICAS, stage) for stage, _ in waiting)
    return (*lowered, *sums, *(Action(Kind.REDUCE_GRAD, stage) for stage in places))


def add_messages_in_sequence(
    schedule: Schedule, actions: Iterable[tuple[int, Action]] | None = None
) -> tuple[Order, ...]:
    """Insert sends and receives, both ends of each at the same place of one sequence of all actions. Raise a ScheduleError
    if no such sequence exists.
    """
    router = Router(schedule.placement)
    lowered: list[list[Action]] = [[] for _ in schedule.orders]
    for device, action in sequence(schedule) if actions is None else actions:
        lowered[device].append(action)
        if message := router.emitted(action):
            lowered[device].append(message.send)
            lowered[message.edge[1]].append(message.receive)
    return tuple(map(tuple, lowered))


def sequence(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """``(device, action)`` of all actions, none before what it needs, the posts of a collective one after the other, and
    otherwise by when they end with unit costs, so that nothing is received long before it is needed. Raise a ScheduleError
    if there is none: some device would have to post a collective before and after what another one posts after and before
    it.
    """
    found = Dependencies.of_schedule(schedule)
    ends = [(end, device) for device, spans in enumerate(simulate(schedule).spans) for _, end in spans]
    *devices, channel = found.lanes
    waits = list(found.graph.waits)
    firsts = {nodes.start for nodes in devices}
    for collective in channel:
        posts = [post for post, _ in waits[collective]]
        # All posts stand where the last of them can.
        waits[collective] = [
            *((post - 1, 0) for post in posts if post not in firsts),
            *(w for p in posts for w in waits[p]),
        ]
        ends.append(max(ends[post] for post in posts))
        for post in posts:
            waits[post], ends[post] = [(collective, 0)], (-math.inf, 0)
    passed = set()
    for node in Graph(found.graph.lanes, waits).by_urgency(ends.__getitem__):
        passed.add(node)
        kind, stage, microbatch = action = found.actions[node]
        if stage == EVERYWHERE:
            yield from ((device, Action(kind, device, microbatch)) for device in range(len(devices)))
        elif kind not in COLLECTIVES:
            yield found.graph.lane_of[node], action
    for device, nodes in enumerate(devices):
        for position, node in enumerate(nodes):
            if node not in passed:
                raise ScheduleError(
                    "collective-order",
                    "stands in no sequence of all devices' actions: the devices would wait for one another in a circle; take "
                    "the passes and collectives that with_vocabulary() places",
                    at=(device, position, found.actions[node]),
                )


def lower_paired(schedule: Schedule) -> Program:
    """Add messages, both ends of each at the same step of one run of all devices, and gradient reductions.

    Everything thus stands in one global sequence that the lists are cut from, so they cannot wait for one another in a
    circle, even if a send waits for its receive.
    """
    found = Dependencies.of_schedule(schedule)
    if error := found.stuck():
        raise error
    # Devices take turns, the first one first, and who waits for a message lets the others go on.
    waits, device_of = found.graph.waits, found.graph.lane_of
    turns, following = [0] * len(found.actions), [0] * len(schedule.orders)
    for node in found.walk.nodes:
        device = device_of[node]
        turns[node] = max([following[device], *(turns[n] + (device_of[n] > device) for n, _ in waits[node])])
        following[device] = turns[node] + 1
    nodes = sorted(found.walk.nodes, key=lambda node: (turns[node], device_of[node]))
    rows = add_messages_in_sequence(schedule, ((device_of[node], found.actions[node]) for node in nodes))
    return Program(schedule, tuple(map(add_gradient_reductions, rows)))


def add_messages_to_single_queues(
    schedule: Schedule, costs: Costs, orders: tuple[Order, ...] | None = None, arrived: Iterable[Action] = ()
) -> tuple[Order, ...]:
    """Insert sends and receives such that no queue waits for ever. ``costs`` choose the places of the messages; any are
    safe. ``orders`` may be a part of the schedule's own; ``arrived`` are the receives that earlier parts have posted.
    """
    return _Run(schedule, costs, schedule.orders if orders is None else orders, arrived).lists()


class _Run:
    """One run of all devices. A device is busy until a time, or between two actions."""

    def __init__(self, schedule: Schedule, costs: Costs, orders: tuple[Order, ...], arrived: Iterable[Action]) -> None:
        self._orders, self._router = orders, Router(schedule.placement)
        self._prices = ActionPrices(schedule, costs)
        self._lists: list[list[Action]] = [[] for _ in self._orders]
        self._at = [0] * len(self._orders)
        self._busy_until = [0.0] * len(self._orders)
        self._idle: set[int] = set()
        self._outgoing: list[dict[Edge, deque[Message]]] = [{} for _ in self._orders]
        self._arrived: set[Action] = set(arrived)
        self._consumers = {
            receive: position
            for order in self._orders
            for position, action in enumerate(order)
            if (receive := self._router.awaited(action)) is not None
        }
        self._events: list[tuple[float, int]] = [(0.0, device) for device in range(len(self._orders))]

    def lists(self) -> tuple[Order, ...]:
        """Return the orders with their messages."""
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._idle.add(heappop(self._events)[1])
            while self._exchange(now) or self._post_collective(now) or self._compute(now):
                pass
        for device, order in enumerate(self._orders):
            if self._at[device] < len(order):
                raise ScheduleError(
                    "unmet-need",
                    "waits for ever for its message, or for a collective; validate() says why",
                    at=(device, self._at[device], order[self._at[device]]),
                )
        return tuple(map(tuple, self._lists))

    def _occupy(self, device: int, until: float) -> None:
        self._idle.discard(device)
        self._busy_until[device] = until
        heappush(self._events, (until, device))

    def _exchange(self, now: float) -> bool:
        """Move messages between devices that are both between two actions, and return whether there were any."""
        for device in sorted(self._idle):
            for message in self._heads(device):
                other = message.edge[1]
                if other in self._idle:
                    self._outgoing[device][message.edge].popleft()
                    self._lists[device].append(message.send)
                    self._lists[other].append(message.receive)
                    self._arrived.add(message.receive)
                    for end in message.edge:
                        self._occupy(end, now + self._prices.of_message(message.edge, message.send.microbatch))
                    return True
        return False

    def _heads(self, device: int) -> Iterator[Message]:
        """Return what can be sent next over every edge."""
        return (messages[0] for messages in self._outgoing[device].values() if messages)

    def _post_collective(self, now: float) -> bool:
        """Post a collective that all devices have come to, and return whether there was one."""
        if len(self._idle) < len(self._orders):
            return False
        following = [order[at] for order, at in zip(self._orders, self._at, strict=True) if at < len(order)]
        posts = {action._replace(stage=0) for action in following if action.kind in COLLECTIVES}
        if len(following) < len(self._orders) or len(posts) != 1 or any(a.kind not in COLLECTIVES for a in following):
            return False
        for device, action in enumerate(following):
            self._lists[device].append(action)
            self._at[device] += 1
            self._occupy(device, now + self._prices.of(*action))
        return True

    def _compute(self, now: float) -> bool:
        """Return what devices run on their own, if that is better than to wait; whether any did."""
        ran = False
        for device in sorted(self._idle):
            order = self._orders[device]
            if self._at[device] == len(order):
                continue
            action = order[self._at[device]]
            receive = self._router.awaited(action)
            if action.kind in COLLECTIVES or (receive is not None and receive not in self._arrived):
                continue
            end = now + self._prices.of(*action)
            if action.kind not in MEMORY and self._should_wait(device, now, end):
                continue
            self._lists[device].append(action)
            self._at[device] += 1
            if message := self._router.emitted(action):
                self._outgoing[device].setdefault(message.edge, deque()).append(message)
            self._occupy(device, end)
            ran = True
        return ran

    def _should_wait(self, device: int, now: float, end: float) -> bool:
        """Return whether another end would be held up for longer if it got its message after ``end`` only."""
        for message in self._heads(device):
            other = message.edge[1]
            wait = self._busy_until[other] - now
            if wait < end - self._needed_at(other, message.receive, end):
                return True
        return False

    def _needed_at(self, device: int, receive: Action, latest: float) -> float:
        """Return when a busy device can come to what consumes a message; no more is said of what is after ``latest``."""
        time, order = self._busy_until[device], self._orders[device]
        # What a later part consumes is not in the orders.
        for position in range(self._at[device], self._consumers.get(receive, len(order))):
            if time >= latest:
                break
            time += self._prices.of(*order[position])
        return time


__all__ = ["lower"]


@explained_by_validation
def lower(schedule: Schedule, *, single_queue: bool = False, costs: Costs | None = None) -> Program:
    """Add messages, sums over copies and gradient reductions to a valid schedule. ``validate_program`` proves the result.
    ``single_queue``: for devices that serve all of their streams in one queue; ``costs`` then choose the places of
    messages.
    """
    horizons = None
    if single_queue:
        with_messages = add_messages_to_single_queues(schedule, costs or Costs())
    elif schedule.vocabulary_barriers:
        with_messages = add_messages_in_sequence(schedule)
    else:
        horizons = Horizons(schedule)
        with_messages = add_messages(schedule, horizons)
    reducing = tuple(map(add_gradient_reductions, with_messages))
    return Program(schedule, add_replica_reductions(reducing, schedule.placement, horizons))
