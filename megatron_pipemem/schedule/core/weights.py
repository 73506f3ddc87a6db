"""Say which version of the weights every action uses when weights change in the middle of a schedule.

A stage starts with version 0 and makes the next version right after the last weight gradient (W or B) of a group of
microbatches. Forward and backward of a microbatch on a stage use the same version, so a stage keeps old versions for as
long as some microbatch still needs them. Synchronous schedules use version 0 throughout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.schedule import Schedule


class Use(NamedTuple):
    """One action of a schedule and the weights it meets."""

    action: Action
    device: int
    position: int
    version: int
    """the version that the action uses"""
    newest: int
    """the newest version of its stage when the action starts"""
    updates: bool
    """whether its stage makes the next version right after it"""


def weight_uses(schedule: Schedule) -> Iterator[Use]:
    """Yield every action with its weights, device by device, for a schedule that has ``updates``.

    A backward whose forward does not come before it is taken to use the version that a forward would take now.
    """
    every, _, delay = schedule.updates
    for device, order in enumerate(schedule.orders):
        groups = [action.microbatch // schedule.pieces // every for action in order]
        last = {
            (action.stage, group): position
            for position, (action, group) in enumerate(zip(order, groups, strict=True))
            if action.kind is Kind.W or action.kind is Kind.B
        }
        newest: Counter[int] = Counter()
        used: dict[tuple[int, int], int] = {}
        for position, (action, group) in enumerate(zip(order, groups, strict=True)):
            _, stage, microbatch = action
            version = used.get((stage, microbatch))
            if version is None:
                version = newest[stage] if delay is None else max(0, group - delay)
                used[stage, microbatch] = version
            updates = last.get((stage, group)) == position
            yield Use(action, device, position, version, newest[stage], updates)
            newest[stage] += updates


def versions_held(schedule: Schedule) -> tuple[int, ...]:
    """Return per device, the most versions that it holds of any of its stages: the newest, and all that are still to be
    used.

    The old version is gone by the time the new one is counted, unless some action still needs it.
    """
    most = [1] * len(schedule.orders)
    if schedule.updates is None:
        return tuple(most)
    uses = list(weight_uses(schedule))
    coming = Counter((use.action.stage, use.version) for use in uses)
    held: dict[int, set[int]] = {}
    for use in uses:
        stage = use.action.stage
        versions = held.setdefault(stage, {0})
        coming[stage, use.version] -= 1
        newest = use.newest + use.updates
        if use.updates:
            versions.add(newest)
        versions -= {version for version in versions if version != newest and not coming[stage, version]}
        most[use.device] = max(most[use.device], len(versions))
    return tuple(most)
