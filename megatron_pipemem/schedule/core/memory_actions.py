"""Prove the rules of recomputation and of activations that are away."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import RECOMPUTE, ROUND_TRIP, Action, Kind
from megatron_pipemem.schedule.core.schedule import Schedule


def backward_needs(schedule: Schedule, action: Action, actions: Container[Action]) -> Iterator[Action]:
    """Return what a backward needs besides the results of other stages: that its activations are there, run again or
    back on the device. What is run again in part needs the rest of them there too.

    Args:
        schedule: supplies the stages that are recomputed.
        action: any; only I, B and RS need something.
        actions: all that the schedule runs.
    """
    if action.kind not in (Kind.I, Kind.B, Kind.RS):
        return
    if action.kind is not Kind.RS and action.stage in schedule.recomputed:
        yield action._replace(kind=schedule.recomputed[action.stage])
    if any(action._replace(kind=kind) in actions for kind in ROUND_TRIP):
        yield action._replace(kind=Kind.WAIT_RELOAD)


def check_memory_actions(schedule: Schedule, places: Mapping[Action, tuple[int, int]]) -> None:
    """Check that every action on memory is part of a whole round trip, of a microbatch that has a backward and is not
    recomputed as a whole.

    Args:
        schedule: its local order and the needs of its backwards have been checked.
        places: device and position of every action.

    Raises:
        ScheduleError: a round trip is cut short, nobody uses what it brings, or it moves what is not kept.
    """
    for action, (device, position) in places.items():
        again = schedule.recomputed.get(action.stage)
        if action.kind in RECOMPUTE and action.kind is not again:
            problem = f"stage {action.stage} has {again} as well; remove one or the other"
        elif action.kind is Kind.OFFLOAD and again is Kind.R:
            problem = f"stage {action.stage} is recomputed and keeps nothing to move; remove this round trip, or its R"
        elif action.kind in (Kind.OFFLOAD, *RECOMPUTE) and not any(
            action._replace(kind=backward) in places for backward in (Kind.I, Kind.B)
        ):
            problem = "no backward uses what it prepares; remove it, or add the backward"
        elif (
            action.kind in ROUND_TRIP[:-1]
            and (following := action._replace(kind=ROUND_TRIP[ROUND_TRIP.index(action.kind) + 1])) not in places
        ):
            problem = f"has no {following} after it, so its activations do not come back; add it"
        else:
            continue
        raise ScheduleError(problem, device=device, position=position, action=action)
