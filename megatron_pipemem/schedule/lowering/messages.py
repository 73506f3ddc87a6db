"""Add messages between devices: what is sent where, and when each end posts it.

NCCL has no tags, so a directed edge (source device -> destination device) is one channel: both ends must post its
messages in the same order. Ours is the order in which the source produces them. Sends are posted as soon as the
producer has run. Receives follow the same order, each as late as it allows, one compute action ahead of the consumer
so that the transfer can hide behind that action, and behind the waits for activations that stand between the two.

This adds no deadlock. Posts never block, a send is posted before its source waits for anything else, and a receive is
posted before its destination waits for it or for any later message of the edge. So a message that a device waits for
is held up by nothing but its producer, and that wait is already in the schedule.
"""

from __future__ import annotations

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import MEMORY, Action
from megatron_pipemem.schedule.core.messages import Edge, Router
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Order


def add_messages(orders: tuple[Order, ...], placement: Placement) -> tuple[Order, ...]:
    """Insert the sends and receives of every device.

    Between two compute actions stand first the send of the one before, then the receives, ordered by source device and,
    from one source, as it sends.

    Raises:
        ScheduleError: nobody consumes a message, so the schedule is incomplete.
    """
    router = Router(placement)
    consumers = {
        receive: position
        for order in orders
        for position, action in enumerate(order)
        if (receive := router.awaited(action)) is not None
    }
    sends: list[list[Action | None]] = []
    edges: dict[Edge, list[Action]] = {}
    for device, order in enumerate(orders):
        emitted = [router.emitted(action) for action in order]
        sends.append([message and message.send for message in emitted])
        for position, message in enumerate(emitted):
            if message is None:
                continue
            if message.receive not in consumers:
                raise ScheduleError(
                    "no device runs the action that needs its result; validate() says what to add",
                    at=(device, position, order[position]),
                )
            edges.setdefault(message.edge, []).append(message.receive)
    posted: list[list[list[Action]]] = [[[] for _ in order] for order in orders]
    for (_, destination), receives in sorted(edges.items()):
        consumed = [consumers[receive] for receive in receives]
        for receive, position in zip(receives, _post_positions(consumed, orders[destination]), strict=True):
            posted[destination][position].append(receive)
    return tuple(map(_interleave, orders, posted, sends))


def _post_positions(consumers: list[int], order: Order) -> list[int]:
    """Return before which action of its order each receive of an edge is posted.

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


def _interleave(order: Order, receives: list[list[Action]], sends: list[Action | None]) -> Order:
    lowered: list[Action] = []
    for action, posted, send in zip(order, receives, sends, strict=True):
        lowered += posted
        lowered.append(action)
        if send is not None:
            lowered.append(send)
    return tuple(lowered)
