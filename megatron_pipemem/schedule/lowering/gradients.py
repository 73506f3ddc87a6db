"""Synchronise gradients: find when a stage's gradients are complete, and when they are added up."""

from __future__ import annotations

from collections import deque

from megatron_pipemem.schedule.core.action import COMPLETING, SENDS, Action, Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Order


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
