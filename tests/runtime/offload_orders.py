"""Orders with offload and recomputation put in by the simplest rule, so that the runtime is tested without any planner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.schedule import Order, Schedule

BACKWARDS = (Kind.I, Kind.B)


def with_offload(schedule: Schedule, stages: Collection[int], every: int = 1) -> Schedule:
    """Every ``every``-th microbatch of ``stages`` leaves after its forward and is back before its backward.

    A copy out is waited for after one more compute action, a copy back begins one compute action early, where there is one
    between.
    """
    return replace(schedule, orders=tuple(_offload(order, stages, every) for order in schedule.orders))


def with_recompute(schedule: Schedule, stages: Collection[int], kind: Kind = Kind.R) -> Schedule:
    """The forwards of ``stages`` run again, by R or RS, right before their backwards."""
    return replace(schedule, orders=tuple(_recompute(order, stages, kind) for order in schedule.orders))


def _offload(order: Order, stages: Collection[int], every: int) -> Order:
    end = {(a.stage, a.microbatch): i for i, a in reversed([*enumerate(order)]) if a.kind in (Kind.RS, *BACKWARDS)}
    before: list[list[Action]] = [[] for _ in order]
    for position, (kind, stage, microbatch) in enumerate(order):
        if kind is not Kind.F or stage not in stages or microbatch % every:
            continue
        back = end[stage, microbatch]
        if back - position < 3:
            out, home = back, back
        else:
            out, home = position + 2, back - 1
        before[position + 1].append(Action(Kind.OFFLOAD, stage, microbatch))
        before[out].append(Action(Kind.WAIT_OFFLOAD, stage, microbatch))
        before[home].append(Action(Kind.RELOAD, stage, microbatch))
        before[back].append(Action(Kind.WAIT_RELOAD, stage, microbatch))
    return tuple(a for position, action in enumerate(order) for a in (*before[position], action))


def _recompute(order: Order, stages: Collection[int], kind: Kind) -> Order:
    result: list[Action] = []
    for action in order:
        if action.kind in BACKWARDS and action.stage in stages:
            result.append(action._replace(kind=kind))
        result.append(action)
    return tuple(result)
