"""Orders that every placement has: forwards alone, and one microbatch after another."""

from __future__ import annotations

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule


def forward_schedule(placement: Placement, num_microbatches: int, name: str = "forward only") -> Schedule:
    """Nothing but forwards, for evaluation: with equal passes, a device runs the deepest stage whose input has come.

    Args:
        placement: which device holds which stage.
        num_microbatches: microbatches of the step.
        name: name of the schedule.
    """
    done = [0] * placement.num_stages
    orders: list[list[Action]] = [[] for _ in placement.stages]
    while done[-1] < num_microbatches:
        before = tuple(done)
        for device, stages in enumerate(placement.stages):
            for stage in reversed(stages):
                arrived = before[stage - 1] if stage > 0 else num_microbatches
                if before[stage] < arrived:
                    orders[device].append(Action(Kind.F, stage, before[stage]))
                    done[stage] += 1
                    break
    return Schedule(name, placement, num_microbatches, tuple(map(tuple, orders)))


def serial_schedule(placement: Placement, num_microbatches: int, name: str = "serial") -> Schedule:
    """One microbatch after another through all stages and back: the slowest order, and none holds less.

    Args:
        placement: which device holds which stage.
        num_microbatches: microbatches of the step.
        name: name of the schedule.
    """
    orders = []
    for stages in placement.stages:
        order: list[Action] = []
        for microbatch in range(num_microbatches):
            order += [Action(Kind.F, stage, microbatch) for stage in stages]
            for stage in reversed(stages):
                order += [Action(Kind.I, stage, microbatch), Action(Kind.W, stage, microbatch)]
        orders.append(tuple(order))
    return Schedule(name, placement, num_microbatches, tuple(orders))
