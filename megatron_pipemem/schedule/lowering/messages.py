"""Add messages between devices: what is sent where, and when each end posts it.

NCCL has no tags, so a directed edge (source device -> destination device) is one channel: both ends must post its
messages in the same order. Ours is the order in which the source produces them. Sends are posted as soon as the
producer has run. Receives follow the same order, each as late as it allows, one compute action ahead of the consumer
so that the transfer can hide behind that action, and behind the waits for activations that stand between the two.

This adds no deadlock. Posts never block, a send is posted before its source waits for anything else, and a receive is
posted before its destination waits for it or for any later message of the edge. So a message that a device waits for
is held up by nothing but its producer, and that wait is already in the schedule.

A host may also wait for its whole device at any place (``core.host_waits``). So a receive is never posted before an action
of its own device on which the message depends, which hides nothing anyway. Nor is it posted after an action that depends on
what the source launches after the send. The first place after the former comes before the latter, or the schedule would
wait in a circle.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COMPLETING, MEMORY, ORDERED, SENDS, Action, Kind
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.host_waits import last_needed
from megatron_pipemem.schedule.messages import Edge, Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Schedule


class Horizons:
    """Count the actions of other devices that must run before a device gets to a place in its order.

    Raises:
        ScheduleError: the schedule deadlocks; ``validate`` says where.
    """

    def __init__(self, schedule: Schedule) -> None:
        found = Dependencies.of_schedule(schedule)
        if error := found.stuck():
            raise error
        self._lanes, self._needed = found.lanes, last_needed(found)

    def place(self, device: int, position: int, other: int) -> int:
        """Return how many actions of another device must have run before a device gets to a position of its order.

        Args:
            device: the device that runs the actions before the position.
            position: in the device's order.
            other: the device whose actions are counted.
        """
        if position == 0:
            return 0
        return max(0, self._needed[self._lanes[device][position - 1]][other] - self._lanes[other].start + 1)


def add_messages(schedule: Schedule, horizons: Horizons) -> tuple[Order, ...]:
    """Insert the sends and receives of every device.

    Between two compute actions stand first the send of the one before, then the receives, ordered by source device and,
    from one source, as it sends.

    Raises:
        ScheduleError: no action consumes a message, so the schedule is incomplete.
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
    """Return before which action of its order each receive of an edge is posted, one compute action ahead.

    Args:
        consumers: positions of the consumers of the edge's messages, in sending order.
        order: of the device that consumes them.
    """
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

    Args:
        edge: of the message.
        sent: the position in its source's order of the action that produces it.
        position: where its receive would stand otherwise.
        horizons: of the schedule.
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
    their backwards earlier, and one order for all devices needs no more than one channel between two of them. A device whose
    later actions another replica needs to complete its gradients posts its sum after these actions.
    ``REDUCE_GRAD`` waits for the sum and thus for other devices; it stands behind all else, where nothing is held up by
    that.

    Args:
        actions: orders of all devices.
        placement: of the stages.
        horizons: of the schedule. Without them the sums stand behind all else, too, where nothing is held up if they wait for
            other devices.
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
