"""Write orders that every placement has: forwards alone, and one microbatch after another."""

from __future__ import annotations

from collections.abc import Collection

from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule


def forward_schedule(placement: Placement, num_microbatches: int, name: str = "forward only") -> Schedule:
    """Run nothing but forwards, for evaluation: with equal passes, a device runs the deepest stage whose input has
    come.

    Replicas of the model take the microbatches in turn.

    Args:
        placement: which device holds which stage.
        num_microbatches: microbatches of the step.
        name: name of the schedule.
    """
    replicas, shares = placement.replicas, [0] * placement.replicas
    for microbatch in range(num_microbatches):
        shares[microbatch % replicas] += 1
    done = [0] * placement.num_stages
    orders: list[list[Action]] = [[] for _ in placement.stages]
    while sum(done) < num_microbatches * placement.model_stages:
        before = tuple(done)
        for device, stages in enumerate(placement.stages):
            for stage in sorted(stages, key=lambda stage: -(stage % placement.model_stages)):
                replica, previous = placement.replica_of(stage), placement.previous_stage(stage)
                arrived = shares[replica] if previous is None else before[previous]
                if before[stage] < arrived:
                    orders[device].append(Action(Kind.F, stage, before[stage] * replicas + replica))
                    done[stage] += 1
                    break
    return Schedule(name, placement, num_microbatches, tuple(map(tuple, orders)))


def serial_schedule(
    placement: Placement, num_microbatches: int, name: str = "serial", full: Collection[int] = ()
) -> Schedule:
    """Run one microbatch after another through all stages and back: the slowest order, and none holds less, if the
    stages whose I takes memory run full backwards.

    Replicas of the model take the microbatches in turn.

    Args:
        placement: which device holds which stage.
        num_microbatches: microbatches of the step.
        name: name of the schedule.
        full: the stages whose backwards are full ones.
    """
    orders = []
    for stages in placement.stages:
        order: list[Action] = []
        for microbatch in range(num_microbatches):
            turn = [stage for stage in stages if placement.replica_of(stage) == microbatch % placement.replicas]
            order += [Action(Kind.F, stage, microbatch) for stage in turn]
            for stage in reversed(turn):
                kinds = (Kind.B,) if stage in full else (Kind.I, Kind.W)
                order += [Action(kind, stage, microbatch) for kind in kinds]
        orders.append(tuple(order))
    return Schedule(name, placement, num_microbatches, tuple(orders))
