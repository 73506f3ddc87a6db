"""Schedules with one mistake, to see that the validator finds it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.validator import validate, validate_program


def mutant_of(schedule: Schedule, data: st.DataObject) -> Schedule:
    """The schedule with one action of one device dropped, moved, on another microbatch, or there twice."""
    orders = [list(order) for order in schedule.orders]
    order = orders[data.draw(st.integers(0, len(orders) - 1))]
    position = data.draw(st.integers(0, len(order) - 1))
    action = order.pop(position)
    match data.draw(st.sampled_from(["drop", "move", "renumber", "twice"])):
        case "move":
            order.insert(data.draw(st.integers(0, len(order))), action)
        case "renumber":
            order.insert(position, action._replace(microbatch=data.draw(st.integers(0, schedule.num_units))))
        case "twice":
            order[position:position] = [action, action]
    return replace(schedule, orders=tuple(map(tuple, orders)))


def is_accepted(schedule: Schedule) -> bool:
    """Whether schedule and program pass all proofs."""
    try:
        validate(schedule)
        validate_program(lower(schedule))
    except ScheduleError:
        return False
    return True
