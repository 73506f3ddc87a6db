"""Prove that the passes and collectives of a schedule are complete, in order, and the same sequence on all devices."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import COLLECTIVES, VOCABULARY, VOCABULARY_COMPUTE, Action, Kind
from megatron_pipemem.schedule.core.vocabulary import BARRIERS, check_placement, vocabulary_actions

if TYPE_CHECKING:
    from megatron_pipemem.schedule.core.schedule import Schedule


def check_switch(schedule: Schedule) -> None:
    """Check that the schedule says that it has passes if it has, and is one that can have them.

    Raises:
        ScheduleError: it does not.
        UnsupportedError: its placement has no room for the shards.
    """
    if schedule.vocabulary_barriers:
        if schedule.vocabulary_barriers not in BARRIERS:
            raise ScheduleError(
                f"vocabulary parallelism has 1 or 2 barriers, not {schedule.vocabulary_barriers}; give either"
            )
        if schedule.pieces > 1 or schedule.updates is not None or schedule.offloads or schedule.recomputed:
            raise ScheduleError(
                "vocabulary parallelism goes with whole microbatches, one version of the weights, and activations that are "
                "neither moved nor recomputed; leave the passes out"
            )
        check_placement(schedule.placement)
        return
    for device, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            if action.kind in VOCABULARY:
                raise ScheduleError(
                    "is not a compute action of this schedule: it is of vocabulary parallelism, and the schedule does not "
                    "say how many barriers it has; set vocabulary to 1 or 2, or remove it",
                    device=device,
                    position=position,
                    action=action,
                )


def check_passes(schedule: Schedule, places: dict[Action, tuple[int, int]]) -> None:
    """Check that every device has every pass and post once, passes in microbatch order and posts in one order of all
    devices.

    Raises:
        ScheduleError: the first violation.
    """
    backwards = any(action.kind in (Kind.I, Kind.W, Kind.B) for action in places)
    wanted = dict(
        (action, device)
        for device, action in vocabulary_actions(schedule.placement, schedule.num_microbatches, backwards)
    )
    for action, device in wanted.items():
        if action not in places:
            raise ScheduleError(
                "is missing; with_vocabulary() derives all passes and collectives from a schedule without",
                device=device,
                position=len(schedule.orders[device]),
                action=action,
            )
    for action, (device, position) in places.items():
        if action.kind in VOCABULARY and action not in wanted:
            where = "forwards alone have none" if not backwards else "only the last stage's device has one"
            raise ScheduleError(f"has no use: {where}; remove it", device=device, position=position, action=action)
    for device, order in enumerate(schedule.orders):
        last: dict[Kind, Action] = {}
        for position, action in enumerate(order):
            if action.kind not in VOCABULARY_COMPUTE:
                continue
            before = last.get(action.kind, action)
            if before.microbatch > action.microbatch:
                raise ScheduleError(
                    f"comes after {before}, but passes of a kind run in microbatch order; move it before {before}",
                    device=device,
                    position=position,
                    action=action,
                )
            last[action.kind] = action
    _check_one_sequence(schedule)


def _check_one_sequence(schedule: Schedule) -> None:
    """Check that all devices post the collectives in one order: they share a channel that serves them as they come."""
    posted = [
        [(position, action) for position, action in enumerate(order) if action.kind in COLLECTIVES]
        for order in schedule.orders
    ]
    for device, posts in enumerate(posted[1:], start=1):
        for (_, first), (position, action) in zip_longest(posted[0], posts):
            if first._replace(stage=device) != action:
                raise ScheduleError(
                    f"is posted where device 0 posts {first}; collectives run in the order in which they are posted, so "
                    "all devices post them in one order",
                    device=device,
                    position=position,
                    action=action,
                )
