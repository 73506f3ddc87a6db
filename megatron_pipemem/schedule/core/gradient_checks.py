"""Prove that a program reduces every gradient once and when it is complete, and adds up those of replicas before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import COMPLETING, WHOLE_STAGE, Action, Kind
from megatron_pipemem.schedule.core.schedule import Program

_LAST_GRADIENT = "the last weight gradient of the stage"


def check_reductions(program: Program, places: Mapping[Action, tuple[int, int]]) -> None:
    """Check that every stage that has gradients reduces them once, after the last of them; if it has replicas, in all
    of them, and after a sum that comes after the last of all.
    """
    placement = program.placement
    last = {
        action.stage: (device, position, action)
        for device, actions in enumerate(program.actions)
        for position, action in enumerate(actions)
        if action.kind in COMPLETING
    }
    trained = {replica for stage in last for replica in placement.counterparts(stage)}
    for stage in sorted(trained):
        reduction, total = Action(Kind.REDUCE_GRAD, stage), Action(Kind.REDUCE_REPLICAS, stage)
        if placement.replicas == 1:
            _check_after(reduction, *last[stage], _LAST_GRADIENT, places)
            continue
        if stage in last:
            _check_after(total, *last[stage], _LAST_GRADIENT, places)
        else:
            _check_there(total, program, places)
        _check_there(reduction, program, places)
        _check_after(reduction, *places[total], total, "the sum over its copies", places)
    for action, (device, position) in places.items():
        if action.kind in WHOLE_STAGE and (
            action.stage not in trained or action.kind is Kind.REDUCE_REPLICAS and placement.replicas == 1
        ):
            what = "copies to sum" if action.stage in trained else "weight gradients to reduce"
            raise ScheduleError(
                f"stage {action.stage} has no {what}; remove it", device=device, position=position, action=action
            )


def _check_there(action: Action, program: Program, places: Mapping[Action, tuple[int, int]]) -> None:
    """Check that it exists, on its stage's device, whether or not that has gradients of its own for the stage."""
    home = program.placement.device_of(action.stage)
    if action not in places:
        raise ScheduleError(
            f"is missing, and {_others(action, program)} of its copies waits for it; add it",
            device=home,
            position=len(program.actions[home]),
            action=action,
        )
    device, position = places[action]
    if device != home:
        raise ScheduleError(
            f"has no stage {action.stage} to add to {_others(action, program)}, device {home} has; move it there",
            device=device,
            position=position,
            action=action,
        )


def _others(action: Action, program: Program) -> str:
    replicas = program.placement.counterparts(action.stage)
    return ", ".join(str(action._replace(stage=stage)) for stage in replicas if stage != action.stage)


def _check_after(
    action: Action, device: int, position: int, before: Action, what: str, places: Mapping[Action, tuple[int, int]]
) -> None:
    """Check that it exists, on that device, behind that position."""
    if action not in places:
        raise ScheduleError(
            f"completes the gradients of its stage, but {action} is missing; add it after {before}",
            device=device,
            position=position,
            action=before,
        )
    found, at = places[action]
    if found != device or at < position:
        raise ScheduleError(
            f"must come after {before} at position {position} of device {device}, {what}; move it there",
            device=found,
            position=at,
            action=action,
        )


def check_sums(program: Program, places: Mapping[Action, tuple[int, int]]) -> Mapping[Action, Sequence[Action]]:
    """Check that devices that hold replicas of the same stages post their sums in the same order: they share one
    channel.

    Returns:
        For every reduction, the sums that must have been posted before it can go on.
    """
    placement = program.placement
    posted: dict[tuple[int, ...], dict[int, dict[int, tuple[int, Action]]]] = {}
    needs = {}
    # A device that holds several replicas of a stage sums when it has posted the last of them.
    sums = ((*place, action) for action, place in places.items() if action.kind is Kind.REDUCE_REPLICAS)
    for device, position, action in sorted(sums):
        replicas = placement.counterparts(action.stage)
        needs[Action(Kind.REDUCE_GRAD, action.stage)] = [Action(Kind.REDUCE_REPLICAS, replica) for replica in replicas]
        channel = placement.holders(action.stage)
        posted.setdefault(channel, {}).setdefault(device, {})[replicas[0]] = (position, action)
    for queues in posted.values():
        (first, own), *others = ((device, sorted(queue.values())) for device, queue in sorted(queues.items()))
        for device, theirs in others:
            for (position, action), (other_position, other) in zip(own, theirs, strict=True):
                if other.stage not in placement.counterparts(action.stage):
                    raise ScheduleError(
                        f"meets {action}, which device {first} posts at position {position}; sums over the same devices "
                        "are posted in one order everywhere, so move it",
                        device=device,
                        position=other_position,
                        action=other,
                    )
    return needs
