"""Build steps of one microbatch after another: for counting bytes, and as the last resort for a memory cap."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from megatron_pipemem.choose.knowledge import Knowledge
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_barriers
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.search.problem import better_full


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


ONE_BY_ONE = "one microbatch at a time, because nothing else was found to keep the cap"
COUNTING = "one microbatch at a time, to count bytes"


def counting(request: Request, num_microbatches: int, knowledge: Knowledge) -> Schedule:
    """Return the schedule of a step that shows the bytes of every action: one microbatch after another holds least.

    Args:
        request: with what may leave the device, or be recomputed.
        num_microbatches: of the step.
        knowledge: of a run that has built its model. Where it has counted bytes already, every stage is recomputed
            selectively.
    """
    placement, name = knowledge.placement, f"{request.schedule} (counting bytes)"
    assert placement is not None, "the model has been built"
    schedule = serial_schedule(placement, num_microbatches, name)
    if knowledge.changes is not None:
        schedule = with_recompute(schedule, dict.fromkeys(range(placement.num_stages), Kind.RS))
    if request.offload != OFF:
        schedule = _away(schedule)
    return with_barriers(schedule, request.barriers, knowledge.costs)


def last_resort(
    request: Request, placements: Sequence[Placement], microbatches: int, knowledge: Knowledge, costs: Costs
) -> Iterator[Schedule]:
    """Yield schedules of one microbatch after another, each offloaded if anything may be, in the placements where they keep
    the cap.

    Args:
        request: with the cap.
        placements: at least one.
        microbatches: of the step.
        knowledge: of bytes.
        costs: with the memory that the cap is about.

    Raises:
        UnsupportedError: in none of them.
    """
    least: list[tuple[float, int, Schedule]] = []
    for placement in placements:
        serial = serial_schedule(placement, microbatches, request.schedule, better_full(placement, costs))
        serial = with_barriers(serial if request.offload == OFF else _away(serial), request.barriers, costs)
        more = knowledge.excess(request, serial, costs)
        if not any(more):
            yield serial
        least.append((max(more), more.index(max(more)), serial))
    lacking, device, serial = min(least, key=lambda each: each[0])
    if lacking:
        needed = MemoryCap(knowledge.held(serial, costs)[device], request.in_bytes)
        raise UnsupportedError(
            "cap-unreachable",
            f"no schedule keeps a memory cap of {request.memory_cap}: pipeline rank {device} holds {needed} when one "
            f"microbatch runs after the other; raise the cap to at least {needed}, take smaller microbatches, cut the model "
            "into more stages, or recompute or offload activations",
        )


def _away(schedule: Schedule) -> Schedule:
    """Every forward of a serial order leaves at once, and returns right before its backward."""

    def away(order: Order) -> Order:
        found: list[Action] = []
        recomputed = any(action.kind is Kind.RS for action in order)
        for action in order:
            if action.kind is Kind.RS or (not recomputed and action.kind in (Kind.I, Kind.B)):
                found += [action._replace(kind=kind) for kind in (Kind.RELOAD, Kind.WAIT_RELOAD)]
            found.append(action)
            if action.kind is Kind.F:
                found += [action._replace(kind=kind) for kind in (Kind.OFFLOAD, Kind.WAIT_OFFLOAD)]
        return tuple(found)

    return replace(schedule, orders=tuple(map(away, schedule.orders)))
