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

from collections import deque

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import COMPLETING, MEMORY, SENDS, Action, Kind
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
    actions: tuple[Order, ...], placement: Placement, *, at_the_end: bool = False
) -> tuple[Order, ...]:
    """Return where the model stands on the devices more than once, add up the gradients of a stage's replicas.

    Every replica of a stage that trains gets a ``REDUCE_REPLICAS``, also one that runs no microbatch of this step: as soon
    as its own gradients are complete and the sums of all deeper stages on its device have been posted. Deeper stages end
    their backwards earlier, and one order for all devices needs no more than one channel between two of them.
    ``REDUCE_GRAD`` waits for the sum and thus for other devices; it stands behind all else, where nothing is held up by
    that. ``at_the_end`` has the sums stand there too, the deepest stages first, where nothing is held up if they wait for
    other devices.

    Args:
        actions: orders of all devices.
        placement: of the stages.
        at_the_end: whether the sums stand behind all else, too.
    """
    if placement.replicas == 1:
        return actions
    size = placement.model_stages
    trained = {each.stage % size for order in actions for each in order if each.kind is Kind.REDUCE_GRAD}
    return tuple(
        _with_sums(
            order, sorted((s for s in stages if s % size in trained), key=lambda s: (-(s % size), s)), at_the_end
        )
        for order, stages in zip(actions, placement.stages, strict=True)
    )


def _with_sums(actions: Order, stages: list[int], at_the_end: bool) -> Order:
    ends = {action.stage for action in actions if action.kind is Kind.REDUCE_GRAD}
    complete = set(stages) - ends
    waiting = deque(stages)
    lowered: list[Action] = []

    def post() -> None:
        while not at_the_end and waiting and waiting[0] in complete:
            lowered.append(Action(Kind.REDUCE_REPLICAS, waiting.popleft()))

    post()
    for action in actions:
        if action.kind is Kind.REDUCE_GRAD:
            complete.add(action.stage)
            post()
        else:
            lowered.append(action)
    sums = (Action(Kind.REDUCE_REPLICAS, stage) for stage in waiting)
    return (*lowered, *sums, *(Action(Kind.REDUCE_GRAD, stage) for stage in stages))
