"""Gradient synchronisation: when a stage's gradients are complete."""

from __future__ import annotations

from megatron_pipemem.schedule.action import SENDS, Action, Kind
from megatron_pipemem.schedule.schedule import Order

COMPLETING = frozenset((Kind.W, Kind.B, Kind.T, Kind.IB))
"""What adds to the gradients of parameters."""


def add_gradient_reductions(actions: Order) -> Order:
    """Insert ``REDUCE_GRAD`` after the last weight gradient (W or B) of every stage of a device.

    The device's shards of embedding and head belong to its first stage, whose number is theirs: T and IB count as well.

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
