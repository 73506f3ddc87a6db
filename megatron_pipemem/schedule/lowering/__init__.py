"""Lower the order of compute actions to the full program that the executor interprets."""

from __future__ import annotations

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.explained import explained_by_validation
from megatron_pipemem.schedule.lowering.collectives import add_messages_in_sequence
from megatron_pipemem.schedule.lowering.messages import (
    Horizons,
    add_gradient_reductions,
    add_messages,
    add_replica_reductions,
)
from megatron_pipemem.schedule.lowering.single_queue import add_messages_to_single_queues
from megatron_pipemem.schedule.schedule import Program, Schedule

__all__ = ["lower"]


@explained_by_validation
def lower(schedule: Schedule, *, single_queue: bool = False, costs: Costs | None = None) -> Program:
    """Add messages, sums over copies and gradient reductions to a valid schedule. ``validate_program`` proves the result.

    Args:
        schedule: what to lower.
        single_queue: for devices that serve all of their streams in one queue, see ``lowering.single_queue``.
        costs: what the places of messages in single queues are chosen for; unit costs by default.

    Raises:
        ScheduleError: the schedule is incomplete or deadlocks; ``validate`` says where.
        CostsError: the costs do not fit the placement.
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
