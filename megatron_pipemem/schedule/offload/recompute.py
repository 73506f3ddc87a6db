"""Stages whose forwards run again before their backwards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_pipemem.schedule.action import MEMORY, Action, Kind
from megatron_pipemem.schedule.schedule import Schedule


def with_recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Run the forwards of ``stages`` again, each right before its I or B, and of no other stage.

    Actions on memory are dropped: they were planned for other activations.
    """

    def orders(order: tuple[Action, ...]) -> tuple[Action, ...]:
        found: list[Action] = []
        for action in order:
            if action.kind in MEMORY or action.kind is Kind.R:
                continue
            if action.stage in stages and action.kind in (Kind.I, Kind.B):
                found.append(action._replace(kind=Kind.R))
            found.append(action)
        return tuple(found)

    return replace(schedule, orders=tuple(map(orders, schedule.orders)))
