"""Orders with one mistake, to see that the validator finds it."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.validator import validate, validate_program


def edited(orders: tuple[Order, ...], device: int, order: list[Action]) -> tuple[Order, ...]:
    """The orders with another one of this device."""
    return tuple(tuple(order) if d == device else old for d, old in enumerate(orders))


@st.composite
def mutants(draw: st.DrawFn, orders: tuple[Order, ...]) -> tuple[Order, ...]:
    """``orders`` with one action dropped, doubled, swapped with another, re-routed, renumbered, or of another kind."""
    device = draw(st.sampled_from([d for d, order in enumerate(orders) if order]))
    order = list(orders[device])
    position = draw(st.integers(0, len(order) - 1))
    other = draw(st.integers(0, len(order) - 1))
    action = order[position]
    operation = draw(
        st.sampled_from(["drop", "double", "swap", "neighbours", "move", "reroute", "renumber", "stage", "kind"])
    )
    if operation == "swap":
        order[position], order[other] = order[other], order[position]
    elif operation == "neighbours":
        order[position : position + 2] = reversed(order[position : position + 2])
    elif operation == "renumber":
        order[position] = action._replace(microbatch=draw(st.integers(-1, 6)))
    elif operation == "stage":
        order[position] = action._replace(stage=draw(st.integers(-1, 8)))
    elif operation == "kind":
        order[position] = action._replace(kind=draw(st.sampled_from(list(Kind))))
    elif operation == "double":
        order.insert(other, action)
    else:
        del order[position]
        if operation == "move":
            order.insert(other, action)
    result = edited(orders, device, order)
    if operation == "reroute":
        target = draw(st.integers(0, len(orders) - 1))
        moved = list(result[target])
        moved.insert(draw(st.integers(0, len(moved))), action)
        result = edited(result, target, moved)
    return result


def is_accepted(schedule: Schedule) -> bool:
    """Whether schedule and program pass all proofs."""
    try:
        validate(schedule)
        validate_program(lower(schedule))
    except ScheduleError:
        return False
    return True
