"""From the order of compute actions to the full program that the executor interprets."""

from __future__ import annotations

from megatron_pipemem.schedule.lowering.collectives import add_messages_in_sequence
from megatron_pipemem.schedule.lowering.gradients import add_copy_sums, add_gradient_reductions
from megatron_pipemem.schedule.lowering.messages import add_messages
from megatron_pipemem.schedule.schedule import Program, Schedule

__all__ = ["lower"]


def lower(schedule: Schedule) -> Program:
    """Add messages, sums over copies and gradient reductions to a valid schedule. ``validate_program`` proves the result.

    Raises:
        ScheduleError: the schedule is incomplete; ``validate`` says what is missing.
    """
    if schedule.vocabulary:
        with_messages = add_messages_in_sequence(schedule)
    else:
        with_messages = add_messages(schedule.orders, schedule.placement)
    reducing = tuple(map(add_gradient_reductions, with_messages))
    return Program(schedule, add_copy_sums(reducing, schedule.placement))
